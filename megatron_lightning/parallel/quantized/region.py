"""Low-precision linear layers within compiled regions.

An operation in a compiled region is given tensors only: it finds what the layer holds by the
weight's address. Its effects (rounded weights, largest values, the weight's sum) are hidden from
the compiler: see `main_gradient.py` for the `ticket`.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron_lightning.parallel.axes import MeshAxis
from megatron_lightning.parallel.collectives import all_reduce_
from megatron_lightning.parallel.quantized.borders import gradients, product
from megatron_lightning.precision.formats import padded
from megatron_lightning.precision.fp8_casts import Cast
from megatron_lightning.precision.operands import Operand

if TYPE_CHECKING:
    from megatron_lightning.parallel.quantized.products import QuantizedProducts

Borders = tuple[int, bool, int, str]
"""(`gathers`, `part`, `scatters`, `reduces`) of `quantized_linear`."""
_WHOLE = MeshAxis(name="whole")

_by_address: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()


def announce(products: QuantizedProducts, weight: Tensor) -> None:
    """Let operations find what the layer of `weight` holds; again when its memory has moved."""
    products.weight_held = weight
    _by_address[weight.data_ptr()] = products


def products_of(weight: Tensor) -> QuantizedProducts:
    """What the layer of `weight` holds."""
    found = _by_address.get(weight.data_ptr())
    if found is None or found.weight_held.data_ptr() != weight.data_ptr():
        raise RuntimeError(
            f"quantization: a compiled layer's weight of shape {tuple(weight.shape)} was given"
            " other memory since the batch began; set RuntimeConfig(compile_layers=False)"
        )
    return found


def _input_border(
    products: QuantizedProducts, gathers: int, reduces: str
) -> tuple[MeshAxis, int | None]:
    """The axis and dim of an input that is gathered, or the axis over which its gradient is
    summed.
    """
    if gathers > 1:
        return products.tensor_axis, 0
    return products.tensor_axis if reduces == "gradient" else _WHOLE, None


def _run_linear(
    x: Tensor,
    weight: Tensor,
    keeps: bool,
    layout: str,
    parts: Tensor | None,
    gathers: int = 1,
    part: bool = False,
    scatters: int = 1,
    reduces: str = "",
) -> tuple[Tensor, Tensor, Tensor]:
    products = products_of(weight)
    axis, dim = _input_border(products, gathers, reduces)
    y, transposed = product(
        products, x, weight, axis, dim, part=part, keeps=keeps, parts=parts, scatters=scatters
    )
    if reduces == "output":
        y = all_reduce_(y.contiguous(), products.tensor_axis)
    if transposed is None:
        return y, x.new_empty(0), x.new_empty(0)
    values, scale = transposed
    assert scale is not None
    # Results of an operation may be overwritten once they are used.
    return y, values, scale.clone() if products.recipe.lends_scales else scale


def _linear_shapes(
    x: Tensor,
    weight: Tensor,
    keeps: bool,
    layout: str,
    parts: Tensor | None,
    gathers: int = 1,
    part: bool = False,
    scatters: int = 1,
    reduces: str = "",
) -> tuple[Tensor, Tensor, Tensor]:
    y = x.new_empty((x.shape[0] * gathers // scatters, *x.shape[1:-1], weight.shape[0]))
    if not keeps:
        return y, x.new_empty(0), x.new_empty(0)
    columns = x.shape[-1]
    rows = x.numel() // columns * (1 if part else gathers)
    values = x.new_empty((columns, padded(rows)), dtype=torch.float8_e4m3fn)
    if layout == "tensor":
        scale = x.new_empty((), dtype=torch.float32)
    elif layout == "rows":
        scale = x.new_empty((columns, 1), dtype=torch.float32)
    else:
        scale = x.new_empty(((rows + 127) // 128, columns), dtype=torch.float32).t()
    return y, values, scale


def run_gradients(
    grad: Tensor,
    values: Tensor,
    scale: Tensor,
    weight: Tensor,
    ticket: Tensor,
    needs_x: bool,
    needs_weight: bool,
    sums: bool,
    parts: Tensor | None,
    gathers: int = 1,
    part: bool = False,
    scatters: int = 1,
    reduces: str = "",
    cast: Cast | None = None,
) -> tuple[Tensor, Tensor]:
    """What `quantized_gradients` does. `cast`: see `borders.gradients`."""
    products = products_of(weight)
    axis, dim = _input_border(products, gathers, reduces)
    grad_x, grad_weight = gradients(
        products,
        grad,
        weight,
        Operand(values, scale),
        axis,
        dim,
        part=part,
        needs_x=needs_x,
        needs_weight=needs_weight,
        sums=sums,
        parts=parts,
        cast=cast,
        scatters=scatters,
    )
    return (
        grad.new_empty(0) if grad_x is None else grad_x,
        grad.new_empty(0) if grad_weight is None else grad_weight,
    )


def gradient_shapes(
    grad: Tensor,
    values: Tensor,
    scale: Tensor,
    weight: Tensor,
    ticket: Tensor,
    needs_x: bool,
    needs_weight: bool,
    sums: bool,
    given: Tensor | None,
    gathers: int = 1,
    part: bool = False,
    scatters: int = 1,
    reduces: str = "",
) -> tuple[Tensor, Tensor]:
    """Of what comes of GRADIENTS, a tensor more, and borders."""
    rows = grad.shape[0] * scatters // gathers
    shape = (rows, *grad.shape[1:-1], weight.shape[1]) if needs_x else (0,)
    grad_x = grad.new_empty(shape)
    made = needs_weight and not sums
    return grad_x, torch.empty_like(weight) if made else grad.new_empty(0)


_library = torch.library.Library("megatron_lightning", "FRAGMENT")


def define(schema: str, run: Callable[..., Any], shapes: Callable[..., Any]) -> Any:
    """An operation that regions call as it is. By hand: `torch.library.custom_op` costs the host
    some ten microseconds more at each call.
    """
    _library.define(schema)
    name = schema.split("(")[0]
    _library.impl(name, run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"megatron_lightning::{name}", shapes, lib=_library)
    return getattr(torch.ops.megatron_lightning, name).default


GRADIENTS = (
    "(Tensor grad, Tensor values, Tensor scale, Tensor weight, Tensor ticket, bool needs_x,"
    " bool needs_weight, bool sums"
)
"""What operations take first that give gradients, see `region_gradients`."""
_BORDERS = 'int gathers=1, bool part=False, int scatters=1, str reduces=""'
quantized_linear = define(
    "quantized_linear(Tensor x, Tensor weight, bool keeps, str layout, Tensor? parts,"
    f" {_BORDERS}) -> (Tensor, Tensor, Tensor)",
    _run_linear,
    _linear_shapes,
)
"""(S, ..., in), (out, in) -> (S, ..., out), and with `keeps` values and scale of the transposed
input for the backward pass. `layout`: of the recipe's scales; `parts`: contiguous, largest absolute
values of parts of the input, None: they are to be found.

Over `gathers` ranks the input is gathered along its first dim, with `part` once it is rounded; over
`scatters` ranks the output is summed, and the own part of it is the result. `reduces`: of a whole
sequence, what is summed over the tensor ranks, "output", "gradient" (of the input) or "" for
nothing.
"""
quantized_gradients = define(
    f"quantized_gradients{GRADIENTS}, Tensor? parts, {_BORDERS}) -> (Tensor, Tensor)",
    run_gradients,
    gradient_shapes,
)
"""Gradient of (..., out) and what `quantized_linear` kept -> gradients of the input and of the
weight; empty where it isn't needed, or with `sums` has gone to its sum. `parts`: of the gradient,
see `quantized_linear`.
"""


class RegionLinear(torch.autograd.Function):
    """`(x, weight, bias, sums, keeps, layout, finds, borders)` -> the layer's output.

    Largest values of rows are found by the region, which does it where it writes the rows; of what
    is gathered first, by the operation. `finds`: whether those of the input, and of the output's
    gradient, are found by the region at all.
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
        finds: tuple[bool, bool],
        borders: Borders,
    ) -> Tensor:
        """See `quantized_linear`."""
        gathers, part, scatters, _ = borders
        parts = largest_of_rows(x) if finds[0] and (gathers == 1 or part) else None
        y, values, scale = quantized_linear(x, weight, keeps, layout, parts, *borders)
        ctx.save_for_backward(weight, values, scale)
        ctx.sums, ctx.finds, ctx.borders = sums, finds[1] and scatters == 1, borders
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
            largest_of_rows(grad) if ctx.finds else None,
            *ctx.borders,
            needs_x=needs_x,
            needs_weight=needs_weight,
            sums=ctx.sums,
        )
        grad_bias = grad.flatten(0, -2).sum(dim=0) if needs_bias else None
        return grad_x, grad_weight, grad_bias, None, None, None, None, None


def region_gradients(
    grad: Tensor,
    weight: Tensor,
    values: Tensor,
    scale: Tensor,
    *given: Any,
    needs_x: bool,
    needs_weight: bool,
    sums: bool,
    operation: Any = quantized_gradients,
) -> tuple[Tensor | None, Tensor | None]:
    """`operation` of a region, which takes GRADIENTS and what is `given`: gradients of the input
    and of the weight, None for what isn't needed or has gone to its sum.
    """
    if not needs_x and not needs_weight:
        return None, None
    sums = sums and needs_x  # an operation without a result would be left out
    ticket = torch.empty(0, device=grad.device)
    grad_x, grad_weight = operation(
        grad, values, scale, weight, ticket, needs_x, needs_weight, sums, *given
    )
    made = needs_weight and not sums
    return grad_x if needs_x else None, grad_weight if made else None


def largest_of_rows(x: Tensor) -> Tensor:
    """Largest absolute values along the last dim, in the dtype of `x`: those of its rounded values,
    even where the region has not rounded them yet.
    """
    return x.abs().amax(dim=-1).contiguous()
