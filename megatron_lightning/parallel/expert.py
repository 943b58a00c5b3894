"""Expert parallelism: rows of tokens that travel to the ranks of their experts and back.

Experts lie on the expert view of the mesh (parallel folding, arXiv 2504.14960): the ranks of `ep`
hold different experts and those of `etp` different columns of the same ones, whatever tensor,
context or data ranks they are. Here are the moves, over the joined axis `ep_etp` in which expert
ranks vary slowest, with exact gradients: the backward of each is the move the other way. What is
moved is decided in `layers/moe/remote.py`; how much, by one small exchange of counts.

The groups of these collectives are theirs alone (`parallel/axes.py`): gradients are reduced at any
time of a backward pass, and one group's collectives need one order on all ranks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron_lightning.parallel.axes import MeshAxis
from megatron_lightning.parallel.expert_clock import ExchangeClock
from megatron_lightning.parallel.mesh import ParallelMesh


@dataclass(frozen=True, kw_only=True)
class ExpertRanks:
    """Where a layer's experts are: on `expert` x `tensor` = `both` ranks."""

    expert: MeshAxis
    """Ranks with different experts."""
    tensor: MeshAxis
    """Ranks with different columns of the same experts."""
    both: MeshAxis
    clock: ExchangeClock
    """Durations of exchanges of rows, for who wants to know them."""

    @classmethod
    def of(cls, mesh: ParallelMesh) -> ExpertRanks:
        """From the mesh."""
        return cls(
            expert=mesh.axis("ep"),
            tensor=mesh.axis("etp"),
            both=mesh.axis("ep_etp"),
            clock=ExchangeClock(mesh.device),
        )

    @property
    def copies(self) -> int:
        """Ranks that each row is sent to."""
        return self.tensor.size


@dataclass(frozen=True, kw_only=True)
class RowCounts:
    """How many rows travel, known to the host."""

    sent: list[int]
    """For each expert rank, those of this rank (before they are copied to expert tensor ranks)."""
    received: list[int]
    """From each rank of the joined axis."""

    @property
    def num_sent(self) -> int:
        """Rows of this rank that travel."""
        return sum(self.sent)

    @property
    def num_received(self) -> int:
        """Rows for the experts of this rank."""
        return sum(self.received)


def exchange_counts(counts: Tensor, ranks: ExpertRanks) -> Tensor:
    """(E,) rows of this rank for each expert -> (ranks, E_local) rows of each rank for the experts
    of this one. One small collective; the host waits for nothing.
    """
    blocks = counts.view(ranks.expert.size, 1, -1).expand(-1, ranks.copies, -1).contiguous()
    received = torch.empty_like(blocks)
    dist.all_to_all_single(received, blocks, group=ranks.both.group)
    return received.view(ranks.both.size, -1)


class PendingCounts:
    """Sums of counts on their way to the host. Whoever launches work between making this and
    `wait` hides the way.
    """

    def __init__(self, sums: Tensor, split: int) -> None:
        """`sums` (n,) int64 on the device: what is sent to `split` expert ranks, then what is
        received.
        """
        self._split = split
        self._event = None
        if sums.is_cuda:
            self._host = torch.empty(sums.shape, dtype=sums.dtype, pin_memory=True)
            self._host.copy_(sums, non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record()
        else:
            self._host = sums

    def wait(self) -> RowCounts:
        """Let the host wait for the numbers."""
        if self._event is not None:
            self._event.synchronize()
        values = self._host.tolist()
        return RowCounts(sent=values[: self._split], received=values[self._split :])


def begin_row_counts(counts: Tensor, received: Tensor, ranks: ExpertRanks) -> PendingCounts:
    """Start to bring to the host how many rows of `counts` (E,) are sent and of `received`
    (ranks, E_local) come.
    """
    sent = counts.view(ranks.expert.size, -1).sum(1)
    return PendingCounts(torch.cat([sent, received.sum(1)]), ranks.expert.size)


def send_rows(rows: Tensor, counts: RowCounts, ranks: ExpertRanks) -> Tensor:
    """(num_sent, ...) rows sorted by expert -> (num_received, ...), by the rank they come from."""
    return _Send.apply(rows, counts, ranks)


def return_rows(rows: Tensor, counts: RowCounts, ranks: ExpertRanks) -> Tensor:
    """(num_received, ...) -> (num_sent, ...): undoes `send_rows`, summed over expert tensor
    ranks.
    """
    return _Return.apply(rows, counts, ranks)


class _Send(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, counts: RowCounts, ranks: ExpertRanks) -> Tensor:
        ctx.counts, ctx.ranks = counts, ranks
        return _spread(rows, counts, ranks)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return _collect(grad, ctx.counts, ctx.ranks), None, None


class _Return(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, counts: RowCounts, ranks: ExpertRanks) -> Tensor:
        ctx.counts, ctx.ranks = counts, ranks
        return _collect(rows, counts, ranks)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return _spread(grad, ctx.counts, ctx.ranks), None, None


def _spread(rows: Tensor, counts: RowCounts, ranks: ExpertRanks) -> Tensor:
    copies = ranks.copies
    if copies > 1:  # the blocks for the expert tensor ranks of one expert rank lie side by side
        blocks = rows.split(counts.sent)
        rows = torch.cat([block for block in blocks for _ in range(copies)])
    sizes = [size for size in counts.sent for _ in range(copies)]
    return _all_to_all(rows, sizes, counts.received, ranks)


def _collect(rows: Tensor, counts: RowCounts, ranks: ExpertRanks) -> Tensor:
    copies = ranks.copies
    sizes = [size for size in counts.sent for _ in range(copies)]
    back = _all_to_all(rows, counts.received, sizes, ranks)
    if copies == 1:
        return back
    blocks = back.split([size * copies for size in counts.sent])
    return torch.cat([block.unflatten(0, (copies, -1)).sum(0) for block in blocks])


def _all_to_all(rows: Tensor, sizes: list[int], received: list[int], ranks: ExpertRanks) -> Tensor:
    result = rows.new_empty(sum(received), *rows.shape[1:])
    with ranks.clock.span():
        dist.all_to_all_single(result, rows.contiguous(), received, sizes, group=ranks.both.group)
    return result


def by_expert(received: Tensor, num_rows: int) -> tuple[Tensor, Tensor]:
    """Order of received rows by local expert, and within one by the rank they come from.

    `received` (ranks, E_local) counts of rows that lie by rank, then by expert; `num_rows` their
    sum. Returns (place in which each received row ends, received row of each place), both
    (num_rows,). The host waits for nothing.
    """
    lengths = received.flatten()
    begins = lengths.cumsum(0) - lengths  # of each chunk, as it came
    sorted_lengths = received.t().flatten()
    ends = (sorted_lengths.cumsum(0) - sorted_lengths).view_as(received.t()).t().flatten()
    shift = torch.repeat_interleave(ends - begins, lengths, output_size=num_rows)
    row = torch.arange(num_rows, device=received.device)
    place = row + shift
    source = torch.empty_like(row).scatter_(0, place, row)
    return place, source
