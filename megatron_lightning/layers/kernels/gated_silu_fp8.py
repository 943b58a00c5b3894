"""silu(gate) * up between two products in FP8. Forward, what writes it finds its largest value too,
which a cast would otherwise read it once more for. The gradient of (gate, up) is not written in 16
bits: one pass over what it is computed from finds its largest value, another casts it. (Written and
read again, it is a third more of bytes than what the second pass reads twice.)
"""

# Triton is optional, and a kernel is indexed by its grid.
# pyright: reportMissingImports=false, reportIndexIssue=false

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_lightning.layers.kernels.gated_silu import _gradients, _product
from megatron_lightning.precision.kernels import choices
from megatron_lightning.precision.kernels.choices import Spans, Tiles
from megatron_lightning.precision.kernels.fp8 import _larger, _size
from megatron_lightning.precision.kernels.fp8_tiles import _load, _own_place, _put_tile, cast_by

_BLOCK = 1024
_WARPS = 4


@triton.jit
def _largest_product(inner, product, parts, width, block: tl.constexpr, places: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * block + tl.arange(0, block)
    inside = column < width
    gate = tl.load(inner + row * 2 * width + column, mask=inside, other=0.0)
    up = tl.load(inner + (row * 2 + 1) * width + column, mask=inside, other=0.0)
    value = _product(gate, up)
    element = product.dtype.element_ty
    tl.store(product + row * width + column, value.to(element), mask=inside)
    # Rounding keeps the order, so that it is enough to round the largest. Sizes are ordered as the
    # integers of their bits.
    most = _size(tl.reduce(tl.abs(value), 0, _larger).to(element))
    program = tl.program_id(0) * tl.num_programs(1) + tl.program_id(1)
    place = parts.to(tl.pointer_type(tl.int32), bitcast=True) + program % places
    tl.atomic_max(place, most.to(tl.int32, bitcast=True), sem="relaxed")


@triton.jit
def _largest_gradient(grad, inner, parts, rows, width, block: tl.constexpr):
    blocks = tl.cdiv(width, block)
    most = tl.zeros((block,), tl.float32)
    for task in range(tl.program_id(0), rows * blocks, tl.num_programs(0)):
        row = (task // blocks).to(tl.int64)
        column = (task % blocks) * block + tl.arange(0, block)
        inside = column < width
        dy = tl.load(grad + row * width + column, mask=inside, other=0.0)
        gate = tl.load(inner + row * 2 * width + column, mask=inside, other=0.0)
        up = tl.load(inner + (row * 2 + 1) * width + column, mask=inside, other=0.0)
        of_gate, of_up = _gradients(dy, gate, up)
        most = _larger(_larger(most, of_gate), of_up)
    # Rounding keeps the order here too.
    found = tl.reduce(most, 0, _larger).to(inner.dtype.element_ty)
    tl.store(parts + tl.program_id(0), _size(found))


@triton.jit
def _cast_gradient(
    grad,
    inner,
    itself,
    transposed,
    scale,
    rows,
    columns,
    padded_rows,
    limit,
    want_itself: tl.constexpr,
    want_transposed: tl.constexpr,
    bounded: tl.constexpr,
    height: tl.constexpr,
    width: tl.constexpr,
):
    """`columns`: of each half."""
    down, right = _own_place(columns, width)
    column = right * width + tl.arange(0, width)
    factor = tl.load(scale)
    turned = transposed + columns.to(tl.int64) * padded_rows  # of the second half
    row = down * height + tl.arange(0, height)
    gate_gradient, up_gradient = _gradients(
        _load(grad, row, column, rows, columns, columns),
        _load(inner, row, column, rows, columns, 2 * columns),
        _load(inner + columns, row, column, rows, columns, 2 * columns),
    )
    of_gate = gate_gradient.to(inner.dtype.element_ty)
    of_up = up_gradient.to(inner.dtype.element_ty)
    _put_tile(
        *(of_gate, itself, transposed, factor, limit, row, column, rows, columns, 2 * columns),
        *(padded_rows, want_itself, want_transposed, bounded),
    )
    _put_tile(
        *(of_up, itself + columns, turned, factor, limit, row, column, rows, columns, 2 * columns),
        *(padded_rows, want_itself, want_transposed, bounded),
    )


def largest_product(inner: Tensor, places: int) -> tuple[Tensor, Tensor]:
    """(..., 2, F), contiguous, gate first -> (..., F), and the largest sizes of parts of it,
    (places,) float32.
    """
    *rows, _, width = inner.shape
    product = inner.new_empty((*rows, width))
    parts = inner.new_zeros(places, dtype=torch.float32)
    if product.numel():
        grid = (product.numel() // width, triton.cdiv(width, _BLOCK))
        options = {"block": _BLOCK, "places": places, "num_warps": _WARPS}
        _largest_product[grid](inner, product, parts, width, **options)
    return product, parts


def largest_gradient(grad: Tensor, inner: Tensor, spans: Spans | None = None) -> Tensor:
    """Gradient (..., F), contiguous, and what `largest_product` got -> largest sizes of parts of
    the gradient of (..., 2, F), float32.
    """
    width = inner.shape[-1]
    if not grad.numel():
        return inner.new_zeros(1, dtype=torch.float32)
    spans = choices.GATE_LARGEST if spans is None else spans
    rows = grad.numel() // width
    programs = min(spans.programs, rows * triton.cdiv(width, spans.block))
    parts = inner.new_empty(programs, dtype=torch.float32)
    _largest_gradient[(programs,)](
        grad, inner, parts, rows, width, block=spans.block, num_warps=spans.warps
    )
    return parts


def cast_gradient(
    grad: Tensor,
    inner: Tensor,
    scale: Tensor,
    name: str,
    wanted: tuple[bool, bool],
    *,
    bounded: bool = False,
    tiles: Tiles | None = None,
) -> tuple[Tensor | None, Tensor | None]:
    """`fp8_casts.cast_both` of the gradient (R, 2 F) of (..., 2, F), which is nowhere else: of a
    gradient (..., F), contiguous, and what `largest_product` got, 16 bits.
    """
    tiles = choices.GATE_CAST if tiles is None else tiles
    width = inner.shape[-1]
    rows = grad.numel() // max(width, 1)
    sources = grad, inner
    return cast_by(
        _cast_gradient, sources, rows, width, scale, name, wanted, bounded, tiles, halves=2
    )
