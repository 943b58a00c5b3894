"""Casts of stacked matrices, and of groups of rows, to FP8, each transposed, with a scale for each
row of the transpose.

One program does some columns of one matrix: it reads them twice, the second time out of the cache.
"""

# Triton is optional, and a kernel is indexed by its grid.
# pyright: reportMissingImports=false, reportIndexIssue=false

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_lightning.precision.formats import FP8_MULTIPLE
from megatron_lightning.precision.kernels.fp8 import _limited, _power, _size

_HEIGHT = 256
_WIDTH = 32
"""Columns of a program: few, so that those of all programs at a time stay in the cache."""
_WARPS = 8


@triton.jit
def _largest_of_columns(x, rows, columns, column, height: tl.constexpr, width: tl.constexpr):
    """Of one matrix, for columns (width,)."""
    most = tl.zeros((height, width), tl.float32)
    for start in range(0, rows, height):
        row = (start + tl.arange(0, height)).to(tl.int64)
        inside = (row[:, None] < rows) & (column[None, :] < columns)
        value = tl.load(x + row[:, None] * columns + column[None, :], mask=inside, other=0.0)
        most = tl.maximum(most, _size(value))
    return tl.max(most, axis=0)


@triton.jit
def _turn(
    x,
    out,
    scale,
    rows,
    room,
    columns,
    column,
    step,
    limit,
    height: tl.constexpr,
):
    """Rows of one matrix into columns of `out`, whose rows are `step` apart; zeros up to `room`."""
    for start in range(0, room, height):
        row = (start + tl.arange(0, height)).to(tl.int64)
        inside = (row[:, None] < rows) & (column[None, :] < columns)
        values = tl.load(x + row[:, None] * columns + column[None, :], mask=inside, other=0.0)
        # Turned before it is rounded, see `fp8._cast_tile`.
        turned = _limited(tl.trans(values), scale[:, None], limit).to(out.dtype.element_ty)
        place = out + column[:, None].to(tl.int64) * step + row[None, :]
        tl.store(place, turned, mask=(column[:, None] < columns) & (row[None, :] < room))


@triton.jit
def _column_largest(x, found, rows, columns, height: tl.constexpr, width: tl.constexpr):
    matrix = tl.program_id(1).to(tl.int64)
    column = tl.program_id(0) * width + tl.arange(0, width)
    most = _largest_of_columns(x + matrix * rows * columns, rows, columns, column, height, width)
    tl.store(found + matrix * columns + column, most, mask=column < columns)


@triton.jit
def _cast_columns(
    x,
    amax,
    out,
    inverses,
    rows,
    columns,
    limit,
    known: tl.constexpr,
    height: tl.constexpr,
    width: tl.constexpr,
):
    matrix = tl.program_id(1).to(tl.int64)
    column = tl.program_id(0) * width + tl.arange(0, width)
    x += matrix * rows * columns
    out += matrix * rows * columns
    if known:
        most = tl.load(amax + matrix * columns + column, mask=column < columns, other=0.0)
    else:
        most = _largest_of_columns(x, rows, columns, column, height, width)
    scale, inverse = _power(most, limit)
    tl.store(inverses + matrix * columns + column, inverse, mask=column < columns)
    _turn(x, out, scale, rows, rows, columns, column, rows, limit, height)


@triton.jit
def _cast_groups(
    x,
    counts,
    out,
    inverses,
    ends,
    groups,
    columns,
    step,
    limit,
    most_groups: tl.constexpr,
    multiple: tl.constexpr,
    height: tl.constexpr,
    width: tl.constexpr,
):
    group = tl.program_id(1)
    column = tl.program_id(0) * width + tl.arange(0, width)
    lane = tl.arange(0, most_groups)
    rows = tl.load(counts + lane, mask=lane < groups, other=0).to(tl.int32)
    room = tl.maximum((rows + multiple - 1) // multiple * multiple, multiple)
    start = tl.sum(tl.where(lane < group, rows, 0), axis=0)
    begin = tl.multiple_of(tl.sum(tl.where(lane < group, room, 0), axis=0), multiple)
    own = tl.sum(tl.where(lane == group, rows, 0), axis=0)
    own_room = tl.multiple_of(tl.sum(tl.where(lane == group, room, 0), axis=0), multiple)
    if tl.program_id(0) == 0:
        tl.store(ends + group, begin + own_room)
    x += start.to(tl.int64) * columns
    most = _largest_of_columns(x, own, columns, column, height, width)
    scale, inverse = _power(most, limit)
    place = group.to(tl.int64) * columns + column
    tl.store(inverses + place, inverse, mask=column < columns)
    _turn(x, out + begin, scale, own, own_room, columns, column, step, limit, height)


def column_largest(x: Tensor) -> Tensor:
    """Largest absolute value of each column of (E, R, C), contiguous: (E * C, 1) float32."""
    matrices, rows, columns = x.shape
    found = x.new_empty((matrices * columns, 1), dtype=torch.float32)
    if found.numel():
        grid = (triton.cdiv(columns, _WIDTH), matrices)
        _column_largest[grid](
            x, found, rows, columns, height=_HEIGHT, width=_WIDTH, num_warps=_WARPS
        )
    return found


def cast_columns(
    x: Tensor, amax: Tensor | None, dtype: torch.dtype, limit: float
) -> tuple[Tensor, Tensor]:
    """(E, R, C), contiguous, and largest values of columns (E * C, 1) or None for their own ->
    transposed (E, C, R) in FP8 and 1 / scale (E, C, 1).
    """
    matrices, rows, columns = x.shape
    out = x.new_empty((matrices, columns, rows), dtype=dtype)
    inverses = x.new_empty((matrices, columns, 1), dtype=torch.float32)
    if inverses.numel():
        _cast_columns[(triton.cdiv(columns, _WIDTH), matrices)](
            x,
            x if amax is None else amax,
            out,
            inverses,
            rows,
            columns,
            limit,
            known=amax is not None,
            height=_HEIGHT,
            width=_WIDTH,
            num_warps=_WARPS,
        )
    return out, inverses


def cast_groups(
    x: Tensor, counts: Tensor, dtype: torch.dtype, limit: float
) -> tuple[Tensor, Tensor, Tensor]:
    """See `fp8_casts.cast_groups`. P is the most that R rows and E groups may come to."""
    (rows, columns), groups = x.shape, len(counts)
    padded = rows + -rows % FP8_MULTIPLE + FP8_MULTIPLE * groups
    out = x.new_empty((columns, padded), dtype=dtype)
    inverses = x.new_empty(groups * columns, dtype=torch.float32)
    ends = counts.new_empty(groups, dtype=torch.int32)
    if inverses.numel():
        _cast_groups[(triton.cdiv(columns, _WIDTH), groups)](
            x,
            counts,
            out,
            inverses,
            ends,
            groups,
            columns,
            padded,
            limit,
            most_groups=triton.next_power_of_2(groups),
            multiple=FP8_MULTIPLE,
            height=_HEIGHT,
            width=_WIDTH,
            num_warps=_WARPS,
        )
    return out, inverses, ends
