"""Casts to FP8 that write a matrix and its transpose at once, since products read both along their
summed dim. They take 16-bit numbers, see `fp8_casts`.
"""

# Triton is optional, and a kernel is indexed by its grid.
# pyright: reportMissingImports=false, reportIndexIssue=false

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from megatron_lightning.precision.formats import FP8_DTYPES, FP8_MAX, padded
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
def _place_of(tile, columns, width: tl.constexpr):
    """How far down, and how far right a tile is: those beside each other follow each other."""
    wide = tl.cdiv(columns, width)
    return (tile // wide).to(tl.int64), (tile % wide).to(tl.int64)


@triton.jit
def _own_place(columns, width: tl.constexpr):
    """`_place_of` a program's tile: the last one, whose values have just been written or searched
    for the largest, comes first.
    """
    tile = tl.program_id(0)
    return _place_of(tl.num_programs(0) - 1 - tile, columns, width)


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
    height: tl.constexpr,
    width: tl.constexpr,
):
    column = right * width + tl.arange(0, width)
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
    height: tl.constexpr,
    width: tl.constexpr,
):
    down, right = _own_place(columns, width)
    _cast_tile(
        *(x, itself, transposed, tl.load(scale), rows, columns, padded_rows, limit, down, right),
        *(want_itself, want_transposed, bounded, height, width),
    )


def cast_both(
    x: Tensor,
    scale: Tensor,
    name: str,
    wanted: tuple[bool, bool],
    *,
    bounded: bool,
    tiles: Tiles | None = None,
) -> tuple[Tensor | None, Tensor | None]:
    """See `fp8_casts.cast_both`; of 16 bits."""
    tiles = choices.CAST if tiles is None else tiles
    rows, columns = x.shape
    return cast_by(_cast_both, (x,), rows, columns, scale, name, wanted, bounded, tiles)


def cast_by(
    kernel: Any,
    sources: tuple[Tensor, ...],
    rows: int,
    columns: int,
    scale: Tensor,
    name: str,
    wanted: tuple[bool, bool],
    bounded: bool,
    tiles: Tiles,
    halves: int = 1,
) -> tuple[Tensor | None, Tensor | None]:
    """`cast_both` of the matrix (R, halves * C) that `kernel` makes of `sources`, where a program
    casts a tile (of `rows` and `columns`) of each of its halves.
    """
    itself, transposed = wanted
    dtype, padded_rows = FP8_DTYPES[name], padded(rows)
    like = sources[0]
    values = like.new_empty((rows, halves * columns), dtype=dtype) if itself else None
    turned = like.new_empty((halves * columns, padded_rows), dtype=dtype) if transposed else None
    if columns and padded_rows:
        high, wide = triton.cdiv(padded_rows, tiles.height), triton.cdiv(columns, tiles.width)
        kernel[(high * wide,)](
            *sources,
            like if values is None else values,
            like if turned is None else turned,
            scale,
            rows,
            columns,
            padded_rows,
            FP8_MAX[name],
            want_itself=itself,
            want_transposed=transposed,
            bounded=bounded,
            height=tiles.height,
            width=tiles.width,
            num_warps=tiles.warps,
        )
    return values, turned
