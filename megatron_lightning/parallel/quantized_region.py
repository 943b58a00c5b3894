"""Low-precision linear layers within compiled regions.

An operation in a compiled region is given tensors only: it finds what the layer holds by the
weight's address. Its effects (rounded weights, largest values, the weight's sum) are hidden from
the compiler: see `main_gradient.py` for the `ticket`.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron_lightning.precision.operands import Operand

if TYPE_CHECKING:
    from megatron_lightning.parallel.quantized import QuantizedProducts

_by_address: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()


def announce(products: QuantizedProducts, weight: Tensor) -> None:
    """Let operations find what the layer of `weight` holds; again when its memory has moved."""
    products.weight_held = weight
    _by_address[weight.data_ptr()] = products


def _products_of(weight: Tensor) -> QuantizedProducts:
    found = _by_address.get(weight.data_ptr())
    if found is None or found.weight_held.data_ptr() != weight.data_ptr():
        raise RuntimeError(
            f"quantization: a compiled layer's weight of shape {tuple(weight.shape)} was given"
            " other memory since the batch began; set RuntimeConfig(compile_layers=False)"
        )
    return found


@torch.library.custom_op("megatron_lightning::quantized_linear", mutates_args=())
def quantized_linear(
    x: Tensor, weight: Tensor, keeps: bool, layout: str, parts: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """(..., in), (out, in) -> (..., out), and with `keeps` values and scale of the transposed input
    for the backward pass. `layout`: of the recipe's scales; `parts`: contiguous, largest absolute
    values of parts of the input, None: they are to be found.
    """
    products = _products_of(weight)
    rows = x.reshape(-1, x.shape[-1])
    itself, transposed = products.input(
        rows, part=products.splits_sequence, wanted=(True, keeps), parts=parts
    )
    factor = products.weight(weight, (True, False)).itself
    assert itself is not None
    assert factor is not None
    y = products.recipe.product(itself, factor, x.dtype, forward=True)
    y = y.view(*x.shape[:-1], y.shape[1])
    if transposed is None:
        return y, x.new_empty(0), x.new_empty(0)
    values, scale = transposed
    assert scale is not None
    # Results of an operation may be overwritten once they are used.
    return y, values, scale.clone() if products.recipe.lends_scales else scale


@quantized_linear.register_fake
def _(
    x: Tensor, weight: Tensor, keeps: bool, layout: str, parts: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    y = x.new_empty((*x.shape[:-1], weight.shape[0]))
    if not keeps:
        return y, x.new_empty(0), x.new_empty(0)
    columns = x.shape[-1]
    rows = x.numel() // columns
    values = x.new_empty((columns, (rows + 15) // 16 * 16), dtype=torch.float8_e4m3fn)
    if layout == "tensor":
        scale = x.new_empty((), dtype=torch.float32)
    elif layout == "rows":
        scale = x.new_empty((columns, 1), dtype=torch.float32)
    else:
        scale = x.new_empty(((rows + 127) // 128, columns), dtype=torch.float32).t()
    return y, values, scale


@torch.library.custom_op("megatron_lightning::quantized_gradients", mutates_args=())
def quantized_gradients(
    grad: Tensor,
    values: Tensor,
    scale: Tensor,
    weight: Tensor,
    ticket: Tensor,
    needs_x: bool,
    needs_weight: bool,
    sums: bool,
    parts: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Gradient of (..., out) and what `quantized_linear` kept -> gradients of the input and of the
    weight; empty where it isn't needed, or with `sums` has gone to its sum. `parts`: of the
    gradient, see `quantized_linear`.
    """
    products = _products_of(weight)
    rows = grad.reshape(-1, grad.shape[-1])
    itself, of_rows = products.gradient(rows, (needs_x, needs_weight), None, parts)
    grad_x, grad_weight = grad.new_empty(0), grad.new_empty(0)
    if needs_x:
        factor = products.weight(weight, (False, True)).transposed
        assert itself is not None
        assert factor is not None
        grad_x = products.recipe.product(itself, factor, grad.dtype, forward=False)
        grad_x = grad_x.view(*grad.shape[:-1], grad_x.shape[1])
    if needs_weight:
        assert of_rows is not None
        made = products.weight_gradient(weight, of_rows, Operand(values, scale), sums=sums)
        grad_weight = grad_weight if made is None else made
    return grad_x, grad_weight


@quantized_gradients.register_fake
def _(
    grad: Tensor,
    values: Tensor,
    scale: Tensor,
    weight: Tensor,
    ticket: Tensor,
    needs_x: bool,
    needs_weight: bool,
    sums: bool,
    parts: Tensor | None,
) -> tuple[Tensor, Tensor]:
    grad_x = grad.new_empty((*grad.shape[:-1], weight.shape[1]) if needs_x else (0,))
    made = needs_weight and not sums
    return grad_x, torch.empty_like(weight) if made else grad.new_empty(0)


class RegionLinear(torch.autograd.Function):
    """`(x, weight, bias, sums, keeps, layout, takes_parts)` -> the layer's output.

    Largest values of rows are found by the region, which does it where it writes the rows.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        sums: bool,
        keeps: bool,
        layout: str,
        takes_parts: bool,
    ) -> Tensor:
        """See `quantized_linear`."""
        parts = largest_of_rows(x) if takes_parts else None
        y, values, scale = quantized_linear(x, weight, keeps, layout, parts)
        ctx.save_for_backward(weight, values, scale)
        ctx.sums, ctx.takes_parts = sums, takes_parts
        return y if bias is None else y + bias

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """See `quantized_gradients`."""
        weight, values, scale = ctx.saved_tensors
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        grad_x, grad_weight = region_gradients(
            grad,
            weight,
            values,
            scale,
            needs_x=needs_x,
            needs_weight=needs_weight,
            sums=ctx.sums,
            parts=largest_of_rows(grad) if ctx.takes_parts else None,
        )
        grad_bias = grad.flatten(0, -2).sum(dim=0) if needs_bias else None
        return grad_x, grad_weight, grad_bias, None, None, None, None


def region_gradients(
    grad: Tensor,
    weight: Tensor,
    values: Tensor,
    scale: Tensor,
    *,
    needs_x: bool,
    needs_weight: bool,
    sums: bool,
    parts: Tensor | None,
) -> tuple[Tensor | None, Tensor | None]:
    """`quantized_gradients` of a region, None for what isn't needed or has gone to its sum."""
    if not needs_x and not needs_weight:
        return None, None
    sums = sums and needs_x  # an operation without a result would be left out
    ticket = torch.empty(0, device=grad.device)
    grad_x, grad_weight = quantized_gradients(
        grad, values, scale, weight, ticket, needs_x, needs_weight, sums, parts
    )
    made = needs_weight and not sums
    return grad_x if needs_x else None, grad_weight if made else None


def largest_of_rows(x: Tensor) -> Tensor:
    """Largest absolute values along the last dim, in the dtype of `x`: those of its rounded values,
    even where the region has not rounded them yet.
    """
    return x.abs().amax(dim=-1).contiguous()
