"""Many weights cast to FP8 at once: largest values in one launch, casts and transposes in another.

Weights are found by a table of addresses, so that they need not lie in one buffer.
"""

# Triton is optional, and a kernel is indexed by its grid.
# pyright: reportMissingImports=false, reportIndexIssue=false

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_lightning.precision.kernels import choices
from megatron_lightning.precision.kernels.fp8 import _larger, _power, _size
from megatron_lightning.precision.kernels.fp8_tiles import _cast_tile, _place_of

COLUMNS = 5
"""Of the table: addresses of a weight, of itself and of its transpose in FP8, rows, columns."""
STEP = 12
"""Float32 numbers of one weight: its largest value, scale and 1 / scale, each aligned."""
_SPAN = 4096
_SPANS = 16
CHUNK = _SPAN * _SPANS
"""Elements that one program searches for the largest."""
_WARPS = 8
_ELEMENTS = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


def tile() -> tuple[int, int]:
    """Rows and columns that one program casts."""
    return choices.CAST.height, choices.CAST.width


@triton.jit
def _at(table, member, column, element: tl.constexpr):
    address = tl.load(table + member * 5 + column)
    return tl.multiple_of(address.to(tl.pointer_type(element)), 16)


@triton.jit
def _largest_of_many(
    table, member_of, chunk_of, found, element: tl.constexpr, span: tl.constexpr, spans
):
    member = tl.load(member_of + tl.program_id(0)).to(tl.int64)
    begin = tl.load(chunk_of + tl.program_id(0)).to(tl.int64) * span * spans
    count = tl.load(table + member * 5 + 3) * tl.load(table + member * 5 + 4)
    weight = _at(table, member, 0, element)
    most = tl.zeros((span,), tl.float32)
    for part in range(spans):
        index = begin + part * span + tl.arange(0, span)
        values = tl.load(weight + index, mask=index < count, other=0.0)
        most = _larger(most, values.to(tl.float32))
    # Sizes are ordered as the integers of their bits.
    place = (found + member * 12).to(tl.pointer_type(tl.int32), bitcast=True)
    largest = _size(tl.reduce(most, 0, _larger))
    tl.atomic_max(place, largest.to(tl.int32, bitcast=True), sem="relaxed")


@triton.jit
def _cast_many(
    table,
    member_of,
    tile_of,
    found,
    limit,
    element: tl.constexpr,
    height: tl.constexpr,
    width: tl.constexpr,
):
    member = tl.load(member_of + tl.program_id(0)).to(tl.int64)
    tile = tl.load(tile_of + tl.program_id(0))
    rows = tl.multiple_of(tl.load(table + member * 5 + 3), 16)
    columns = tl.multiple_of(tl.load(table + member * 5 + 4), 16)
    weight = _at(table, member, 0, element)
    itself = _at(table, member, 1, tl.float8e4nv)
    transposed = _at(table, member, 2, tl.float8e4nv)
    scale, inverse = _power(tl.load(found + member * 12), limit)
    if tile == 0:
        tl.store(found + member * 12 + 4, scale)
        tl.store(found + member * 12 + 8, inverse)
    down, right = _place_of(tile, columns, width)
    _cast_tile(
        *(weight, itself, transposed, scale, rows, columns, rows, limit, down, right),
        *(True, True, True, height, width),
    )


def cast_many(
    table: Tensor,
    chunks: tuple[Tensor, Tensor],
    tiles: tuple[Tensor, Tensor],
    found: Tensor,
    dtype: torch.dtype,
    limit: float,
) -> None:
    """Cast weights of `dtype` to E4M3, each with a scale of its own largest value.

    `table` (weights, COLUMNS) int64; `chunks` and `tiles`, int32: which weight, and which part of
    CHUNK elements or tile of it, each program works on; `found` (weights, STEP) float32, where
    largest values, scales and 1 / scale are written.
    """
    element = _ELEMENTS[dtype]
    found.zero_()
    _largest_of_many[(len(chunks[0]),)](
        table, *chunks, found, element=element, span=_SPAN, spans=_SPANS, num_warps=_WARPS
    )
    height, width = tile()
    _cast_many[(len(tiles[0]),)](
        table,
        *tiles,
        found,
        limit,
        element=element,
        height=height,
        width=width,
        num_warps=choices.CAST.warps,
    )
