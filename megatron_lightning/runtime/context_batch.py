"""From a whole micro-batch to the part of its sequence that a context rank holds.

Every rank of a context axis reads the same batch. Labels are shifted and positions are made before
the cut, so a token keeps both wherever it lands. Samples are cut into slices, or they (or the
documents packed into them) into zig-zag parts, see `parallel/context/slices.py`; what doesn't
divide is padded at its end, outside of the loss. Fields are cut along the dim that a table names,
and an unknown field is an error: a guess would train on the wrong tokens.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from megatron_lightning.parallel.axes import MeshAxis
from megatron_lightning.parallel.collectives import all_gather
from megatron_lightning.parallel.context.plan import to_device
from megatron_lightning.parallel.context.slices import local_index, padded_length
from megatron_lightning.parallel.mesh import ParallelMesh
from megatron_lightning.parallel.sequence import HeldTokens, SequenceInfo
from megatron_lightning.runtime.batch import MicroBatch

SEQUENCE_DIMS: Mapping[str, int | None] = {
    "tokens": 1,
    "labels": 1,
    "loss_mask": 1,
    "position_ids": 1,
    "input_ids": 1,
    "token_type_ids": 1,
    "cu_seqlens": None,
    "padding_mask": 1,
    "is_random": None,
    "truncated": None,
}
"""Sequence dim of the fields that this package knows; None: the field has none and stays whole."""

IGNORED_LABEL = -100
_CACHED = 8
"""Ways to cut a batch that are kept: without packed documents there is but one."""


@dataclass(frozen=True, kw_only=True)
class ContextPart:
    """What this rank holds of a micro-batch."""

    share: Tensor
    """Its part of the micro-batch's tokens with a loss, a 0-dim float32 tensor; the shares of a
    context axis add up to 1."""
    held: HeldTokens
    """Which tokens of the whole samples it holds."""
    restore: Tensor
    """(1 or B, S) where each token of the whole sequence lies in the parts of all ranks, joined."""
    axis: MeshAxis
    local_length: int

    def whole(self, output: Any) -> Any:
        """Join every rank's part of a prediction along dim 1. ValueError for a tensor whose dim 1
        isn't the sequence.
        """
        if isinstance(output, Mapping):
            return {key: self.whole(value) for key, value in output.items()}
        if isinstance(output, (list, tuple)):
            return type(output)([self.whole(value) for value in output])
        if not isinstance(output, Tensor):
            return output
        if output.dim() < 2 or output.shape[1] != self.local_length:
            raise ValueError(
                f"predict_step gave a tensor of shape {tuple(output.shape)}: with"
                f" context_parallel_size={self.axis.size} each rank has a part of every sequence,"
                f" here {self.local_length} tokens, and joins predictions along dim 1; return (B,"
                " S, ...) tensors, or predict with context_parallel_size=1"
            )
        joined = all_gather(output.contiguous(), self.axis, 1)
        if len(self.restore) == 1:
            return joined.index_select(1, self.restore[0].to(joined.device))
        rows = zip(joined, self.restore.to(joined.device), strict=True)
        return torch.stack([row.index_select(0, index) for row, index in rows])


class ContextSlicer:
    """Cuts micro-batches for one rank."""

    def __init__(
        self,
        mesh: ParallelMesh,
        *,
        batch_dims: Mapping[str, int],
        sequence_dims: Mapping[str, int | None] = SEQUENCE_DIMS,
        sequence_parallel: bool = False,
        contiguous: bool = False,
    ) -> None:
        self._axis = mesh.cp
        self._contiguous = contiguous
        self._batch_dims = batch_dims
        self._dims = sequence_dims
        self._tensor_size = mesh.tp.size if sequence_parallel else 1

    def __call__(self, micro_batch: MicroBatch) -> MicroBatch:
        """The micro-batch with this rank's part of every field that has a sequence dim.

        Adds `position_ids` where they are missing, and makes `cu_seqlens` those of the padded
        documents. ValueError names a field whose sequence dim is unknown or disagrees.
        """
        if self._axis.size == 1:
            return micro_batch
        data = micro_batch.data
        if not isinstance(data, Mapping):
            raise ValueError(
                f"micro-batch of type {type(data).__name__}: context_parallel_size="
                f"{self._axis.size} cuts fields by name, so make it a dict of tensors, e.g."
                " {'tokens': ..., 'labels': ..., 'loss_mask': ...}"
            )
        length, device = self._sequence_length(data)
        packed = _packed(data, length)
        true = SequenceInfo(((length,),)) if packed is None else packed
        rows = true.lengths[:1] if true.is_uniform else true.lengths
        cuts = _cuts(rows, packed is not None, self._axis.size, self._tensor_size, self._contiguous)
        own = _on_device(cuts, self._axis.rank, device)
        cut = self._cut(data, own, length)
        if "position_ids" not in data:
            cut["position_ids"] = _position_ids(own, length, packed)
        if packed is not None:
            count = len(packed.lengths) if len(cuts.documents) == 1 else 1
            padded = SequenceInfo(cuts.documents * count)
            cut["cu_seqlens"] = padded.cu_seqlens(data["cu_seqlens"].device)
        part = ContextPart(
            share=_share(data, cut, own, length, self._axis.size),
            held=HeldTokens(
                places=_placed(own, length),
                length=length,
                is_padded=own.shape[1] * self._axis.size > length,
            ),
            restore=cuts.restore,
            axis=self._axis,
            local_length=own.shape[1],
        )
        return replace(micro_batch, data=cut, context=part)

    def _sequence_length(self, data: Mapping[str, Any]) -> tuple[int, torch.device]:
        found = {
            key: value
            for key, value in data.items()
            if self._dims.get(key) is not None and isinstance(value, Tensor)
        }
        if not found:
            raise ValueError(
                f"micro-batch with the fields {sorted(data)}: none has a known sequence dim, which"
                f" context_parallel_size={self._axis.size} needs; pass"
                " MegatronStrategy(sequence_dims={field: dim})"
            )
        key = next(iter(found))
        return found[key].shape[self._dims[key] or 0], found[key].device

    def _cut(self, data: Mapping[str, Any], own: Tensor, length: int) -> dict[str, Any]:
        cut: dict[str, Any] = {}
        for key, value in data.items():
            if not isinstance(value, Tensor) or value.dim() == 0:
                cut[key] = value
                continue
            if key not in self._dims:
                raise ValueError(
                    f"batch[{key!r}] of shape {tuple(value.shape)}: its sequence dim is not known,"
                    f" which context_parallel_size={self._axis.size} needs; pass"
                    f" MegatronStrategy(sequence_dims={{{key!r}: 1}}), or None in place of 1 if it"
                    " has none"
                )
            dim = self._dims[key]
            if dim is not None and value.shape[dim] != length:
                raise ValueError(
                    f"batch[{key!r}] of shape {tuple(value.shape)}: dim {dim} has"
                    f" {value.shape[dim]} entries where the sequence has {length} tokens; pass"
                    " MegatronStrategy(sequence_dims={field: dim})"
                )
            cut[key] = value if dim is None else self._take(key, value, dim, own)
        return cut

    def _take(self, key: str, value: Tensor, dim: int, own: Tensor) -> Tensor:
        fill = IGNORED_LABEL if key == "labels" else 0
        if len(own) == 1:
            return _take_row(value, dim, own[0], fill)
        batch_dim = self._batch_dims.get(key, 0)
        if value.shape[batch_dim] == 1:
            value = value.expand(*(len(own) if d == batch_dim else -1 for d in range(value.dim())))
        rows = zip(value.unbind(batch_dim), own, strict=True)
        inside = dim - (batch_dim < dim)
        return torch.stack([_take_row(row, inside, index, fill) for row, index in rows], batch_dim)


@dataclass(frozen=True, kw_only=True, eq=False)
class _Cuts:
    """How samples are cut: host tensors with a row for each sample, or one where all are alike."""

    sources: tuple[Tensor, ...]
    """For every rank (1 or B, S/cp): the token of the whole sequence that it holds at each place,
    -1 for padding."""
    restore: Tensor
    """See `ContextPart`."""
    documents: tuple[tuple[int, ...], ...]
    """The padded ones of each sample."""


@functools.lru_cache(_CACHED)
def _cuts(
    true: tuple[tuple[int, ...], ...], packed: bool, size: int, tensor_size: int, contiguous: bool
) -> _Cuts:
    """For samples of documents of these lengths."""
    if contiguous:  # documents are not cut one by one
        padded = [list(row) for row in true]
    else:
        padded = [[padded_length(n, size) for n in row] for row in true]
    longest = max(sum(row) for row in padded)
    total = padded_length(longest, size, tensor_size, contiguous=contiguous)
    with torch.inference_mode(False):  # kept, for training too
        places = [_places(row, wide) for row, wide in zip(true, padded, strict=True)]
        if packed:
            padded = [row + [total - sum(row)] * (sum(row) < total) for row in padded]
        else:
            padded = [[total]]  # one document, padding and all
        table = torch.stack(
            [torch.cat([place, place.new_full((total - len(place),), -1)]) for place in places]
        )  # (1 or B, padded S)
        rows = tuple(tuple(row) for row in padded)
        pieces = [SequenceInfo((row,)).pieces(contiguous) for row in rows]
        sources = []
        for rank in range(size):
            index = [local_index(one, size, rank, contiguous=contiguous) for one in pieces]
            sources.append(table.gather(1, torch.stack(index)))
        restore = _restore(sources, sum(true[0]))
    return _Cuts(sources=tuple(sources), restore=restore, documents=rows)


@functools.lru_cache(_CACHED)
def _on_device(cuts: _Cuts, rank: int, device: torch.device) -> Tensor:
    """What a rank holds."""
    return to_device(cuts.sources[rank], torch.int64, device)


def _packed(data: Mapping[str, Any], length: int) -> SequenceInfo | None:
    if data.get("cu_seqlens") is None:
        return None
    info = SequenceInfo.from_cu_seqlens(data["cu_seqlens"])
    if sum(info.lengths[0]) != length:
        raise ValueError(
            f"batch['cu_seqlens'] ends at {sum(info.lengths[0])}, but the sequence has {length}"
            " tokens; make tokens after the last document a document of their own, outside of the"
            " loss"
        )
    return info


def _places(lengths: tuple[int, ...], padded: list[int]) -> Tensor:
    """For every place of the padded documents, the token there: (padded S,), -1 for padding."""
    tokens = torch.arange(sum(lengths)).split(list(lengths))
    whole = pad_sequence(list(tokens), batch_first=True, padding_value=-1)
    wide = torch.cat([whole, whole.new_full((len(whole), max(padded)), -1)], dim=1)
    return torch.cat([row[:size] for row, size in zip(wide, padded, strict=True)])


def _take_row(value: Tensor, dim: int, index: Tensor, fill: int) -> Tensor:
    taken = value.index_select(dim, index.clamp(min=0))
    shape = [1] * value.dim()
    shape[dim] = -1
    return taken.masked_fill((index < 0).view(shape), fill)


def _position_ids(own: Tensor, length: int, packed: SequenceInfo | None) -> Tensor:
    """(1 or B, S/cp): positions within documents; 0 for padding."""
    if packed is None:
        return own.clamp(min=0)
    positions = packed.positions(own.device)
    return positions[: len(own)].gather(1, own.clamp(min=0)).masked_fill(own < 0, 0)


def _placed(own: Tensor, length: int) -> Tensor:
    """(1 or B, S/cp): places with padding put after the sequence, so that no two tokens share
    one.
    """
    after = torch.arange(own.shape[1], device=own.device) + length
    return torch.where(own < 0, after, own)


def _restore(sources: list[Tensor], length: int) -> Tensor:
    joined = torch.cat(sources, dim=1)  # (1 or B, padded S)
    place = torch.arange(joined.shape[1]).expand_as(joined)
    restore = torch.zeros(len(joined), length + 1, dtype=torch.int64)
    restore.scatter_(1, torch.where(joined < 0, length, joined), place)
    return restore[:, :length]


def _share(
    whole: Mapping[str, Any], cut: Mapping[str, Any], own: Tensor, length: int, size: int
) -> Tensor:
    """Part of the tokens with a loss: by the mask, else by labels that aren't ignored, else of all
    tokens. Equal parts where no token has one.
    """
    if isinstance(whole.get("loss_mask"), Tensor):
        local, total = cut["loss_mask"].float().sum(), whole["loss_mask"].float().sum()
    elif isinstance(whole.get("labels"), Tensor):
        local, total = (cut["labels"] >= 0).float().sum(), (whole["labels"] >= 0).float().sum()
    else:
        local, total = (own >= 0).float().sum(), own.new_tensor(len(own) * length).float()
    equal = torch.full_like(total, 1.0 / size)
    return torch.where(total > 0, local / total.clamp(min=1e-30), equal)
