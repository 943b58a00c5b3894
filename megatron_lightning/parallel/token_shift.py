"""What stands some tokens behind each one, in its document, also where the sequence is cut over
context ranks (`apply_context_parallel` sets the axis then).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron_lightning.parallel.axes import MeshAxis
from megatron_lightning.parallel.collectives import all_gather
from megatron_lightning.parallel.context.slices import joining_index, local_index
from megatron_lightning.parallel.sequence import SequenceInfo


class TokenShift(nn.Module):
    """Shifts fields of a batch, (B, S), which have no gradient. Holds no parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.axis = MeshAxis(name="cp")
        self.contiguous = False  # see `context/slices.py`

    @torch.no_grad()
    @torch.compiler.disable
    def forward(
        self, x: Tensor, sequence: SequenceInfo | None, count: int, fill: float
    ) -> tuple[list[Tensor], Tensor]:
        """(B, S) -> for 1 .. count, (B, S) with what stands that many tokens further in the same
        document, `fill` behind its end; and the sums over the whole samples of x and of each of
        these, (1 + count,).

        `sequence`: documents of the whole samples, None for one each.
        """
        batch, length = x.shape[0], x.shape[1] * self.axis.size
        info = SequenceInfo(((length,),) * batch) if sequence is None else sequence
        whole = self._joined(x, info).view(batch, length)
        document = None if sequence is None else sequence.documents(x.device)
        shifted = [_shift(whole, document, places, fill) for places in range(1, count + 1)]
        sums = torch.stack([one.sum() for one in (whole, *shifted)])
        return [self._own(one, info) for one in shifted], sums

    def _joined(self, x: Tensor, info: SequenceInfo) -> Tensor:
        """The whole samples, one after the other, from all ranks' parts."""
        if self.axis.size == 1:
            return x.flatten()
        ranks = tuple(range(self.axis.size))
        pieces = info.pieces(self.contiguous)
        into, _ = joining_index(pieces, self.axis.size, ranks, x.device, self.contiguous)
        return all_gather(x.flatten(), self.axis, 0).index_select(0, into)

    def _own(self, whole: Tensor, info: SequenceInfo) -> Tensor:
        """This rank's part of whole samples."""
        if self.axis.size == 1:
            return whole
        pieces = info.pieces(self.contiguous)
        index = local_index(pieces, self.axis.size, self.axis.rank, contiguous=self.contiguous)
        return whole.flatten().index_select(0, index.to(whole.device)).view(len(whole), -1)


def _shift(whole: Tensor, document: Tensor | None, places: int, fill: float) -> Tensor:
    if places >= whole.shape[1]:
        return torch.full_like(whole, fill)
    shifted = F.pad(whole[:, places:], (0, places), value=fill)
    if document is None:
        return shifted
    there = F.pad(document[:, places:], (0, places), value=-1)
    return shifted.masked_fill(there != document, fill)
