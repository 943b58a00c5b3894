"""Experts on other ranks by the kernels of DeepEP (NVLink, and RDMA between nodes).

A token travels once to each rank that holds any of its experts, with their weights, and is sorted
by expert there; on the way back a rank's outputs for a token travel as one sum. Uses the public
`deep_ep.Buffer` (its version 1, which version 2 keeps). Run with a stand-in for that package only:
neither it nor its hardware was at hand.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron_lightning.layers.moe.dispatcher import Dispatched, Known
from megatron_lightning.layers.moe.permute import (
    Order,
    first_rows,
    permute,
    permute_probs,
    sort_by_expert,
    unpermute,
)
from megatron_lightning.layers.moe.routing import Routing
from megatron_lightning.parallel.expert import ExpertRanks


@dataclass(eq=False)
class DeepEPBuffer:
    """The communication buffer that a rank's layers share, made at their first use. Making it is a
    collective of the experts' ranks.
    """

    ranks: ExpertRanks
    _buffer: Any = None
    _hidden_bytes: int = 0

    def get(self, hidden: Tensor) -> Any:
        """The `deep_ep.Buffer` for rows like these, (T, H). ValueError for a dtype that DeepEP does
        not take.
        """
        if hidden.is_cuda and hidden.dtype is not torch.bfloat16:
            raise ValueError(
                f'expert.dispatcher="deep_ep" with hidden states in {hidden.dtype}: DeepEP moves'
                " bfloat16; train with precision='bf16-mixed', or choose \"all_to_all\""
            )
        wanted = hidden.shape[1] * max(hidden.element_size(), 2)
        if self._buffer is None or wanted > self._hidden_bytes:
            self._buffer, self._hidden_bytes = self._make(wanted), wanted
        return self._buffer

    def _make(self, hidden_bytes: int) -> Any:
        from deep_ep import Buffer  # pyright: ignore[reportMissingImports]

        axis = self.ranks.both
        configs = (Buffer.get_dispatch_config(axis.size), Buffer.get_combine_config(axis.size))
        sizes = [
            max(getattr(config, name)(hidden_bytes, axis.size) for config in configs)
            for name in ("get_nvl_buffer_size_hint", "get_rdma_buffer_size_hint")
        ]
        return Buffer(axis.group, *sizes)

    def __deepcopy__(self, memo: dict[int, Any]) -> DeepEPBuffer:
        """Itself: copies of a network (weight averaging) share the groups too."""
        return self


@dataclass(eq=False)
class _Travelled:
    """What the way back needs."""

    buffer: Any
    handle: Any = None
    counts: list[int] = field(default_factory=list)
    """Rows of each local expert."""
    order: Order | None = None
    num_tokens: int = 0
    """Tokens that came."""


class DeepEPDispatcher:
    """Tokens travel by DeepEP; experts must be whole on a rank (no expert tensor parallelism)."""

    def __init__(self, num_experts: int, ranks: ExpertRanks, buffer: DeepEPBuffer) -> None:
        self.num_experts, self.ranks, self.buffer = num_experts, ranks, buffer

    def known(self, *, padded: bool) -> Known:
        """See `TokenDispatcher.known`."""
        return Known.NOTHING

    def dispatch(self, hidden: Tensor, routing: Routing) -> Dispatched:
        """See `TokenDispatcher.dispatch`. The host waits for the numbers of rows, once a layer."""
        way = _Travelled(self.buffer.get(hidden))
        experts = routing.experts
        if routing.dropped is not None:
            experts = experts.masked_fill(routing.dropped, -1)
        with self.ranks.clock.span():
            tokens, probs, chosen = _Send.apply(
                hidden, routing.probs.float(), experts, self.num_experts, way
            )
        way.num_tokens = len(tokens)
        if not len(tokens):  # a row that belongs to no expert: kernels may not take none
            tokens, probs = F.pad(tokens, (0, 0, 0, 1)), F.pad(probs, (0, 0, 0, 1))
            chosen = F.pad(chosen, (0, 0, 0, 1), value=-1)
        elsewhere = chosen < 0
        local = Routing(probs=probs, experts=chosen.masked_fill(elsewhere, 0), dropped=elsewhere)
        order = sort_by_expert(local, self.num_experts // self.ranks.expert.size)
        way.order = first_rows(order, sum(way.counts))
        return Dispatched(
            tokens=permute(tokens, way.order),
            probs=permute_probs(probs, way.order),
            counts=way.order.counts,
            kept=way,
        )

    def combine(self, output: Tensor, dispatched: Dispatched) -> Tensor:
        """See `TokenDispatcher.combine`."""
        way: _Travelled = dispatched.kept
        assert way.order is not None
        sums = unpermute(output, way.order)[: way.num_tokens]
        with self.ranks.clock.span():
            return _Return.apply(sums, way)


class _Send(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, probs: Tensor, experts: Tensor, num_experts: int, way: _Travelled
    ) -> tuple[Tensor, Tensor, Tensor]:
        ctx.way = way
        per_rank, per_node, per_expert, is_in_rank, _ = way.buffer.get_dispatch_layout(
            experts, num_experts
        )
        tokens, chosen, weights, way.counts, way.handle, _ = way.buffer.dispatch(
            hidden.contiguous(),
            topk_idx=experts,
            topk_weights=probs.contiguous(),
            num_tokens_per_rank=per_rank,
            num_tokens_per_rdma_rank=per_node,
            is_token_in_rank=is_in_rank,
            num_tokens_per_expert=per_expert,
        )
        ctx.mark_non_differentiable(chosen)
        return tokens, weights, chosen

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, grad_weights: Tensor, _: Any) -> tuple[Any, ...]:
        way = ctx.way
        grad_hidden, grad_probs, _ = way.buffer.combine(
            grad.contiguous(), way.handle, topk_weights=grad_weights.float().contiguous()
        )
        return grad_hidden, grad_probs, None, None, None


class _Return(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, sums: Tensor, way: _Travelled) -> Tensor:
        ctx.way = way
        combined, _, _ = way.buffer.combine(sums.contiguous(), way.handle)
        return combined

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        way = ctx.way
        rows, *_ = way.buffer.dispatch(grad.contiguous(), handle=way.handle)
        return rows, None
