"""Largest values, scales and casts of matrices that FP8 products take: by Triton kernels on CUDA,
by plain torch elsewhere (and where triton is missing), with the same results.

Casts of float32 are left to plain torch: from it, tiles change threads as bytes, after the cast,
which ptxas 12.9 gets wrong on compute capability 9.0 (triton-lang/triton issue 11111: every other
pair of rows of a transpose holds foreign bytes). Tiles of 16-bit numbers change threads before.
"""

from __future__ import annotations

import functools
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_lightning.precision.formats import (
    FP8_DTYPES,
    FP8_MAX,
    cast_fp8,
    padded,
    power_of_two_scale,
)
from megatron_lightning.precision.operands import Reduce, by_blocks, identity, largest, row_largest
from megatron_lightning.utils.logging import is_installed

BLOCK = 128
"""Values that share a scale, along one dim or two."""
_HALF = 2
"""Bytes of bfloat16 and float16."""


class Cast(Protocol):
    """What makes operands of a matrix that is nowhere in memory, see `cast_both`."""

    def __call__(
        self, scale: Tensor, name: str, wanted: tuple[bool, bool], *, bounded: bool = False
    ) -> tuple[Tensor | None, Tensor | None]:
        """The matrix times `scale` in the format `name`, itself and transposed."""
        ...


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

        return fp8.largest(x)[0]
    return largest(x)


def largest_and_scales_of(x: Tensor, name: str) -> tuple[Tensor, Tensor, Tensor]:
    """`largest_of` and `scales_of` it: (largest, scale, 1 / scale), each 0-dim float32."""
    if _by_kernel(x):
        from megatron_lightning.precision.kernels import fp8

        return fp8.largest(x, FP8_MAX[name])
    amax = largest(x)
    return amax, *scales_of(amax, name)


def scales_of_parts(parts: Tensor, name: str) -> tuple[Tensor, Tensor, Tensor]:
    """`largest_and_scales_of` a tensor, of largest values of its parts: contiguous, any dtype."""
    if _by_kernel(parts):
        from megatron_lightning.precision.kernels import fp8

        return fp8.join(parts, FP8_MAX[name])
    amax = largest(parts)
    return amax, *scales_of(amax, name)


def row_largest_of(x: Tensor) -> Tensor:
    """Largest absolute value of each row of (R, C), contiguous: (R, 1) float32."""
    if _by_kernel(x):
        from megatron_lightning.precision.kernels import fp8

        return fp8.row_largest(x)
    return row_largest(x)


def column_largest_of(x: Tensor) -> Tensor:
    """Largest absolute value of each column of (R, C), contiguous: (C, 1) float32."""
    if _by_kernel(x):
        from megatron_lightning.precision.kernels import fp8_blocks

        return fp8_blocks.column_largest(x)
    return row_largest(x.t())


def scales_of(amax: Tensor, name: str) -> tuple[Tensor, Tensor]:
    """(scale, 1 / scale) for largest values, see `formats.power_of_two_scale`."""
    if _by_kernel(amax):
        from megatron_lightning.precision.kernels import fp8

        return fp8.scales(amax.contiguous(), FP8_MAX[name])
    scale = power_of_two_scale(amax, FP8_MAX[name])
    return scale, scale.reciprocal()


def cast_both(
    x: Tensor, scale: Tensor, name: str, wanted: tuple[bool, bool], *, bounded: bool = False
) -> tuple[Tensor | None, Tensor | None]:
    """`x` (R, C), contiguous, times a 0-dim `scale`, in FP8: (R, C), and transposed (C, R') with
    zeros from R up to a multiple of 16; each if wanted. `bounded`: the scale is that of a largest
    value which none of `x` exceeds.
    """
    if _casts_by_kernel(x):
        from megatron_lightning.precision.kernels import fp8_tiles

        return fp8_tiles.cast_both(x, scale, name, wanted, bounded=bounded)
    values = cast_fp8(x.float() * scale, name)
    turned = None
    if wanted[1]:
        missing = padded(len(x)) - len(x)
        turned = F.pad(values.view(torch.uint8).t(), (0, missing)).contiguous()
        turned = turned.view(values.dtype)
    return values if wanted[0] else None, turned


def cast_rows(x: Tensor, scale: Tensor, name: str) -> Tensor:
    """`x` (R, C), contiguous, times `scale` (R, 1), in FP8: (R, C') with zeros from C up to a
    multiple of 16.
    """
    columns = padded(x.shape[1])
    if _casts_by_kernel(x):
        from megatron_lightning.precision.kernels import fp8

        return fp8.cast_rows(x, scale, FP8_DTYPES[name], FP8_MAX[name], columns)
    values = cast_fp8(x.float() * scale, name)
    return F.pad(values.view(torch.uint8), (0, columns - x.shape[1])).view(values.dtype)


def scale_rows(x: Tensor, name: str) -> tuple[Tensor, Tensor]:
    """`cast_rows` of `x` (R, C) by each row's own largest value, and 1 / scale (R, 1)."""
    if _casts_by_kernel(x):
        from megatron_lightning.precision.kernels import fp8_blocks

        done = fp8_blocks.scale_rows(x, FP8_DTYPES[name], FP8_MAX[name], padded(x.shape[1]))
        if done is not None:
            return done
    scale, inverse = scales_of(row_largest_of(x), name)
    return cast_rows(x, scale, name), inverse


def cast_columns(x: Tensor, amax: Tensor, name: str) -> tuple[Tensor, Tensor]:
    """The transpose of `x` (R, C), contiguous, in FP8, (C, R') with zeros from R up to a multiple
    of 16, each row by its largest value `amax` (C, 1); and 1 / scale (C, 1).
    """
    if _casts_by_kernel(x):
        from megatron_lightning.precision.kernels import fp8_blocks

        rows = padded(x.shape[0])
        return fp8_blocks.cast_columns(x, amax, FP8_DTYPES[name], FP8_MAX[name], rows)
    scale, inverse = scales_of(amax, name)
    return cast_rows(x.t().contiguous(), scale, name), inverse


def cast_stack_columns(weight: Tensor, name: str, reduce: Reduce) -> tuple[Tensor, Tensor]:
    """Stacked matrices (E, N, K), contiguous, each transposed in FP8, (E, K, N), each row by its
    own largest value, which `reduce` takes over ranks; and 1 / scale (E, K, 1).
    """
    if _casts_by_kernel(weight):
        from megatron_lightning.precision.kernels import fp8_stacks

        amax = None if reduce is identity else reduce(fp8_stacks.column_largest(weight))
        return fp8_stacks.cast_columns(weight, amax, FP8_DTYPES[name], FP8_MAX[name])
    turned = weight.transpose(1, 2).contiguous()
    rows = turned.flatten(0, 1)
    scale, inverse = scales_of(reduce(row_largest_of(rows)), name)
    values = cast_rows(rows, scale, name)[:, : turned.shape[2]]
    return values.view(turned.shape), inverse.view(*turned.shape[:2], 1)


def cast_groups(x: Tensor, counts: Tensor, name: str) -> tuple[Tensor, Tensor, Tensor] | None:
    """Rows (R, C), contiguous, of which each group has `counts` (E,), transposed in FP8 (C, P),
    each row within a group by its own largest value; 1 / scale (E * C,), and where groups end
    (E,), int32. Behind a group zeros stand up to a multiple of 16, at least that many. None where
    no kernel does it without knowing the counts.
    """
    if not _casts_by_kernel(x):
        return None
    from megatron_lightning.precision.kernels import fp8_stacks

    return fp8_stacks.cast_groups(x, counts, FP8_DTYPES[name], FP8_MAX[name])


def cast_blocks(
    x: Tensor, name: str, *, square: bool, wanted: tuple[bool, bool]
) -> tuple[tuple[Tensor, Tensor] | None, tuple[Tensor, Tensor] | None]:
    """`x` (R, C), contiguous, in FP8, and transposed (C, R') with zeros from R up to a multiple of
    16; each if wanted, with its 1 / scale. Of 1x128 values those are (C / 128, R) and (R / 128, C);
    of 128x128, `square`, (R / 128, C / 128) and transposed, with columns up to a multiple of 4.
    """
    if _casts_by_kernel(x):
        from megatron_lightning.precision.kernels import fp8_blocks

        return fp8_blocks.cast_blocks(
            x,
            FP8_DTYPES[name],
            FP8_MAX[name],
            padded(x.shape[0]),
            square=square,
            wanted=wanted,
        )
    itself = _blocks(x, name, square, x.shape[1]) if wanted[0] else None
    turned = _blocks(x.t().contiguous(), name, square, padded(len(x))) if wanted[1] else None
    return itself, turned


def _blocks(x: Tensor, name: str, square: bool, width: int) -> tuple[Tensor, Tensor]:
    held = x.new_zeros(())

    def quantise(blocks: Tensor, amax: Tensor) -> Tensor:
        nonlocal held
        scale, inverse = scales_of(amax, name)
        held = inverse[:, 0, :, 0]
        return blocks * scale

    height = BLOCK if square else 1
    values = cast_fp8(by_blocks(x, height, BLOCK, quantise), name)
    missing = -held.shape[1] % 4 if square else 0
    held = F.pad(held, (0, missing)) if square else held.t().contiguous()
    filled = F.pad(values.view(torch.uint8), (0, width - x.shape[1]))
    return filled.view(values.dtype), held
