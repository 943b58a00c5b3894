"""Largest values, scales and casts of matrices that FP8 products take: by Triton kernels on CUDA,
by plain torch elsewhere (and where triton is missing), with the same results.

Casts of float32 are left to plain torch: from it, tiles change threads as bytes, after the cast,
which ptxas 12.9 gets wrong on compute capability 9.0 (triton-lang/triton issue 11111: every other
pair of rows of a transpose holds foreign bytes). Tiles of 16-bit numbers change threads before.
"""

from __future__ import annotations

import functools

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_lightning.precision.formats import (
    FP8_DTYPES,
    FP8_MAX,
    cast_fp8,
    power_of_two_scale,
)
from megatron_lightning.precision.operands import largest, row_largest
from megatron_lightning.utils.logging import is_installed

_MULTIPLE = 16
"""What the summed dim of a product must be a multiple of."""
_HALF = 2
"""Bytes of bfloat16 and float16."""


@functools.lru_cache(maxsize=1)
def _has_triton() -> bool:
    return is_installed("triton")


def _by_kernel(x: Tensor) -> bool:
    return x.is_cuda and x.element_size() <= 4 and _has_triton()


def _casts_by_kernel(x: Tensor) -> bool:
    return _by_kernel(x) and x.element_size() == _HALF


def largest_of(x: Tensor) -> Tensor:
    """Largest absolute value of a contiguous tensor, 0-dim float32; not finite where one isn't."""
    if _by_kernel(x):
        from megatron_lightning.precision.kernels import fp8

        return fp8.largest(x)
    return largest(x)


def row_largest_of(x: Tensor) -> Tensor:
    """Largest absolute value of each row of (R, C), contiguous: (R, 1) float32."""
    if _by_kernel(x):
        from megatron_lightning.precision.kernels import fp8

        return fp8.row_largest(x)
    return row_largest(x)


def scales_of(amax: Tensor, name: str) -> tuple[Tensor, Tensor]:
    """(scale, 1 / scale) for largest values, see `formats.power_of_two_scale`."""
    if _by_kernel(amax):
        from megatron_lightning.precision.kernels import fp8

        return fp8.scales(amax.contiguous(), FP8_MAX[name])
    scale = power_of_two_scale(amax, FP8_MAX[name])
    return scale, scale.reciprocal()


def cast_both(
    x: Tensor, scale: Tensor, name: str, wanted: tuple[bool, bool], seen: Tensor | None
) -> tuple[Tensor | None, Tensor | None]:
    """`x` (R, C), contiguous, times a 0-dim `scale`, in FP8: (R, C), and transposed (C, R') with
    zeros from R up to a multiple of 16; each if wanted. `seen`: 0-dim, becomes the largest of
    itself and the absolute values of `x`.
    """
    itself, transposed = wanted
    rows = x.shape[0] + -x.shape[0] % _MULTIPLE
    if _casts_by_kernel(x):
        from megatron_lightning.precision.kernels import fp8

        return fp8.cast_both(
            x,
            scale,
            FP8_DTYPES[name],
            FP8_MAX[name],
            itself=itself,
            transposed=transposed,
            padded_rows=rows,
            seen=seen,
        )
    if seen is not None:
        torch.maximum(seen, largest_of(x), out=seen)
    values = cast_fp8(x.float() * scale, name)
    turned = None
    if transposed:
        turned = F.pad(values.view(torch.uint8).t(), (0, rows - x.shape[0])).view(values.dtype)
    return values if itself else None, turned


def cast_rows(x: Tensor, scale: Tensor, name: str) -> Tensor:
    """`x` (R, C), contiguous, times `scale` (R, 1), in FP8: (R, C') with zeros from C up to a
    multiple of 16.
    """
    columns = x.shape[1] + -x.shape[1] % _MULTIPLE
    if _casts_by_kernel(x):
        from megatron_lightning.precision.kernels import fp8

        return fp8.cast_rows(x, scale, FP8_DTYPES[name], FP8_MAX[name], columns)
    values = cast_fp8(x.float() * scale, name)
    return F.pad(values.view(torch.uint8), (0, columns - x.shape[1])).view(values.dtype)
