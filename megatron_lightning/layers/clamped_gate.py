"""The clamped gated unit of GPT-OSS (arXiv 2508.10925), which keeps nothing but its input.

g * sigmoid(alpha * g) * (u + 1) with g = min(gate, limit) and u within +-limit.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


def clamped_gate(inner: Tensor, alpha: float, limit: float) -> Tensor:
    """(..., 2, F), gate first -> (..., F)."""
    result: Tensor = _ClampedGate.apply(inner, alpha, limit)
    return result


class _ClampedGate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, inner: Tensor, alpha: float, limit: float) -> Tensor:
        ctx.save_for_backward(inner)
        ctx.alpha, ctx.limit = alpha, limit
        gate, up = _clamped(inner, limit)
        return gate * torch.sigmoid(alpha * gate) * (up + 1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (inner,) = ctx.saved_tensors
        gate, up = _clamped(inner, ctx.limit)
        share = torch.sigmoid(ctx.alpha * gate)
        slope = share * (1 + ctx.alpha * gate * (1 - share))
        inside = inner.abs() <= ctx.limit
        inside.select(-2, 0).logical_or_(inner.select(-2, 0) < 0)  # the gate has no lower bound
        both = torch.stack((grad * (up + 1) * slope, grad * gate * share), dim=-2)
        return both * inside, None, None


def _clamped(inner: Tensor, limit: float) -> tuple[Tensor, Tensor]:
    gate, up = inner.unbind(-2)
    return gate.clamp(max=limit), up.clamp(-limit, limit)
