"""A low-precision linear layer for autograd, where it is no operation of a compiled region
(`region.py` has those).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron_lightning.parallel.axes import MeshAxis
from megatron_lightning.parallel.quantized.borders import gradients, joins_parts, product
from megatron_lightning.precision.operands import Operand
from megatron_lightning.utils.tensors import no_view

if TYPE_CHECKING:
    from megatron_lightning.parallel.quantized.products import QuantizedProducts


class QuantizedLinear(torch.autograd.Function):
    """`(x, weight, bias, products, axis, dim, sums, keeps, scatters)` -> the layer's output."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        products: QuantizedProducts,
        axis: MeshAxis,
        dim: int | None,
        sums: bool,
        keeps: bool,
        scatters: int,
    ) -> Tensor:
        """See `borders.product`."""
        part = joins_parts(x, products.recipe, axis.size, dim)
        y, transposed = product(
            products, x, weight, axis, dim, part=part, keeps=keeps, scatters=scatters
        )
        shape = torch.Size((*y.shape[:-1], x.shape[-1]))
        rows = torch.Size((y.numel() // y.shape[-1], y.shape[-1]))
        ctx.noise = None if products.noise is None else products.noise(shape, rows, y.device)
        _save(ctx, weight, transposed)
        ctx.products, ctx.axis, ctx.dim, ctx.part, ctx.sums = products, axis, dim, part, sums
        ctx.scatters = scatters
        return no_view(y if bias is None else y.add_(bias))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """See `borders.gradients`."""
        weight, transposed = _saved(ctx)
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        grad_x, grad_weight = gradients(
            ctx.products,
            grad,
            weight,
            transposed,
            ctx.axis,
            ctx.dim,
            part=ctx.part,
            needs_x=needs_x,
            needs_weight=needs_weight,
            sums=ctx.sums,
            noise=ctx.noise,
            scatters=ctx.scatters,
        )
        grad_bias = grad.flatten(0, -2).sum(dim=0) if needs_bias else None
        return grad_x, grad_weight, grad_bias, None, None, None, None, None, None


def _save(ctx: Any, weight: Tensor, transposed: Operand | None) -> None:
    """Keep tensors where hooks of recomputation and offloading see them."""
    values, scale = (None, None) if transposed is None else transposed
    ctx.save_for_backward(weight, values, scale)


def _saved(ctx: Any) -> tuple[Tensor, Operand | None]:
    weight, values, scale = ctx.saved_tensors
    return weight, None if values is None else Operand(values, scale)
