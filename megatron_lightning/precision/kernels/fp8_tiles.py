"""Casts to FP8 that write a matrix and its transpose at once, since products read both along their
summed dim. They take 16-bit numbers, see `fp8_casts`.
"""

# Triton is optional, and a kernel is indexed by its grid.
# pyright: reportMissingImports=false, reportIndexIssue=false

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_lightning.precision.kernels import choices
from megatron_lightning.precision.kernels.choices import Tiles
from megatron_lightning.precision.kernels.fp8 import _limited


@triton.jit
def _scaled(x, scale, limit, bounded: tl.constexpr):
    """Scaled, in float32. `bounded`: all values are within the format then, or the scale is NaN."""
    if bounded:
        return x.to(tl.float32) * scale
    return _limited(x, scale, limit)


@triton.jit
def _place_of(tile, padded_rows, columns, by_columns, height: tl.constexpr, width: tl.constexpr):
    """How far down, and how far right a tile is."""
    high, wide = tl.cdiv(padded_rows, height), tl.cdiv(columns, width)
    if by_columns:
        down, right = tile // wide, tile % wide
    else:
        down, right = tile % high, tile // high
    return down.to(tl.int64), right.to(tl.int64)


@triton.jit
def _put_tile(
    values,
    itself,
    transposed,
    scale,
    limit,
    row,
    column,
    rows,
    columns,
    stride,
    padded_rows,
    want_itself: tl.constexpr,
    want_transposed: tl.constexpr,
    bounded: tl.constexpr,
):
    """Cast 16-bit `values` at `row` and `column` of a matrix; `stride`: from row to row of it."""
    if want_itself:
        inside = (row[:, None] < rows) & (column[None, :] < columns)
        rounded = _scaled(values, scale, limit, bounded).to(itself.dtype.element_ty)
        tl.store(itself + row[:, None] * stride + column[None, :], rounded, mask=inside)
    if want_transposed:
        # Turned before it is cast, and cast apart: so threads change 16-bit numbers (`fp8_casts`).
        turned = _scaled(tl.trans(values), scale, limit, bounded).to(transposed.dtype.element_ty)
        place = transposed + column[:, None] * padded_rows + row[None, :]
        tl.store(place, turned, mask=(column[:, None] < columns) & (row[None, :] < padded_rows))


@triton.jit
def _put_quarter(
    values,
    itself,
    scale,
    limit,
    row,
    column,
    rows,
    columns,
    stride,
    want_itself: tl.constexpr,
    bounded: tl.constexpr,
):
    """Cast every fourth row of a tile; what is rounded, float32."""
    scaled = _scaled(values, scale, limit, bounded)
    if want_itself:
        inside = (row[:, None] < rows) & (column[None, :] < columns)
        place = itself + row[:, None] * stride + column[None, :]
        tl.store(place, scaled.to(itself.dtype.element_ty), mask=inside)
    return scaled


@triton.jit
def _byte(x, dtype: tl.constexpr):
    return x.to(dtype).to(tl.uint8, bitcast=True).to(tl.uint32)


@triton.jit
def _word(first, second, third, fourth, dtype: tl.constexpr, assembled: tl.constexpr):
    """Four float32 in `dtype`, as bytes of a word, the first lowest. `assembled`: by instructions
    that write two of them, so that no byte is moved, which ptxas 12.9 gets wrong (`fp8_casts`).
    """
    if assembled:
        if dtype == tl.float8e4nv:
            word = tl.inline_asm_elementwise(
                "{ .reg .b16 low, high; cvt.rn.satfinite.e4m3x2.f32 low, $2, $1;"
                " cvt.rn.satfinite.e4m3x2.f32 high, $4, $3; mov.b32 $0, {low, high}; }",
                "=r,f,f,f,f",
                [first, second, third, fourth],
                dtype=tl.uint32,
                is_pure=True,
                pack=1,
            )
        else:
            word = tl.inline_asm_elementwise(
                "{ .reg .b16 low, high; cvt.rn.satfinite.e5m2x2.f32 low, $2, $1;"
                " cvt.rn.satfinite.e5m2x2.f32 high, $4, $3; mov.b32 $0, {low, high}; }",
                "=r,f,f,f,f",
                [first, second, third, fourth],
                dtype=tl.uint32,
                is_pure=True,
                pack=1,
            )
    else:
        word = _byte(first, dtype) | (_byte(second, dtype) << 8)
        word |= (_byte(third, dtype) << 16) | (_byte(fourth, dtype) << 24)
    return word


@triton.jit
def _put_words(words, transposed, column, columns, word_row, padded_rows):
    """Store words of four rows that follow each other, (rows / 4, columns), turned."""
    place = transposed.to(tl.pointer_type(tl.uint32), bitcast=True)
    place += column[:, None] * (padded_rows // 4) + word_row[None, :]
    real = (column[:, None] < columns) & (word_row[None, :] < padded_rows // 4)
    tl.store(place, tl.trans(words), mask=real)


@triton.jit
def _load(x, row, column, rows, columns, stride):
    inside = (row[:, None] < rows) & (column[None, :] < columns)
    return tl.load(x + row[:, None] * stride + column[None, :], mask=inside, other=0.0)


@triton.jit
def _cast_tile(
    x,
    itself,
    transposed,
    scale,
    rows,
    columns,
    padded_rows,
    limit,
    down,
    right,
    want_itself: tl.constexpr,
    want_transposed: tl.constexpr,
    bounded: tl.constexpr,
    words: tl.constexpr,
    assembled: tl.constexpr,
    height: tl.constexpr,
    width: tl.constexpr,
):
    """Cast a tile. `words`: each value once, and threads change words of four rows."""
    column = right * width + tl.arange(0, width)
    if words:
        word_row = down * (height // 4) + tl.arange(0, height // 4)
        row = word_row * 4
        first = _put_quarter(
            _load(x, row, column, rows, columns, columns),
            *(itself, scale, limit, row, column, rows, columns, columns, want_itself, bounded),
        )
        second = _put_quarter(
            _load(x, row + 1, column, rows, columns, columns),
            *(itself, scale, limit, row + 1, column, rows, columns, columns, want_itself, bounded),
        )
        third = _put_quarter(
            _load(x, row + 2, column, rows, columns, columns),
            *(itself, scale, limit, row + 2, column, rows, columns, columns, want_itself, bounded),
        )
        fourth = _put_quarter(
            _load(x, row + 3, column, rows, columns, columns),
            *(itself, scale, limit, row + 3, column, rows, columns, columns, want_itself, bounded),
        )
        if want_transposed:
            element: tl.constexpr = transposed.dtype.element_ty
            turned = _word(first, second, third, fourth, element, assembled)
            _put_words(turned, transposed, column, columns, word_row, padded_rows)
    else:
        row = down * height + tl.arange(0, height)
        _put_tile(
            _load(x, row, column, rows, columns, columns),
            *(itself, transposed, scale, limit, row, column, rows, columns, columns, padded_rows),
            *(want_itself, want_transposed, bounded),
        )


@triton.jit
def _cast_both(
    x,
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
    words: tl.constexpr,
    assembled: tl.constexpr,
    by_columns: tl.constexpr,
    backwards: tl.constexpr,
    height: tl.constexpr,
    width: tl.constexpr,
):
    tile = tl.program_id(0)
    if backwards:
        tile = tl.num_programs(0) - 1 - tile
    down, right = _place_of(tile, padded_rows, columns, by_columns, height, width)
    _cast_tile(
        *(x, itself, transposed, tl.load(scale), rows, columns, padded_rows, limit, down, right),
        *(want_itself, want_transposed, bounded, words, assembled, height, width),
    )


ASSEMBLED = isinstance(_cast_both, triton.JITFunction)
"""False in triton's interpreter, which knows no instructions."""


def cast_both(
    x: Tensor,
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
    """(R, C), contiguous -> (R, C) and (C, `padded_rows`) in FP8, what is wanted of them.
    `bounded`: with this scale all values are within the format.
    """
    rows, columns = x.shape
    values = x.new_empty((rows, columns), dtype=dtype) if itself else None
    turned = x.new_empty((columns, padded_rows), dtype=dtype) if transposed else None
    if columns and padded_rows:
        tiles = choices.CAST if tiles is None else tiles
        high, wide = triton.cdiv(padded_rows, tiles.height), triton.cdiv(columns, tiles.width)
        _cast_both[(high * wide,)](
            x,
            x if values is None else values,
            x if turned is None else turned,
            scale,
            rows,
            columns,
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
            width=tiles.width,
            num_warps=tiles.warps,
        )
    return values, turned
