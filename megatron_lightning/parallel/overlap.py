"""Layers of a split sequence whose products hide their collectives (`parallel/overlapped.py`), for
autograd.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron_lightning.parallel.exchange import Exchange
from megatron_lightning.parallel.mesh import MeshAxis
from megatron_lightning.parallel.overlap_operations import (
    exchanges,
    gather_linear,
    gather_linear_backward,
    in_region,
    linear_scatter,
    linear_scatter_backward,
    run_gather_linear,
    run_gather_linear_backward,
    run_linear_scatter,
    run_linear_scatter_backward,
)


@dataclass(frozen=True, kw_only=True)
class Overlap:
    """What a layer knows of the exchange that it uses."""

    name: str
    size: int
    """Ranks."""
    exchange: Exchange
    """Held, so that it lives as long as the layers."""
    least_bytes: int = 0
    """Smaller parts of a sequence take the plain way: nothing is hidden by so short a product."""

    @classmethod
    def of(cls, exchange: Exchange, *, least_bytes: int = 0) -> Overlap:
        """Announce an exchange to the layers."""
        name = _name(exchange.axis)
        exchanges[name] = exchange
        return cls(name=name, size=exchange.axis.size, exchange=exchange, least_bytes=least_bytes)

    def __deepcopy__(self, memo: dict[int, Any]) -> Overlap:
        """Itself, as the axis."""
        return self

    def gathers(self, x: Tensor, dim: int | None) -> bool:
        """Whether to gather the parts `x` along `dim` in this way."""
        if dim is None or dim % x.dim():
            return False
        return x.dim() > 1 and x.numel() * x.element_size() >= self.least_bytes

    def scatters(self, x: Tensor, weight: Tensor, dim: int | None) -> bool:
        """Whether to reduce-scatter the product along `dim` in this way."""
        if dim is None or dim % x.dim() or x.dim() == 1 or x.shape[0] % self.size:
            return False
        elements = x.numel() // x.shape[-1] * weight.shape[0] // self.size
        return elements * x.element_size() >= self.least_bytes


def announced(axis: MeshAxis) -> Exchange | None:
    """The exchange that layers of this axis use already."""
    found = exchanges.get(_name(axis))
    return found if found is not None and found.axis.group is axis.group else None


def release_exchanges() -> None:
    """Give back what exchanges hold; each rank for itself, when nothing is under way any more."""
    for exchange in list(exchanges.values()):
        exchange.release()


def _name(axis: MeshAxis) -> str:
    return f"{axis.name} {axis.group.group_name}"


def gathered_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, overlap: Overlap, *, sums: bool
) -> Tensor:
    """`F.linear` of all parts: (S/n, ..., in), (out, in) -> (S, ..., out).

    With `sums` the weight's gradient goes to its main gradient.
    """
    return _GatherLinear.apply(x, weight, bias, overlap.name, overlap.size, sums)


def scattered_linear(x: Tensor, weight: Tensor, overlap: Overlap, *, sums: bool) -> Tensor:
    """The own part of the sum of all ranks' `F.linear`: (S, ..., in), (out, in) -> (S/n, ...,
    out).
    """
    return _LinearScatter.apply(x, weight, overlap.name, overlap.size, sums)


class _GatherLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        name: str,
        size: int,
        sums: bool,
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.name, ctx.size, ctx.sums = name, size, sums
        if torch.compiler.is_compiling():
            return gather_linear(x, weight, bias, name, size)
        return run_gather_linear(x, weight, bias, name, size)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        grad_x = grad_weight = grad_bias = None
        if needs_x or needs_weight:
            how = needs_x, needs_weight, ctx.sums
            if torch.compiler.is_compiling():
                grad_x, grad_weight = in_region(
                    gather_linear_backward, grad, x, weight, ctx.name, *how
                )
            else:
                grad_x, grad_weight = run_gather_linear_backward(grad, x, weight, ctx.name, *how)
        if needs_bias:
            grad_bias = grad.flatten(0, -2).sum(dim=0)
        return grad_x, grad_weight, grad_bias, None, None, None


class _LinearScatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, name: str, size: int, sums: bool) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.name, ctx.sums = name, sums
        if torch.compiler.is_compiling():
            return linear_scatter(x, weight, name, size)
        return run_linear_scatter(x, weight, name, size)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        needs_x, needs_weight = ctx.needs_input_grad[:2]
        grad_x = grad_weight = None
        if needs_x or needs_weight:
            how = needs_x, needs_weight, ctx.sums
            if torch.compiler.is_compiling():
                grad_x, grad_weight = in_region(
                    linear_scatter_backward, grad, x, weight, ctx.name, *how
                )
            else:
                grad_x, grad_weight = run_linear_scatter_backward(grad, x, weight, ctx.name, *how)
        return grad_x, grad_weight, None, None, None
