"""Dispatchers for experts on several ranks, and how a network gets them.

| name | forth | back | needs of the host |
|---|---|---|---|
| all_to_all | each row to the ranks of its expert | the same way | counts of rows, once a layer |
| all_gather | all tokens to all ranks | sums are scattered | number of own rows, once a layer |
| deep_ep | each token to the ranks of its experts, once | sums | numbers of rows, once a layer |

With `pad_to_capacity` the numbers of rows are known beforehand, and all_to_all waits for nothing.
Where tensor ranks hold equal tokens (no sequence parallelism), each takes a part of them to the
experts first, so that none is computed twice.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron_lightning.config.expert import DispatcherName, ExpertConfig
from megatron_lightning.layers.moe.dispatcher import Dispatched, Known, TokenDispatcher
from megatron_lightning.layers.moe.experts import GroupedExperts
from megatron_lightning.layers.moe.layer import MoELayer
from megatron_lightning.layers.moe.permute import (
    Order,
    count,
    first_rows,
    permute,
    permute_probs,
    sort_by_expert,
    unpermute,
)
from megatron_lightning.layers.moe.remote_deep_ep import DeepEPBuffer, DeepEPDispatcher
from megatron_lightning.layers.moe.routing import Routing
from megatron_lightning.layers.moe.side_stream import SideStream
from megatron_lightning.parallel.axes import MeshAxis
from megatron_lightning.parallel.collectives import (
    all_gather,
    gather_dim,
    own_part,
    reduce_scatter_dim,
    scatter_dim,
)
from megatron_lightning.parallel.expert import (
    ExpertRanks,
    RowCounts,
    begin_row_counts,
    by_expert,
    exchange_counts,
    return_rows,
    send_rows,
)
from megatron_lightning.parallel.mesh import ParallelMesh


def apply_expert_parallel(
    network: nn.Module, mesh: ParallelMesh, config: ExpertConfig, *, sequence_parallel: bool
) -> None:
    """Give every layer of experts in `network` the dispatcher of this layout, in place.

    Without sequence parallelism tensor ranks hold equal tokens; with it each holds its own.
    """
    ranks = ExpertRanks.of(mesh)
    overlaps = config.overlap_shared_experts and mesh.device.type == "cuda"
    side = SideStream() if overlaps else None
    buffer = DeepEPBuffer(ranks)
    for module in network.modules():
        if isinstance(module, MoELayer) and module.shared_experts is not None:
            module.side = side
        if isinstance(module, GroupedExperts):
            module.linear_fc2.adds_bias = ranks.tensor.is_first
        if not hasattr(module, "dispatcher"):
            continue
        layer = cast(Any, module)
        inner: Any = layer.dispatcher
        if ranks.both.size > 1:
            inner = _between_ranks(config.dispatcher, inner.num_experts, ranks, buffer)
        if mesh.tp.size > 1 and not sequence_parallel:
            inner = SharedTokensDispatcher(inner, mesh.tp)
        layer.dispatcher = inner


def _between_ranks(
    name: DispatcherName, num_experts: int, ranks: ExpertRanks, buffer: DeepEPBuffer
) -> TokenDispatcher:
    if name == "deep_ep":
        return DeepEPDispatcher(num_experts, ranks, buffer)
    kind = AllToAllDispatcher if name == "all_to_all" else AllGatherDispatcher
    return kind(num_experts, ranks)


@dataclass(frozen=True, kw_only=True, eq=False)
class _Travelled:
    """How rows went, for the way back."""

    order: Order
    """Of this rank's tokens by expert."""
    received: Order
    """Of received rows by local expert."""
    counts: RowCounts


class AllToAllDispatcher:
    """Each row travels to the ranks that hold its expert, and its output back."""

    def __init__(self, num_experts: int, ranks: ExpertRanks) -> None:
        self.num_experts = num_experts
        self.ranks = ranks

    def known(self, *, padded: bool) -> Known:
        """See `TokenDispatcher.known`."""
        return Known.EACH if padded else Known.NOTHING

    def dispatch(self, hidden: Tensor, routing: Routing) -> Dispatched:
        """See `TokenDispatcher.dispatch`."""
        order = sort_by_expert(routing, self.num_experts)
        ranks = self.ranks
        incoming = exchange_counts(order.counts, ranks)  # (ranks, E_local)
        pending = None
        if routing.capacity is None:
            pending = begin_row_counts(order.counts, incoming, ranks)
        rows = permute(hidden, order)  # (R, H), launched while the counts are on their way
        probs = permute_probs(routing.probs, order)
        if pending is None:
            assert routing.capacity is not None
            block = routing.capacity * (self.num_experts // ranks.expert.size)
            _check_padded_alike(incoming, block)
            counts = RowCounts(sent=[block] * ranks.expert.size, received=[block] * ranks.both.size)
        else:
            counts = pending.wait()
        rows = send_rows(rows[: counts.num_sent], counts, ranks)
        probs = send_rows(probs[: counts.num_sent], counts, ranks)
        received = _received_order(incoming, counts.num_received)
        capacity = routing.capacity
        return Dispatched(
            tokens=_never_empty(permute(rows, received)),
            probs=_never_empty(permute_probs(probs.unsqueeze(1), received)),
            counts=received.counts,
            each=None if capacity is None else capacity * ranks.both.size,
            kept=_Travelled(order=order, received=received, counts=counts),
        )

    def combine(self, output: Tensor, dispatched: Dispatched) -> Tensor:
        """See `TokenDispatcher.combine`."""
        kept: _Travelled = dispatched.kept
        rows = unpermute(output[: kept.counts.num_received], kept.received)
        rows = return_rows(rows, kept.counts, self.ranks)
        missing = len(kept.order.slot_of_row) - len(rows)  # dropped slots, which are not read
        return unpermute(F.pad(rows, (0, 0, 0, missing)) if missing else rows, kept.order)


def _check_padded_alike(incoming: Tensor, block: int) -> None:
    """ValueError where another rank has filled up its experts to another number. Looking costs a
    wait for the device, so on CUDA nobody does.
    """
    if incoming.is_cuda:
        return
    sent = incoming.sum(1).tolist()
    if sent != [block] * len(sent):
        raise ValueError(
            f"pad_to_capacity=True: ranks fill up to {sorted({block, *sent})} rows, since their"
            " batches have different lengths; make them equal, or set pad_to_capacity=False"
        )


def _received_order(incoming: Tensor, num_rows: int) -> Order:
    place, source = by_expert(incoming, num_rows)
    return Order(row_of_slot=place.unsqueeze(1), slot_of_row=source, counts=incoming.sum(0))


def _never_empty(rows: Tensor) -> Tensor:
    """At least one row: kernels for grouped products may not take none."""
    return rows if len(rows) else F.pad(rows, (0, 0) * (rows.dim() - 1) + (0, 1))


class AllGatherDispatcher:
    """Every rank gets all tokens, computes those of its experts, and sums are scattered back."""

    def __init__(self, num_experts: int, ranks: ExpertRanks) -> None:
        self.num_experts = num_experts
        self.ranks = ranks

    def known(self, *, padded: bool) -> Known:
        """See `TokenDispatcher.known`."""
        return Known.NOTHING

    def dispatch(self, hidden: Tensor, routing: Routing) -> Dispatched:
        """See `TokenDispatcher.dispatch`."""
        axis = self.ranks.both
        local = self.num_experts // self.ranks.expert.size
        first = self.ranks.expert.rank * local
        experts = routing.experts
        if routing.dropped is not None:
            experts = experts.masked_fill(routing.dropped, self.num_experts)
        longest, num_rows = self._sizes(experts, first, local)
        missing = longest - len(hidden)
        experts = F.pad(experts, (0, 0, 0, missing), value=self.num_experts)
        experts = all_gather(experts, axis, 0) - first
        elsewhere = (experts < 0) | (experts >= local)
        probs = gather_dim(_longer(routing.probs, missing), axis, 0)
        experts = experts.masked_fill(elsewhere, 0)
        order = sort_by_expert(Routing(probs=probs, experts=experts, dropped=elsewhere), local)
        order = first_rows(order, num_rows)
        tokens = gather_dim(_longer(hidden, missing), axis, 0)  # (ranks * T, H)
        return Dispatched(
            tokens=permute(tokens, order),
            probs=permute_probs(probs, order),
            counts=order.counts,
            kept=(order, len(hidden)),
        )

    def combine(self, output: Tensor, dispatched: Dispatched) -> Tensor:
        """See `TokenDispatcher.combine`."""
        order, length = dispatched.kept
        sums = unpermute(output, order)  # (ranks * T, H), of the experts of this rank
        return reduce_scatter_dim(sums, self.ranks.both, 0)[:length]

    def _sizes(self, experts: Tensor, first: int, local: int) -> tuple[int, int]:
        """(most tokens of any rank: batches of data ranks may differ; rows for the experts of this
        one). The host waits for them.
        """
        counts = count(experts.flatten(), self.num_experts + 1)
        counts[-1] = len(experts)  # in place of the dropped ones
        every = all_gather(counts.unsqueeze(0), self.ranks.both, 0)  # (ranks, E + 1)
        own = every[:, first : first + local].sum()
        longest, num_rows = torch.stack([every[:, -1].max(), own]).tolist()
        return longest, num_rows


class SharedTokensDispatcher:
    """For ranks that hold equal tokens: each brings its part to the experts, and all get all."""

    def __init__(self, inner: TokenDispatcher, axis: MeshAxis) -> None:
        self.inner = inner
        self.axis = axis

    def known(self, *, padded: bool) -> Known:
        """See `TokenDispatcher.known`; parts of a capacity are unequal."""
        return self.inner.known(padded=False)

    def dispatch(self, hidden: Tensor, routing: Routing) -> Dispatched:
        """See `TokenDispatcher.dispatch`."""
        missing = -len(hidden) % self.axis.size
        dropped = routing.dropped
        if missing and dropped is None:
            dropped = torch.zeros_like(routing.experts, dtype=torch.bool)
        if dropped is not None:
            dropped = own_part(F.pad(dropped, (0, 0, 0, missing), value=True), self.axis, 0)
        part = Routing(
            probs=scatter_dim(_longer(routing.probs, missing), self.axis, 0),
            experts=own_part(_longer(routing.experts, missing), self.axis, 0),
            dropped=dropped,  # parts of an expert's capacity are unequal: no padding to it
        )
        tokens = scatter_dim(_longer(hidden, missing), self.axis, 0)
        dispatched = self.inner.dispatch(tokens, part)
        return replace(dispatched, kept=(dispatched, len(hidden)))

    def combine(self, output: Tensor, dispatched: Dispatched) -> Tensor:
        """See `TokenDispatcher.combine`."""
        inner, length = dispatched.kept
        part = self.inner.combine(output, inner)
        return gather_dim(part, self.axis, 0, backward="split")[:length]


def _longer(rows: Tensor, missing: int) -> Tensor:
    return F.pad(rows, (0, 0, 0, missing)) if missing else rows
