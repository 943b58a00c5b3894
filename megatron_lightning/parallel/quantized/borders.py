"""A low-precision linear layer with the collectives of a split sequence: what autograd calls
(`parallel/quantized/products.py`) and what the operations of compiled regions do
(`parallel/quantized/region.py`).

Parts of the sequence are rounded before they are gathered, which moves half the bytes, where the
recipe can join them. Of the input only the own part is kept then, gathered once more in the
backward pass. All tensors are in the layer's shapes, (S, ..., features).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from megatron_lightning.parallel.axes import LanedAxis, MeshAxis
from megatron_lightning.parallel.collectives import (
    Finish,
    all_gather,
    begin_all_gather,
    begin_all_reduce_,
    begin_reduce_scatter,
)
from megatron_lightning.precision.operands import Noise, Operand, Recipe

if TYPE_CHECKING:
    from megatron_lightning.parallel.quantized.products import QuantizedProducts

_ALIGNMENT = 16
"""Rows of a part of the sequence that is rounded before it is gathered: what products need."""


def one_operation(axis: MeshAxis, *, sequence_parallel: bool, sequence_dim: int) -> bool:
    """Whether layers split over `axis` are one operation each with the collectives at their
    borders, so that they can lie within compiled regions.
    """
    if axis.size == 1:
        return True
    return not isinstance(axis, LanedAxis) and (not sequence_parallel or sequence_dim == 0)


def joins_parts(x: Tensor, recipe: Recipe, size: int, dim: int | None) -> bool:
    """Whether parts `x` of `size` ranks are gathered along `dim` once they are rounded."""
    if dim is None or size == 1 or dim % x.dim() != 0 or not recipe.joins_parts:
        return False
    return x.numel() // x.shape[-1] % max(recipe.block, _ALIGNMENT) == 0


def product(
    products: QuantizedProducts,
    x: Tensor,
    weight: Tensor,
    axis: MeshAxis,
    dim: int | None,
    *,
    part: bool,
    keeps: bool,
    parts: Tensor | None = None,
) -> tuple[Tensor, Operand | None]:
    """`F.linear` of the whole input, and with `keeps` the input's transpose for the backward pass.

    The input is gathered along `dim` over `axis` unless that is None, and with `part` once it is
    rounded (`joins_parts`). `parts`: largest absolute values of parts of `x`.
    """
    if dim is not None and not part:
        x = all_gather(x, axis, dim)
    rows = x.flatten(0, -2)
    itself, transposed = products.input(
        rows, part=part or products.splits_sequence, wanted=(True, keeps), parts=parts
    )
    assert itself is not None
    shape = x.shape
    if part:
        itself = gather_operand(itself, axis, 0)()
        shape = torch.Size((shape[0] * axis.size, *shape[1:]))
    factor = products.weight(weight, (True, False)).itself
    assert factor is not None
    y = products.recipe.product(itself, factor, x.dtype, forward=True)
    return y.view(*shape[:-1], y.shape[1]), transposed


def gradients(
    products: QuantizedProducts,
    grad: Tensor,
    weight: Tensor,
    transposed: Operand | None,
    axis: MeshAxis,
    dim: int | None,
    *,
    part: bool,
    needs_x: bool,
    needs_weight: bool,
    sums: bool,
    noise: Noise | None = None,
    parts: Tensor | None = None,
) -> tuple[Tensor | None, Tensor | None]:
    """Gradients of `product`'s input and weight; None: not needed, or in its sum.

    The sum of the input's gradient runs beside the weight's. `parts`: of the gradient.
    """
    rows = grad.flatten(0, -2)
    grad_x = grad_weight = reduced = gathered = None
    if needs_weight and part and transposed is not None:
        gathered = gather_operand(transposed, axis, 1)
    itself, of_rows = products.gradient(rows, (needs_x, needs_weight), noise, parts)
    if needs_x:
        factor = products.weight(weight, (False, True)).transposed
        assert itself is not None
        assert factor is not None
        grad_x = products.recipe.product(itself, factor, grad.dtype, forward=False)
        grad_x = grad_x.view(*grad.shape[:-1], grad_x.shape[1])
        reduced = (
            begin_all_reduce_(grad_x, axis)
            if dim is None
            else begin_reduce_scatter(grad_x, axis, dim)
        )
    if needs_weight:
        if gathered is not None:
            transposed = gathered()
        assert of_rows is not None
        assert transposed is not None
        grad_weight = products.weight_gradient(weight, of_rows, transposed, sums=sums)
    return None if reduced is None else reduced(), grad_weight


def gather_operand(operand: Operand, axis: MeshAxis, dim: int) -> Callable[[], Operand]:
    """Start to join the parts of an operand along `dim`; its scale too where it has one a row."""
    values, scale = operand
    finish = _begin_gather(values, axis, dim)
    if scale is not None and scale.dim() and dim == 0:
        scale = all_gather(scale, axis, 0)
    return lambda: Operand(finish(), scale)


def _begin_gather(values: Tensor, axis: MeshAxis, dim: int) -> Finish:
    if values.element_size() > 1:
        return begin_all_gather(values.contiguous(), axis, dim)
    finish = begin_all_gather(values.contiguous().view(torch.uint8), axis, dim)
    return lambda: finish().view(values.dtype)
