"""Casts to FP8 with a scale for each 1x128 or 128x128 values, and for each row of an operand.

Values of a block are in registers when its largest is known, so that a matrix and its transpose are
rounded, each with scales of its own, in one pass over memory. So is a row that fits.
"""

# Triton is optional, and a kernel is indexed by its grid.
# pyright: reportMissingImports=false, reportIndexIssue=false

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_lightning.precision.kernels.fp8 import _limited, _power, _size

BLOCK = 128
_LONGEST = 32768
"""Columns of a row that fits into a program's registers."""


@triton.jit
def _cast_blocks(
    x,
    itself,
    transposed,
    inverses,
    turned_inverses,
    rows,
    columns,
    padded_rows,
    step,
    turned_step,
    limit,
    square: tl.constexpr,
    want_itself: tl.constexpr,
    want_transposed: tl.constexpr,
    block: tl.constexpr,
):
    high, wide = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    row = high * block + tl.arange(0, block)
    column = wide * block + tl.arange(0, block)
    inside = (row[:, None] < rows) & (column[None, :] < columns)
    values = tl.load(x + row[:, None] * columns + column[None, :], mask=inside, other=0.0)
    size = _size(values)
    if square:
        scale, inverse = _power(tl.max(tl.max(size, axis=1), axis=0), limit)
        if want_itself:
            tl.store(inverses + high * step + wide, inverse)
            rounded = _limited(values, scale, limit).to(itself.dtype.element_ty)
            tl.store(itself + row[:, None] * columns + column[None, :], rounded, mask=inside)
        if want_transposed:
            tl.store(turned_inverses + wide * turned_step + high, inverse)
            # Turned before it is cast, see `_cast_tile`.
            turned = _limited(tl.trans(values), scale, limit).to(transposed.dtype.element_ty)
            place = transposed + column[:, None] * padded_rows + row[None, :]
            tl.store(place, turned, mask=(column[:, None] < columns) & (row[None, :] < padded_rows))
    else:
        if want_itself:
            scale, inverse = _power(tl.max(size, axis=1), limit)
            tl.store(inverses + wide * step + row, inverse, mask=row < rows)
            rounded = _limited(values, scale[:, None], limit).to(itself.dtype.element_ty)
            tl.store(itself + row[:, None] * columns + column[None, :], rounded, mask=inside)
        if want_transposed:
            scale, inverse = _power(tl.max(size, axis=0), limit)
            tl.store(turned_inverses + high * turned_step + column, inverse, mask=column < columns)
            limited = _limited(values, scale[None, :], limit)
            turned = tl.trans(limited.to(transposed.dtype.element_ty))
            place = transposed + column[:, None] * padded_rows + row[None, :]
            tl.store(place, turned, mask=(column[:, None] < columns) & (row[None, :] < padded_rows))


@triton.jit
def _scale_rows(x, out, inverses, columns, padded_columns, limit, span: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, span)
    value = tl.load(x + row * columns + lane, mask=lane < columns, other=0.0)
    scale, inverse = _power(tl.max(_size(value), axis=0), limit)
    tl.store(inverses + row, inverse)
    rounded = _limited(value, scale, limit).to(out.dtype.element_ty)
    tl.store(out + row * padded_columns + lane, rounded, mask=lane < padded_columns)


@triton.jit
def _column_largest(x, found, rows, columns, each, height: tl.constexpr, width: tl.constexpr):
    """Over `each` rows a program; sizes are ordered as the integers of their bits."""
    column = tl.program_id(1).to(tl.int64) * width + tl.arange(0, width)
    begin = tl.program_id(0).to(tl.int64) * each
    most = tl.zeros((height, width), tl.float32)
    for start in range(begin, tl.minimum(begin + each, rows), height):
        row = start + tl.arange(0, height)
        inside = (row[:, None] < rows) & (column[None, :] < columns)
        value = tl.load(x + row[:, None] * columns + column[None, :], mask=inside, other=0.0)
        most = tl.maximum(most, _size(value))
    bits = tl.max(most, axis=0).to(tl.int32, bitcast=True)
    place = found.to(tl.pointer_type(tl.int32), bitcast=True) + column
    tl.atomic_max(place, bits, mask=column < columns, sem="relaxed")


@triton.jit
def _cast_columns(
    x,
    out,
    inverses,
    amax,
    rows,
    columns,
    padded_rows,
    limit,
    height: tl.constexpr,
    width: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * height + tl.arange(0, height)
    column = tl.program_id(1).to(tl.int64) * width + tl.arange(0, width)
    inside = (row[:, None] < rows) & (column[None, :] < columns)
    values = tl.load(x + row[:, None] * columns + column[None, :], mask=inside, other=0.0)
    scale, inverse = _power(tl.load(amax + column, mask=column < columns, other=0.0), limit)
    if tl.program_id(0) == 0:
        tl.store(inverses + column, inverse, mask=column < columns)
    turned = _limited(tl.trans(values), scale[:, None], limit).to(out.dtype.element_ty)
    place = out + column[:, None] * padded_rows + row[None, :]
    tl.store(place, turned, mask=(column[:, None] < columns) & (row[None, :] < padded_rows))


def cast_blocks(
    x: Tensor,
    dtype: torch.dtype,
    limit: float,
    padded_rows: int,
    *,
    square: bool,
    wanted: tuple[bool, bool],
) -> tuple[tuple[Tensor, Tensor] | None, tuple[Tensor, Tensor] | None]:
    """See `fp8_casts.cast_blocks`."""
    rows, columns = x.shape
    high, wide = triton.cdiv(rows, BLOCK), triton.cdiv(columns, BLOCK)
    values = x.new_empty((rows, columns), dtype=dtype) if wanted[0] else x
    turned = x.new_empty((columns, padded_rows), dtype=dtype) if wanted[1] else x
    if square:  # rows of scales begin at multiples of 16 bytes
        inverses = x.new_zeros((high, wide + -wide % 4), dtype=torch.float32)
        turned_inverses = x.new_zeros((wide, high + -high % 4), dtype=torch.float32)
    else:
        inverses = x.new_empty((wide, rows), dtype=torch.float32)
        turned_inverses = x.new_empty((high, columns), dtype=torch.float32)
    if x.numel():
        _cast_blocks[(high, wide)](
            x,
            values,
            turned,
            inverses,
            turned_inverses,
            rows,
            columns,
            padded_rows,
            inverses.stride(0),
            turned_inverses.stride(0),
            limit,
            square=square,
            want_itself=wanted[0],
            want_transposed=wanted[1],
            block=BLOCK,
            num_warps=8,
        )
    return (values, inverses) if wanted[0] else None, (turned, turned_inverses) if wanted[
        1
    ] else None


def scale_rows(
    x: Tensor, dtype: torch.dtype, limit: float, padded_columns: int
) -> tuple[Tensor, Tensor] | None:
    """(R, C), contiguous -> (R, `padded_columns`) in FP8 and 1 / scale (R, 1), each row by its own
    largest value; None where a row is too long.
    """
    rows, columns = x.shape
    if padded_columns > _LONGEST:
        return None
    out = x.new_empty((rows, padded_columns), dtype=dtype)
    inverses = x.new_empty((rows, 1), dtype=torch.float32)
    if out.numel():
        span = triton.next_power_of_2(padded_columns)
        warps = min(16, max(1, span // 1024))
        _scale_rows[(rows,)](
            x, out, inverses, columns, padded_columns, limit, span=span, num_warps=warps
        )
    return out, inverses


def column_largest(x: Tensor) -> Tensor:
    """Largest absolute value of each column of (R, C), contiguous: (C, 1) float32."""
    rows, columns = x.shape
    found = x.new_zeros((columns, 1), dtype=torch.float32)
    if x.numel():
        grid = (triton.cdiv(rows, 512), triton.cdiv(columns, 128))
        _column_largest[grid](x, found, rows, columns, 512, height=64, width=128, num_warps=8)
    return found


def cast_columns(
    x: Tensor, amax: Tensor, dtype: torch.dtype, limit: float, padded_rows: int
) -> tuple[Tensor, Tensor]:
    """(R, C), contiguous, and largest values of its columns (C, 1) -> transposed (C,
    `padded_rows`) in FP8, 1 / scale (C, 1).
    """
    rows, columns = x.shape
    out = x.new_empty((columns, padded_rows), dtype=dtype)
    inverses = torch.empty_like(amax)
    if out.numel():
        grid = (triton.cdiv(padded_rows, 128), triton.cdiv(columns, 128))
        _cast_columns[grid](
            x,
            out,
            inverses,
            amax,
            rows,
            columns,
            padded_rows,
            limit,
            height=128,
            width=128,
            num_warps=8,
        )
    return out, inverses
