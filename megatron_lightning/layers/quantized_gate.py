"""A gated MLP in FP8 within a compiled region: two linear layers and silu(gate) * up between them.

Who writes the unit's product, and who writes the gradient of its input, finds the largest value of
it, so that the cast needs no pass of its own for that.
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
    largest_of_rows,
    products_of,
    quantized_linear,
    region_gradients,
)
from megatron_lightning.precision.fp8_casts import Cast, cast_both
from megatron_lightning.precision.kernels import choices
from megatron_lightning.precision.operands import Operand

if TYPE_CHECKING:
    from megatron_lightning.layers.linear import Linear

_PLACES = 1024
"""Largest values that a tensor's is the largest of."""
_HALF = 2
"""Bytes of bfloat16 and float16."""


def _as_parts(x: Tensor) -> Tensor:
    parts = x.new_zeros(_PLACES, dtype=torch.float32)
    if x.numel():
        parts[0] = x.abs().amax().float()
    return parts


@torch.library.custom_op("megatron_lightning::gated_silu_largest", mutates_args=())
def gated_silu_largest(inner: Tensor) -> tuple[Tensor, Tensor]:
    """`gated_silu`, and largest absolute values of parts of it, float32."""
    if kernels.can_run(inner):
        from megatron_lightning.layers.kernels import gated_silu_largest as kernel

        return kernel.forward(inner.contiguous(), _PLACES)
    y = gated_silu(inner)
    return y, _as_parts(y)


@gated_silu_largest.register_fake
def _(inner: Tensor) -> tuple[Tensor, Tensor]:
    y = inner.new_empty((*inner.shape[:-2], inner.shape[-1]))
    return y, inner.new_empty(_PLACES, dtype=torch.float32)


@torch.library.custom_op("megatron_lightning::gated_silu_backward_largest", mutates_args=())
def gated_silu_backward_largest(grad: Tensor, inner: Tensor) -> tuple[Tensor, Tensor]:
    """`gated_silu_backward`, and largest absolute values of parts of it, float32."""
    if kernels.can_run(inner):
        from megatron_lightning.layers.kernels import gated_silu_largest as kernel

        return kernel.backward(grad.contiguous(), inner.contiguous(), _PLACES)
    grad_inner = gated_silu_backward(grad, inner)
    return grad_inner, _as_parts(grad_inner)


@gated_silu_backward_largest.register_fake
def _(grad: Tensor, inner: Tensor) -> tuple[Tensor, Tensor]:
    grad_inner = torch.empty_like(inner, memory_format=torch.contiguous_format)
    return grad_inner, inner.new_empty(_PLACES, dtype=torch.float32)


@torch.library.custom_op("megatron_lightning::gated_quantized_gradients", mutates_args=())
def gated_quantized_gradients(
    grad: Tensor,
    inner: Tensor,
    values: Tensor,
    scale: Tensor,
    weight: Tensor,
    ticket: Tensor,
    needs_x: bool,
    needs_weight: bool,
    sums: bool,
) -> tuple[Tensor, Tensor]:
    """`quantized_gradients` of `gated_silu_backward(grad, inner)`, which is not written in more
    than eight bits where a kernel casts it as it is computed.
    """
    products = products_of(weight)
    parts, cast, shape = _cast_of_gradient(grad, inner)
    itself, of_rows = products.gradient(shape, (needs_x, needs_weight), None, parts, cast)
    grad_x = grad_weight = None
    if needs_x:
        factor = products.weight(weight, (False, True)).transposed
        assert itself is not None
        assert factor is not None
        grad_x = products.recipe.product(itself, factor, grad.dtype, forward=False)
        grad_x = grad_x.view(*grad.shape[:-1], grad_x.shape[1])
    if needs_weight:
        assert of_rows is not None
        x = Operand(values, scale)
        grad_weight = products.weight_gradient(weight, of_rows, x, sums=sums)
    return (
        grad.new_empty(0) if grad_x is None else grad_x,
        grad.new_empty(0) if grad_weight is None else grad_weight,
    )


@gated_quantized_gradients.register_fake
def _(
    grad: Tensor,
    inner: Tensor,
    values: Tensor,
    scale: Tensor,
    weight: Tensor,
    ticket: Tensor,
    needs_x: bool,
    needs_weight: bool,
    sums: bool,
) -> tuple[Tensor, Tensor]:
    grad_x = grad.new_empty((*grad.shape[:-1], weight.shape[1]) if needs_x else (0,))
    made = needs_weight and not sums
    return grad_x, torch.empty_like(weight) if made else grad.new_empty(0)


def _cast_of_gradient(grad: Tensor, inner: Tensor) -> tuple[Tensor, Cast, Tensor]:
    """Largest absolute values of parts of `gated_silu_backward`, what casts it, and (T, 2 F) of its
    shape.
    """
    if kernels.can_run(inner) and inner.element_size() == _HALF:
        from megatron_lightning.layers.kernels import gated_silu_fp8 as kernel

        grad, inner = grad.contiguous(), inner.contiguous()
        parts = kernel.largest_gradient(grad, inner)
        return parts, partial(kernel.cast, grad, inner), inner.view(-1, 2 * inner.shape[-1])
    rows = gated_silu_backward(grad, inner).flatten(-2).flatten(0, -2).contiguous()
    return _as_parts(rows), partial(cast_both, rows), rows


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
        grad_product, grad_second = region_gradients(
            grad,
            second,
            *kept_too,
            needs_x=needs_inner,
            needs_weight=needs_second,
            sums=sums_second,
            parts=None if choices.SEARCHES_FOREIGN else largest_of_rows(grad),  # of a later layer
        )
        if needs_inner:
            assert grad_product is not None
            options = {"needs_x": needs_x, "needs_weight": needs_first, "sums": sums_first}
            if choices.GATE_CASTS:
                grad_x, grad_first = _gate_gradients(grad_product, inner, first, *kept, **options)
            else:
                grad_inner, parts = gated_silu_backward_largest(grad_product, inner)
                rows = grad_inner.flatten(-2)
                grad_x, grad_first = region_gradients(rows, first, *kept, parts=parts, **options)
        return grad_x, grad_first, grad_second, None, None, None, None, None


def _gate_gradients(
    grad: Tensor,
    inner: Tensor,
    weight: Tensor,
    values: Tensor,
    scale: Tensor,
    *,
    needs_x: bool,
    needs_weight: bool,
    sums: bool,
) -> tuple[Tensor | None, Tensor | None]:
    """`region_gradients` of `gated_quantized_gradients`."""
    sums = sums and needs_x  # an operation without a result would be left out
    ticket = torch.empty(0, device=grad.device)
    grad_x, grad_weight = gated_quantized_gradients(
        grad, inner, values, scale, weight, ticket, needs_x, needs_weight, sums
    )
    made = needs_weight and not sums
    return grad_x if needs_x else None, grad_weight if made else None
