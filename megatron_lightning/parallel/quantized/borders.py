"""A low-precision linear layer with the collectives of a split sequence: what autograd calls
(`parallel/quantized/products.py`) and what the operations of compiled regions do
(`parallel/quantized/region.py`).

Parts of the sequence are rounded before they are gathered, which moves half the bytes, where the
recipe can join them. Of the input only the own part is kept then, gathered once more in the
backward pass. Where products may hide what is moved, they do (`by_parts.py`). All tensors are in
the layer's shapes, (S, ..., features).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
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
    reduce_scatter,
)
from megatron_lightning.parallel.peers.exchange import Exchange
from megatron_lightning.parallel.quantized.by_parts import (
    begin_gather_transposed,
    gather_product,
    gathered_transposed,
    partial_sums,
    product_scatter,
)
from megatron_lightning.precision.fp8_casts import Cast
from megatron_lightning.precision.operands import Noise, Operand, Pair, Recipe, Wanted

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
    scatters: int = 1,
) -> tuple[Tensor, Operand | None]:
    """`F.linear` of the whole input, and with `keeps` the input's transpose for the backward pass.

    The input is gathered along `dim` over `axis` unless that is None, and with `part` once it is
    rounded (`joins_parts`). `parts`: largest absolute values of parts of `x`. Over `scatters` ranks
    the output is summed, and the own part of its first dim is the result.
    """
    if dim is not None and not part:
        x = all_gather(x, axis, dim)
    itself, transposed = products.input(
        x.flatten(0, -2), part=part or products.splits_sequence, wanted=(True, keeps), parts=parts
    )
    assert itself is not None
    factor = products.weight(weight, (True, False)).itself
    assert factor is not None
    length = x.shape[0] * (axis.size if part else 1) // scatters
    if scatters > 1:
        if part:
            itself = gather_operand(itself, axis, 0)()
        y = _scattered(products, itself, factor, x.dtype)
    elif part:
        y = _gathered(products, itself, factor, x.dtype, axis)
    else:
        y = products.recipe.product(itself, factor, x.dtype, forward=True)
    return y.view(length, *x.shape[1:-1], y.shape[1]), transposed


def _gathered(
    products: QuantizedProducts, own: Operand, factor: Operand, dtype: torch.dtype, axis: MeshAxis
) -> Tensor:
    exchange = products.exchange(own.values.numel(), torch.uint8)
    if exchange is not None:
        return gather_product(products.recipe, own, factor, dtype, exchange)
    whole = gather_operand(own, axis, 0)()
    return products.recipe.product(whole, factor, dtype, forward=True)


def _scattered(
    products: QuantizedProducts, whole: Operand, factor: Operand, dtype: torch.dtype
) -> Tensor:
    axis = products.tensor_axis
    elements = len(whole.values) // axis.size * len(factor.values)
    exchange = products.exchange(elements, dtype)
    if exchange is not None:
        return product_scatter(products.recipe, whole, factor, dtype, exchange)
    y = products.recipe.product(whole, factor, dtype, forward=True)
    return reduce_scatter(y, axis, 0)


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
    cast: Cast | None = None,
    scatters: int = 1,
) -> tuple[Tensor | None, Tensor | None]:
    """Gradients of `product`'s input and weight; None: not needed, or in its sum.

    The sum of the input's gradient runs beside the weight's. `parts`: of the gradient; `cast`: what
    makes its operands where `grad` has its shape alone, in a layer without collectives.
    """
    whole = (grad.shape[0] * scatters, *grad.shape[1:-1])
    if needs_x and scatters == 1 and dim is not None and dim % grad.dim() == 0:
        elements = grad.numel() // grad.shape[-1] // axis.size * weight.shape[1]
        exchange = products.exchange(elements, grad.dtype)
        if exchange is not None:
            own, grad_weight = _gradients_by_parts(
                products,
                grad.flatten(0, -2),
                weight,
                transposed,
                exchange,
                part=part,
                needs_weight=needs_weight,
                sums=sums,
                parts=parts,
            )
            return own.view(whole[0] // axis.size, *whole[1:], own.shape[1]), grad_weight
    grad_x = grad_weight = reduced = gathered = None
    if needs_weight and part and transposed is not None:
        gathered = gather_operand(transposed, axis, 1)
    one = scatters == 1
    find = partial(products.gradient, cast=cast) if one else partial(_of_whole, products)
    itself, of_rows = find(grad.flatten(0, -2), (needs_x, needs_weight), noise, parts)
    if needs_x:
        factor = products.weight(weight, (False, True)).transposed
        assert itself is not None
        assert factor is not None
        grad_x = products.recipe.product(itself, factor, grad.dtype, forward=False)
        grad_x = grad_x.view(*whole, grad_x.shape[1])
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


def _of_whole(
    products: QuantizedProducts,
    part: Tensor,
    wanted: Wanted,
    noise: Noise | None,
    parts: Tensor | None,
) -> Pair:
    """Operands of a gradient of which each tensor rank has a part of the rows."""
    exchange = products.exchange(part.numel(), part.dtype)
    if exchange is None:
        whole = all_gather(part, products.tensor_axis, 0)
        return products.gradient(whole, wanted, noise, parts)
    part = part.contiguous()  # before the turn begins: what is moved follows what came before
    turn = exchange.begin(part.shape[0], part.shape[1], part.dtype)
    turn.gather(part, joins=True)
    pair = products.gradient(turn.whole(), wanted, noise, parts)
    turn.end()
    return pair


def _gradients_by_parts(
    products: QuantizedProducts,
    grad: Tensor,
    weight: Tensor,
    transposed: Operand | None,
    exchange: Exchange,
    *,
    part: bool,
    needs_weight: bool,
    sums: bool,
    parts: Tensor | None,
) -> tuple[Tensor, Tensor | None]:
    """`gradients` where the input's is needed and summed part by part: (n R, out) -> (R, in)."""
    axis, grad_weight = exchange.axis, None
    turn = exchange.begin(grad.shape[0] // axis.size, weight.shape[1], grad.dtype)
    gathers = part and needs_weight
    if gathers and transposed is not None:
        begin_gather_transposed(turn, transposed)
    itself, of_rows = products.gradient(grad, (True, needs_weight), None, parts)
    factor = products.weight(weight, (False, True)).transposed
    assert itself is not None
    assert factor is not None
    own = partial_sums(products.recipe, itself, factor, grad.dtype, turn, axis, forward=False)
    if needs_weight:
        assert of_rows is not None
        assert transposed is not None
        if gathers:
            transposed = gathered_transposed(turn, transposed, axis)
        grad_weight = products.weight_gradient(weight, of_rows, transposed, sums=sums)
    own = turn.add_to(own)
    turn.end()
    return own, grad_weight


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
