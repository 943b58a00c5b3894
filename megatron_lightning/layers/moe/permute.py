"""Rows of tokens, sorted by expert: the order, and the two moves between tokens and rows.

Each move is the other's backward, and both only gather: sums over a token's K rows have a fixed
order, so that results don't depend on the timing of atomic additions.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron_lightning.layers import kernels
from megatron_lightning.layers.moe.routing import Routing


@dataclass(frozen=True, kw_only=True, eq=False)
class Order:
    """Which row holds which of a token's K places ("slots", numbered t * K + k)."""

    row_of_slot: Tensor
    """(T, K) int64; of dropped slots any row."""
    slot_of_row: Tensor
    """(R,) int64; of rows without a token any slot."""
    counts: Tensor
    """(E,) int64 rows of each expert, on the device; rows behind their sum hold nothing."""
    dropped: Tensor | None = None
    """(T, K) bool: slots without a row."""
    empty: Tensor | None = None
    """(R,) bool: rows without a token (padding, and what is left over by dropped slots)."""


def sort_by_expert(routing: Routing, num_experts: int) -> Order:
    """Rows by expert, within one in the order of tokens.

    R is T * K, dropped slots being the last rows, or with a capacity E * capacity. The host waits
    for nothing.
    """
    experts, dropped = routing.experts, routing.dropped
    sorted_by = experts.flatten()
    if dropped is not None:
        sorted_by = torch.where(dropped.flatten(), num_experts, sorted_by)
    in_order, slot_of_row = sorted_by.sort(stable=True)
    counts = count(sorted_by, num_experts + 1)[:num_experts]
    rows = torch.arange(len(slot_of_row), device=experts.device)
    row_of_slot = torch.empty_like(rows)
    if routing.capacity is None:
        row_of_slot[slot_of_row] = rows
        empty = None if dropped is None else in_order == num_experts
        return Order(
            row_of_slot=row_of_slot.view_as(experts),
            slot_of_row=slot_of_row,
            counts=counts,
            dropped=dropped,
            empty=empty,
        )
    first = torch.cat([counts.cumsum(0) - counts, counts.new_zeros(1)])  # (E + 1,)
    place = in_order * routing.capacity + rows - first[in_order]
    total = num_experts * routing.capacity
    place = torch.where(in_order == num_experts, total, place)
    row_of_slot[slot_of_row] = place.clamp(max=total - 1)
    padded = torch.full((total + 1,), -1, dtype=torch.int64, device=experts.device)
    padded = padded.scatter_(0, place, slot_of_row)[:total]
    return Order(
        row_of_slot=row_of_slot.view_as(experts),
        slot_of_row=padded.clamp(min=0),
        counts=torch.full_like(counts, routing.capacity),
        dropped=dropped,
        empty=padded < 0,
    )


def first_rows(order: Order, num_rows: int) -> Order:
    """The order without rows behind the first `num_rows` (at least one), which hold nothing."""
    num_rows = max(num_rows, 1)
    assert order.empty is not None
    return replace(
        order,
        row_of_slot=order.row_of_slot.clamp(max=num_rows - 1),
        slot_of_row=order.slot_of_row[:num_rows],
        empty=order.empty[:num_rows],
    )


def count(values: Tensor, size: int) -> Tensor:
    """How often each of 0..size-1 occurs, (size,) int64; without a wait of the host."""
    ones = torch.ones_like(values)
    return torch.zeros(size, dtype=torch.int64, device=values.device).scatter_add_(0, values, ones)


def permute(hidden: Tensor, order: Order) -> Tensor:
    """(T, H) -> (R, H): each row its token; empty rows are zero."""
    return _ToRows.apply(hidden, order)


def unpermute(rows: Tensor, order: Order) -> Tensor:
    """(R, H) -> (T, H): each token the sum of its rows; empty rows count for nothing."""
    return _ToTokens.apply(rows, order)


def permute_probs(probs: Tensor, order: Order) -> Tensor:
    """(T, K) -> (R,): each row its slot's probability; empty rows get 0."""
    return _ProbsToRows.apply(probs, order)


def _to_rows(hidden: Tensor, order: Order) -> Tensor:
    num_slots = order.row_of_slot.shape[1]
    rows = hidden.index_select(0, order.slot_of_row // num_slots)
    return rows if order.empty is None else rows.masked_fill(order.empty.unsqueeze(1), 0.0)


def _to_tokens(rows: Tensor, order: Order) -> Tensor:
    if kernels.can_run(rows):
        from megatron_lightning.layers.kernels import row_sums

        return row_sums.sum_rows(rows.contiguous(), order.row_of_slot, order.dropped)
    picked = rows.index_select(0, order.row_of_slot.flatten())  # (T * K, H)
    picked = picked.unflatten(0, order.row_of_slot.shape)
    if order.dropped is not None:
        picked = picked.masked_fill(order.dropped.unsqueeze(-1), 0.0)
    if rows.dtype in (torch.float32, torch.float64):
        return picked.sum(1)
    return picked.sum(1, dtype=torch.float32).to(rows.dtype)


class _ToRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, order: Order) -> Tensor:
        ctx.order = order
        return _to_rows(hidden, order)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _to_tokens(grad, ctx.order), None


class _ToTokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, order: Order) -> Tensor:
        ctx.order = order
        return _to_tokens(rows, order)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _to_rows(grad, ctx.order), None


class _ProbsToRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, probs: Tensor, order: Order) -> Tensor:
        ctx.order = order
        rows = probs.flatten().index_select(0, order.slot_of_row)
        return rows if order.empty is None else rows.masked_fill(order.empty, 0.0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        order = ctx.order
        back = grad.index_select(0, order.row_of_slot.flatten()).view_as(order.row_of_slot)
        return back if order.dropped is None else back.masked_fill(order.dropped, 0.0), None
