"""Casts of stacked matrices to FP8, each transposed, with a scale for each row of the transpose.

One program does some columns of one matrix: it reads them twice, the second time out of the cache.
"""

# Triton is optional, and a kernel is indexed by its grid.
# pyright: reportMissingImports=false, reportIndexIssue=false

import torch
import triton
import triton.language as tl
from torch import Tensor

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
    for start in range(0, rows, height):
        row = (start + tl.arange(0, height)).to(tl.int64)
        inside = (row[:, None] < rows) & (column[None, :] < columns)
        values = tl.load(x + row[:, None] * columns + column[None, :], mask=inside, other=0.0)
        turned = tl.trans(_limited(values, scale[None, :], limit).to(out.dtype.element_ty))
        place = out + column[:, None].to(tl.int64) * rows + row[None, :]
        tl.store(place, turned, mask=(column[:, None] < columns) & (row[None, :] < rows))


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
