"""A gated MLP in FP8 within a compiled region: two linear layers and silu(gate) * up between them.

Who writes the unit's product finds its largest value, so that the cast needs no pass of its own for
that. The gradient of the unit's input is cast as it is computed, where a kernel can do that.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from megatron_lightning.layers import kernels
from megatron_lightning.layers.gated_silu import gated_silu, gated_silu_backward
from megatron_lightning.layers.hooks import has_hooks
from megatron_lightning.parallel.quantized.region import (
    GRADIENTS,
    define,
    gradient_shapes,
    largest_of_rows,
    quantized_linear,
    region_gradients,
    run_gradients,
)
from megatron_lightning.precision.fp8_casts import Cast

if TYPE_CHECKING:
    from megatron_lightning.layers.linear import Linear

_PLACES = 1024
"""Largest values that a tensor's is the largest of."""
_HALF = 2
"""Bytes of bfloat16 and float16."""


@torch.library.custom_op("megatron_lightning::gated_silu_largest", mutates_args=())
def gated_silu_largest(inner: Tensor) -> tuple[Tensor, Tensor]:
    """`gated_silu`, and largest absolute values of parts of it, float32."""
    if kernels.can_run(inner):
        from megatron_lightning.layers.kernels import gated_silu_fp8

        return gated_silu_fp8.largest_product(inner.contiguous(), _PLACES)
    y = gated_silu(inner)
    parts = y.new_zeros(_PLACES, dtype=torch.float32)
    if y.numel():
        parts[0] = y.abs().amax().float()
    return y, parts


@gated_silu_largest.register_fake
def _(inner: Tensor) -> tuple[Tensor, Tensor]:
    y = inner.new_empty((*inner.shape[:-2], inner.shape[-1]))
    return y, inner.new_empty(_PLACES, dtype=torch.float32)


def _gradient_of(grad: Tensor, inner: Tensor) -> tuple[Tensor, Tensor | None, Cast | None]:
    """`gated_silu_backward`; or where a kernel casts it as it is computed, what has its shape, its
    parts' largest absolute values, and what casts it.
    """
    if not kernels.can_run(inner) or inner.element_size() != _HALF:
        return gated_silu_backward(grad, inner), None, None
    from megatron_lightning.layers.kernels import gated_silu_fp8

    grad, inner = grad.contiguous(), inner.contiguous()
    parts = gated_silu_fp8.largest_gradient(grad, inner)
    return inner, parts, partial(gated_silu_fp8.cast_gradient, grad, inner)


def _run_gradients(grad: Tensor, *given: Any) -> tuple[Tensor, Tensor]:
    *shared, inner = given
    of_inner, parts, cast = _gradient_of(grad, inner)
    return run_gradients(of_inner.flatten(-2), *shared, parts=parts, cast=cast)


gated_quantized_gradients = define(
    f"gated_quantized_gradients{GRADIENTS}, Tensor inner) -> (Tensor, Tensor)",
    _run_gradients,
    gradient_shapes,
)
"""`quantized_gradients` of `gated_silu_backward(grad, inner)`, which is not written in more than
eight bits where a kernel can cast it as it is computed.
"""


def fits(*layers: nn.Module, activation: nn.Module) -> bool:
    """Whether the layers are nothing but products in FP8 that take largest values from others,
    within a compiled region, and no hook is to see what passes between them.
    """
    if not torch.compiler.is_compiling() or has_hooks(activation):
        return False
    return all(_is_plain(layer) for layer in layers)


def _is_plain(layer: Any) -> bool:
    products = layer.quantized
    if products is None or not products.in_regions or not products.recipe.takes_parts:
        return False
    borders = (layer.before, layer.after, layer.bias, layer.adapters)
    return all(border is None for border in borders) and not has_hooks(layer)


def gated_mlp(x: Tensor, first: Linear, second: Linear) -> Tensor:
    """second(silu(gate) * up) of gate, up = first(x): (..., in) -> (..., out). See `fits`."""
    weights = [layer.weight.view(-1, layer.weight.shape[-1]) for layer in (first, second)]
    trains = [layer.weight.requires_grad and torch.is_grad_enabled() for layer in (first, second)]
    assert first.quantized is not None
    layout = first.quantized.recipe.layout
    sums = first.sums_weight_gradient, second.sums_weight_gradient
    return _GatedMLP.apply(x, *weights, *sums, *trains, layout)


class _GatedMLP(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        first: Tensor,
        second: Tensor,
        sums_first: bool,
        sums_second: bool,
        keeps_first: bool,
        keeps_second: bool,
        layout: str,
    ) -> Tensor:
        inner, *kept = quantized_linear(x, first, keeps_first, layout, largest_of_rows(x))
        inner = inner.unflatten(-1, (2, -1))
        product, parts = gated_silu_largest(inner)
        y, *kept_too = quantized_linear(product, second, keeps_second, layout, parts)
        ctx.save_for_backward(inner, first, *kept, second, *kept_too)
        ctx.sums = sums_first, sums_second
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        inner, first, *kept = ctx.saved_tensors[:4]
        second, *kept_too = ctx.saved_tensors[4:]
        needs_x, needs_first, needs_second = ctx.needs_input_grad[:3]
        needs_inner = needs_x or needs_first
        sums_first, sums_second = ctx.sums
        grad_x = grad_first = None
        # A later layer wrote `grad`: its largest value is the operation's to search for.
        grad_product, grad_second = region_gradients(
            grad,
            second,
            *kept_too,
            None,
            needs_x=needs_inner,
            needs_weight=needs_second,
            sums=sums_second,
        )
        if needs_inner:
            assert grad_product is not None
            grad_x, grad_first = region_gradients(
                grad_product,
                first,
                *kept,
                inner,
                needs_x=needs_x,
                needs_weight=needs_first,
                sums=sums_first,
                operation=gated_quantized_gradients,
            )
        return grad_x, grad_first, grad_second, None, None, None, None, None
