"""Largest values, scales and casts of rows to FP8, one pass over memory each."""

# Triton is optional, and a kernel is indexed by its grid.
# pyright: reportMissingImports=false, reportIndexIssue=false

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_lightning.precision.kernels import choices
from megatron_lightning.precision.kernels.choices import Spans

_WARPS = 8
_PARTS = 1024
"""Largest values that are joined at a time."""


@triton.jit
def _size(x):
    """|x| in float32, infinite for NaN."""
    x = tl.abs(x.to(tl.float32))
    return tl.where(x == x, x, float("inf"))  # noqa: PLR0124


@triton.jit
def _larger(most, x):
    """The larger size, NaN where one is."""
    return tl.maximum(most, tl.abs(x), propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _largest(x, parts, count, span: tl.constexpr):
    """Largest size among every parts-th span of elements."""
    lane = tl.arange(0, span)
    step = tl.num_programs(0).to(tl.int64) * span
    begin = tl.program_id(0).to(tl.int64) * span
    found = tl.zeros((span,), tl.float32)
    for start in range(begin, count, step):
        index = start + lane
        found = _larger(found, tl.load(x + index, mask=index < count, other=0.0).to(tl.float32))
    tl.store(parts + tl.program_id(0), _size(tl.reduce(found, 0, _larger)))


@triton.jit
def _power(amax, limit):
    """(scale, 1 / scale), see `formats.power_of_two_scale`; powers of two by their exponent."""
    quotient = tl.div_rn(tl.zeros_like(amax) + limit, amax)
    exponent = (quotient.to(tl.int32, bitcast=True) >> 23) & 0xFF
    exponent = tl.minimum(tl.maximum(exponent, 1), 253)
    scale = (exponent << 23).to(tl.float32, bitcast=True)
    inverse = ((254 - exponent) << 23).to(tl.float32, bitcast=True)
    scale = tl.where(amax == 0.0, 1.0, scale)
    inverse = tl.where(amax == 0.0, 1.0, inverse)
    finite = amax < float("inf")
    return tl.where(finite, scale, float("nan")), tl.where(finite, inverse, float("nan"))


@triton.jit
def _join(parts, joined, limit, count, block: tl.constexpr):
    """The largest size of `parts`, its scale and 1 / scale, four float32 from one to the next."""
    lane = tl.arange(0, block)
    found = tl.zeros((block,), tl.float32)
    for start in range(0, count, block):
        inside = start + lane < count
        found = tl.maximum(found, _size(tl.load(parts + start + lane, mask=inside, other=0.0)))
    most = tl.max(found, axis=0)
    scale, inverse = _power(most, limit)
    tl.store(joined, most)
    tl.store(joined + 4, scale)
    tl.store(joined + 8, inverse)


@triton.jit
def _scales(amax, scales, inverses, limit, count, block: tl.constexpr):
    lane = tl.program_id(0) * block + tl.arange(0, block)
    inside = lane < count
    scale, inverse = _power(tl.load(amax + lane, mask=inside, other=0.0), limit)
    tl.store(scales + lane, scale, mask=inside)
    tl.store(inverses + lane, inverse, mask=inside)


@triton.jit
def _limited(x, scale, limit):
    """Scaled, in float32: finite values within the format, NaN for what isn't finite."""
    value = x.to(tl.float32) * scale
    limited = tl.minimum(tl.maximum(value, -limit), limit)
    finite = _size(value) < float("inf")
    return tl.where(finite, limited, float("nan"))


@triton.jit
def _row_largest(x, found, columns, span: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, span)
    most = tl.zeros((span,), tl.float32)
    for start in range(0, columns, span):
        inside = start + lane < columns
        value = tl.load(x + row * columns + start + lane, mask=inside, other=0.0)
        most = tl.maximum(most, _size(value))
    tl.store(found + row, tl.max(most, axis=0))


@triton.jit
def _cast_rows(x, out, scales, columns, padded_columns, limit, span: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    lane = tl.program_id(1) * span + tl.arange(0, span)
    value = tl.load(x + row * columns + lane, mask=lane < columns, other=0.0)
    rounded = _limited(value, tl.load(scales + row), limit).to(out.dtype.element_ty)
    tl.store(out + row * padded_columns + lane, rounded, mask=lane < padded_columns)


def largest(
    x: Tensor, limit: float = 1.0, spans: Spans | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Largest absolute value of a contiguous tensor, 0-dim float32, infinite where one is NaN; its
    scale and 1 / scale. Each is at a multiple of 16 bytes, as products take them.
    """
    spans = choices.LARGEST if spans is None else spans
    programs = max(1, min(triton.cdiv(x.numel(), spans.block), spans.programs))
    parts = x.new_empty(programs, dtype=torch.float32)
    _largest[(programs,)](x, parts, x.numel(), span=spans.block, num_warps=spans.warps)
    return join(parts, limit)


def join(parts: Tensor, limit: float) -> tuple[Tensor, Tensor, Tensor]:
    """`largest` of few numbers, by one program."""
    joined = parts.new_empty(12, dtype=torch.float32)
    block = _PARTS if parts.numel() <= _PARTS else 4 * _PARTS
    _join[(1,)](parts, joined, limit, parts.numel(), block=block, num_warps=block // 256)
    return joined[0], joined[4], joined[8]


def scales(amax: Tensor, limit: float) -> tuple[Tensor, Tensor]:
    """(scale, 1 / scale) of each of `amax`, contiguous float32."""
    scale, inverse = torch.empty_like(amax), torch.empty_like(amax)
    block = 256
    if amax.numel():
        grid = (triton.cdiv(amax.numel(), block),)
        _scales[grid](amax, scale, inverse, limit, amax.numel(), block=block)
    return scale, inverse


def row_largest(x: Tensor) -> Tensor:
    """Largest absolute value of each row of (R, C), contiguous: (R, 1) float32."""
    found = x.new_zeros((x.shape[0], 1), dtype=torch.float32)
    if x.numel():
        _row_largest[(x.shape[0],)](x, found, x.shape[1], span=4096, num_warps=_WARPS)
    return found


def cast_rows(
    x: Tensor, scale: Tensor, dtype: torch.dtype, limit: float, padded_columns: int
) -> Tensor:
    """(R, C), contiguous, and (R, 1) -> (R, `padded_columns`) in FP8."""
    rows, columns = x.shape
    out = x.new_empty((rows, padded_columns), dtype=dtype)
    if out.numel():
        span = 2048
        _cast_rows[(rows, triton.cdiv(padded_columns, span))](
            x, out, scale, columns, padded_columns, limit, span=span, num_warps=4
        )
    return out
