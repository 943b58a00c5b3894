"""A linear layer behind silu(gate) * up that keeps what enters the unit, and not its product.

The product is as wide as the MLP, and only the weight's gradient needs it: the unit's backward pass
has both its halves at hand and writes the product once more beside their gradients, at the price of
one store. (Megatron-Core computes an activation again in a pass of its own before that of the layer
behind; here it comes after, since the gradient of the product doesn't need the product.)

Where the layer behind is one operation with a collective (`parallel/overlap/layers.py`), which
takes its input as it is, the product is made by a launch of its own before that.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron_lightning.layers import kernels
from megatron_lightning.layers.gated_silu import gated_silu, gated_silu_backward
from megatron_lightning.parallel.axes import MeshAxis
from megatron_lightning.parallel.column import DefersWeightGradient
from megatron_lightning.parallel.main_gradient import add_or_put_off, weight_gradient
from megatron_lightning.parallel.overlap.layers import (
    Overlap,
    scattered_gradients,
    scattered_product,
)
from megatron_lightning.parallel.overlap.sums import summed_product
from megatron_lightning.utils.tensors import no_view


def gated_linear(
    inner: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    sink: DefersWeightGradient | None = None,
    *,
    sums: bool = False,
) -> Tensor:
    """`F.linear(gated_silu(inner), weight, bias)`: (..., 2, F), (out, F) -> (..., out).

    With a `sink` the weight's gradient may be put off; with `sums` it goes to its main gradient.
    """
    return _GatedLinear.apply(inner, weight, bias, sink, sums, None)


def gated_summed_linear(inner: Tensor, weight: Tensor, overlap: Overlap, *, sums: bool) -> Tensor:
    """`summed_linear(gated_silu(inner), weight, overlap)`: (..., 2, F/n), (out, F/n) -> (..., out).

    With `sums` the weight's gradient goes to its main gradient.
    """
    return _GatedLinear.apply(inner, weight, None, None, sums, overlap.way_of_whole)


def gated_scattered_linear(
    inner: Tensor, weight: Tensor, overlap: Overlap, *, sums: bool
) -> Tensor:
    """`scattered_linear(gated_silu(inner), weight, overlap)`: (S, ..., 2, F/n), (out, F/n) ->
    (S/n, ..., out).

    With `sums` the weight's gradient goes to its main gradient.
    """
    way = overlap.way_of_sums(inner.numel() // inner.shape[-1] // 2, weight)
    return _GatedScatter.apply(inner, weight, way, overlap.size, sums)


@torch.library.custom_op("megatron_lightning::gated_linear_gradients", mutates_args=())
def gated_linear_gradients(grad: Tensor, inner: Tensor, weight: Tensor, ticket: Tensor) -> Tensor:
    """(..., out), (..., 2, F), (out, F) -> gradient of `inner`; that of `weight` goes to its sum.

    `ticket`: a new empty tensor, see `parallel/main_gradient.py`.
    """
    grad_inner, product = _gradient_and_product(grad @ weight, inner)
    add_or_put_off(weight, grad, product)
    return grad_inner


@gated_linear_gradients.register_fake
def _(grad: Tensor, inner: Tensor, weight: Tensor, ticket: Tensor) -> Tensor:
    return torch.empty_like(inner, memory_format=torch.contiguous_format)


def _gradient_and_product(grad: Tensor, inner: Tensor) -> tuple[Tensor, Tensor]:
    """Gradient of the product, which may be overwritten, and (..., 2, F) -> gradient of the latter,
    and the product.
    """
    if torch.compiler.is_compiling() or not kernels.can_run(inner):
        return gated_silu_backward(grad, inner), gated_silu(inner)
    from megatron_lightning.layers.kernels import gated_silu as kernel

    grad, inner = grad.contiguous(), inner.contiguous()
    return kernel.backward(grad, inner, product=grad), grad


class _GatedLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        inner: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        sink: DefersWeightGradient | None,
        sums: bool,
        way: str | None,
    ) -> Tensor:
        ctx.save_for_backward(inner, weight)
        ctx.sink, ctx.sums = sink, sums
        if way is not None:
            return summed_product(gated_silu(inner), weight, way)
        return no_view(F.linear(gated_silu(inner), weight, bias))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        inner, weight = ctx.saved_tensors
        needs_inner, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        grad_inner = grad_weight = grad_bias = None
        if ctx.sums and needs_inner and needs_weight and torch.compiler.is_compiling():
            ticket = torch.empty(0, device=grad.device)
            grad_inner = gated_linear_gradients(grad, inner, weight, ticket)
        else:
            product = None
            if needs_inner:
                grad_inner, product = _gradient_and_product(grad @ weight, inner)
            if needs_weight:
                product = gated_silu(inner) if product is None else product
                grad_weight = _weight_gradient(ctx, grad, product, weight)
        if needs_bias:
            grad_bias = grad.flatten(0, -2).sum(dim=0)
        return grad_inner, grad_weight, grad_bias, None, None, None


class _GatedScatter(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, inner: Tensor, weight: Tensor, name: str, size: int, sums: bool
    ) -> Tensor:
        ctx.save_for_backward(inner, weight)
        ctx.name, ctx.sums = name, sums
        return scattered_product(gated_silu(inner), weight, name, size)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        inner, weight = ctx.saved_tensors
        needs_inner, needs_weight = ctx.needs_input_grad[:2]
        grad_product, grad_weight = scattered_gradients(
            grad,
            gated_silu(inner),
            weight,
            ctx.name,
            needs_x=needs_inner,
            needs_weight=needs_weight,
            sums=ctx.sums,
        )
        grad_inner = None if grad_product is None else gated_silu_backward(grad_product, inner)
        return grad_inner, grad_weight, None, None, None


def _weight_gradient(ctx: Any, grad: Tensor, product: Tensor, weight: Tensor) -> Tensor | None:
    if ctx.sink is not None and ctx.sink.defer(grad, product, _WHOLE, None):
        return None
    if ctx.sums:
        return weight_gradient(grad, product, weight)
    return grad.flatten(0, -2).t() @ product.flatten(0, -2)


_WHOLE = MeshAxis(name="whole")
