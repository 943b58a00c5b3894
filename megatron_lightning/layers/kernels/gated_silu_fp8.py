"""The gradient of (gate, up) in FP8, and its transpose, without writing it in 16 bits: one pass
over what it is computed from finds its largest value, another casts it. (Written and read again, it
is a third more of bytes than what the second pass reads twice.)
"""

# Triton is optional, and a kernel is indexed by its grid.
# pyright: reportMissingImports=false, reportIndexIssue=false

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_lightning.precision.formats import FP8_DTYPES, FP8_MAX
from megatron_lightning.precision.kernels import choices
from megatron_lightning.precision.kernels.choices import Spans, Tiles
from megatron_lightning.precision.kernels.fp8 import _larger, _size
from megatron_lightning.precision.kernels.fp8_tiles import (
    ASSEMBLED,
    _load,
    _place_of,
    _put_quarter,
    _put_tile,
    _put_words,
    _word,
)

_MULTIPLE = 16
"""What the summed dim of a product must be a multiple of."""


@triton.jit
def _gradients(dy, gate, up):
    """Of gate and of up, as `gated_silu._backward` computes them, in float32."""
    dy, gate, up = dy.to(tl.float32), gate.to(tl.float32), up.to(tl.float32)
    sigmoid = tl.sigmoid(gate)
    slope = sigmoid * (1.0 + gate * (1.0 - sigmoid))
    return dy * up * slope, dy * gate * sigmoid


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
    # Rounding keeps the order, so that it is enough to round the largest.
    found = tl.reduce(most, 0, _larger).to(inner.dtype.element_ty)
    tl.store(parts + tl.program_id(0), _size(found))


@triton.jit
def _load_gradients(grad, inner, row, column, rows, width):
    return _gradients(
        _load(grad, row, column, rows, width, width),
        _load(inner, row, column, rows, width, 2 * width),
        _load(inner + width, row, column, rows, width, 2 * width),
    )


@triton.jit
def _rounded(one, other, element: tl.constexpr, assembled: tl.constexpr):
    """Both rounded to `element`, in float32. `assembled`: by one instruction for two numbers; by
    itself the compiler takes two that run at a quarter of its speed.
    """
    if assembled and element == tl.bfloat16:
        both = tl.inline_asm_elementwise(
            "cvt.rn.bf16x2.f32 $0, $2, $1;",
            "=r,f,f",
            [one, other],
            dtype=tl.uint32,
            is_pure=True,
            pack=1,
        )
        one = (both << 16).to(tl.float32, bitcast=True)
        other = (both & 0xFFFF0000).to(tl.float32, bitcast=True)
    else:
        one, other = one.to(element).to(tl.float32), other.to(element).to(tl.float32)
    return one, other


@triton.jit
def _cast_quarter(
    grad,
    inner,
    itself,
    scale,
    limit,
    row,
    column,
    rows,
    width,
    want_itself: tl.constexpr,
    bounded: tl.constexpr,
    assembled: tl.constexpr,
):
    of_gate, of_up = _load_gradients(grad, inner, row, column, rows, width)
    of_gate, of_up = _rounded(of_gate, of_up, inner.dtype.element_ty, assembled)
    left = _put_quarter(
        *(of_gate, itself, scale, limit, row, column, rows, width, 2 * width),
        *(want_itself, bounded),
    )
    right = _put_quarter(
        *(of_up, itself + width, scale, limit, row, column, rows, width, 2 * width),
        *(want_itself, bounded),
    )
    return left, right


@triton.jit
def _cast_gradient(
    grad,
    inner,
    itself,
    transposed,
    scale,
    rows,
    width,
    padded_rows,
    limit,
    want_itself: tl.constexpr,
    want_transposed: tl.constexpr,
    bounded: tl.constexpr,
    words: tl.constexpr,
    assembled: tl.constexpr,
    by_columns: tl.constexpr,
    backwards: tl.constexpr,
    height: tl.constexpr,
    breadth: tl.constexpr,
):
    tile = tl.program_id(0)
    if backwards:
        tile = tl.num_programs(0) - 1 - tile
    down, right = _place_of(tile, padded_rows, width, by_columns, height, breadth)
    column = right * breadth + tl.arange(0, breadth)
    factor = tl.load(scale)
    turned = transposed + width.to(tl.int64) * padded_rows  # of the second half
    if words:
        element: tl.constexpr = transposed.dtype.element_ty
        word_row = down * (height // 4) + tl.arange(0, height // 4)
        row = word_row * 4
        first, first_up = _cast_quarter(
            *(grad, inner, itself, factor, limit, row, column, rows, width),
            *(want_itself, bounded, assembled),
        )
        second, second_up = _cast_quarter(
            *(grad, inner, itself, factor, limit, row + 1, column, rows, width),
            *(want_itself, bounded, assembled),
        )
        third, third_up = _cast_quarter(
            *(grad, inner, itself, factor, limit, row + 2, column, rows, width),
            *(want_itself, bounded, assembled),
        )
        fourth, fourth_up = _cast_quarter(
            *(grad, inner, itself, factor, limit, row + 3, column, rows, width),
            *(want_itself, bounded, assembled),
        )
        if want_transposed:
            of_gate = _word(first, second, third, fourth, element, assembled)
            _put_words(of_gate, transposed, column, width, word_row, padded_rows)
            of_up = _word(first_up, second_up, third_up, fourth_up, element, assembled)
            _put_words(of_up, turned, column, width, word_row, padded_rows)
    else:
        row = down * height + tl.arange(0, height)
        gate_gradient, up_gradient = _load_gradients(grad, inner, row, column, rows, width)
        of_gate = gate_gradient.to(inner.dtype.element_ty)
        of_up = up_gradient.to(inner.dtype.element_ty)
        _put_tile(
            *(of_gate, itself, transposed, factor, limit, row, column, rows, width, 2 * width),
            *(padded_rows, want_itself, want_transposed, bounded),
        )
        _put_tile(
            *(of_up, itself + width, turned, factor, limit, row, column, rows, width, 2 * width),
            *(padded_rows, want_itself, want_transposed, bounded),
        )


def largest_gradient(grad: Tensor, inner: Tensor, spans: Spans | None = None) -> Tensor:
    """Gradient (..., F), contiguous, and what `gated_silu.forward` got -> largest sizes of parts of
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


def cast(
    grad: Tensor,
    inner: Tensor,
    scale: Tensor,
    name: str,
    wanted: tuple[bool, bool],
    *,
    bounded: bool = False,
) -> tuple[Tensor | None, Tensor | None]:
    """`fp8_casts.cast_both` of what `cast_gradient` casts."""
    rows = grad.numel() // max(grad.shape[-1], 1)
    return cast_gradient(
        grad,
        inner,
        scale,
        FP8_DTYPES[name],
        FP8_MAX[name],
        itself=wanted[0],
        transposed=wanted[1],
        padded_rows=rows + -rows % _MULTIPLE,
        bounded=bounded,
    )


def cast_gradient(
    grad: Tensor,
    inner: Tensor,
    scale: Tensor,
    dtype: torch.dtype,
    limit: float,
    *,
    itself: bool,
    transposed: bool,
    padded_rows: int,
    bounded: bool,
    tiles: Tiles | None = None,
) -> tuple[Tensor | None, Tensor | None]:
    """`fp8_tiles.cast_both` of the gradient (R, 2 F) of (..., 2, F), which is nowhere else: of a
    gradient (..., F), contiguous, and what `gated_silu.forward` got, 16 bits.
    """
    width = inner.shape[-1]
    rows = grad.numel() // max(width, 1)
    values = grad.new_empty((rows, 2 * width), dtype=dtype) if itself else None
    turned = grad.new_empty((2 * width, padded_rows), dtype=dtype) if transposed else None
    if width and padded_rows:
        tiles = choices.GATE_CAST if tiles is None else tiles
        high, wide = triton.cdiv(padded_rows, tiles.height), triton.cdiv(width, tiles.width)
        _cast_gradient[(high * wide,)](
            grad,
            inner,
            grad if values is None else values,
            grad if turned is None else turned,
            scale,
            rows,
            width,
            padded_rows,
            limit,
            want_itself=itself,
            want_transposed=transposed,
            bounded=bounded,
            words=tiles.words,
            assembled=ASSEMBLED,
            by_columns=tiles.by_columns,
            backwards=tiles.backwards,
            height=tiles.height,
            breadth=tiles.width,
            num_warps=tiles.warps,
        )
    return values, turned
