"""Layers of a split sequence as one operation with their collectives, which products may hide
(`parallel/overlap/by_parts.py`), for autograd. Those of a whole one are in `sums.py`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron_lightning.parallel.axes import MeshAxis
from megatron_lightning.parallel.overlap.operations import (
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
from megatron_lightning.parallel.overlap.whole import Collectives
from megatron_lightning.parallel.peers.exchange import Exchange


@dataclass(frozen=True, kw_only=True)
class Overlap:
    """What a layer knows of the ways to move a sequence's parts, or to sum what ranks have of it
    whole. Each is held here, so that it lives as long as the layers.
    """

    size: int
    """Ranks."""
    exchange: Exchange | Collectives
    whole: Collectives
    """The way of smaller parts: nothing is hidden by so short a product."""
    least_bytes: int = 0
    held: Exchange | Collectives | None = None
    """What else lives as long: peers may use it still."""

    @classmethod
    def of(cls, exchange: Exchange | Collectives, *, least_bytes: int = 0) -> Overlap:
        """Announce an exchange to the layers, and what smaller parts use."""
        axis = exchange.axis
        same = exchange.kind == Collectives.kind
        whole = exchange if same else announced(axis, Collectives.kind) or Collectives(axis)
        assert isinstance(whole, Collectives)
        for one in (exchange, whole):
            announce(one)
        return cls(size=axis.size, exchange=exchange, whole=whole, least_bytes=least_bytes)

    def __deepcopy__(self, memo: dict[int, Any]) -> Overlap:
        """Itself, as the axis."""
        return self

    def plain(self) -> Overlap:
        """By collectives alone: products that are put off outlive what an exchange lends them."""
        return replace(self, exchange=self.whole, least_bytes=0, held=self.exchange)

    def gathers(self, x: Tensor, dim: int | None) -> bool:
        """Whether the parts `x` can be gathered along `dim` in one operation with the product."""
        return dim is not None and x.dim() > 1 and dim % x.dim() == 0

    def scatters(self, x: Tensor, dim: int | None) -> bool:
        """Whether the product can be reduce-scattered along `dim` in one operation with it."""
        return self.gathers(x, dim) and x.shape[0] % self.size == 0

    def way(self, part_elements: int, dtype: torch.dtype) -> str:
        """Name of the way of parts of this size."""
        way = self._way(part_elements, dtype)
        return _name(way.axis, way.kind)

    def moving(self, part_elements: int, dtype: torch.dtype) -> Exchange | None:
        """What moves parts of this size under products; None: collectives do."""
        way = self._way(part_elements, dtype)
        return None if isinstance(way, Collectives) else way

    def _way(self, part_elements: int, dtype: torch.dtype) -> Exchange | Collectives:
        large = part_elements * dtype.itemsize >= self.least_bytes
        return self.exchange if large else self.whole

    @property
    def way_of_whole(self) -> str:
        """Name of the way where the sequence is whole."""
        return _name(self.whole.axis, self.whole.kind)

    def way_of_sums(self, rows: int, weight: Tensor) -> str:
        """Name of the way of so many rows' products with a row-split weight."""
        return self.way(rows // self.size * weight.shape[0], weight.dtype)


def announce(exchange: Exchange | Collectives) -> None:
    """Let others find an exchange, as long as somebody holds it."""
    exchanges[_name(exchange.axis, exchange.kind)] = exchange


def announced(axis: MeshAxis, *kinds: str) -> Exchange | Collectives | None:
    """What layers of this axis use already, of the first of these kinds that they do."""
    for kind in kinds:
        found = exchanges.get(_name(axis, kind))
        if found is not None and found.axis.group is axis.group:
            return found
    return None


def _name(axis: MeshAxis, kind: str) -> str:
    return f"{axis.name} {axis.group.group_name} {kind}"


def gathered_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, overlap: Overlap, *, sums: bool
) -> Tensor:
    """`F.linear` of all parts: (S/n, ..., in), (out, in) -> (S, ..., out).

    With `sums` the weight's gradient goes to its main gradient.
    """
    way = overlap.way(x.numel(), x.dtype)
    return _GatherLinear.apply(x, weight, bias, way, overlap.size, sums)


def scattered_linear(x: Tensor, weight: Tensor, overlap: Overlap, *, sums: bool) -> Tensor:
    """The own part of the sum of all ranks' `F.linear`: (S, ..., in), (out, in) -> (S/n, ...,
    out).
    """
    way = overlap.way_of_sums(x.numel() // x.shape[-1], weight)
    return _LinearScatter.apply(x, weight, way, overlap.size, sums)


def scattered_product(x: Tensor, weight: Tensor, name: str, size: int) -> Tensor:
    """The forward pass of `scattered_linear` by the way `name`."""
    if torch.compiler.is_compiling():
        return linear_scatter(x, weight, name, size)
    return run_linear_scatter(x, weight, name, size)


def scattered_gradients(
    grad: Tensor,
    x: Tensor,
    weight: Tensor,
    name: str,
    *,
    needs_x: bool,
    needs_weight: bool,
    sums: bool,
) -> tuple[Tensor | None, Tensor | None]:
    """Its backward pass: gradients of x and weight; None: not needed, or in its sum."""
    if not (needs_x or needs_weight):
        return None, None
    factors, how = (grad, x, weight, name), (needs_x, needs_weight, sums)
    if torch.compiler.is_compiling():
        return in_region(linear_scatter_backward, *factors, *how)
    return run_linear_scatter_backward(*factors, *how)


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
        return scattered_product(x, weight, name, size)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        needs_x, needs_weight = ctx.needs_input_grad[:2]
        grad_x, grad_weight = scattered_gradients(
            grad, x, weight, ctx.name, needs_x=needs_x, needs_weight=needs_weight, sums=ctx.sums
        )
        return grad_x, grad_weight, None, None, None
