"""FP8 products on the GPU's own units, by torch's `_scaled_mm` alone.

Forward products may add in less than float32 within the unit (fast accumulation), gradients do not.
Hardware of the time multiplies A B^T with both factors contiguous along the dim that is summed
over, so that a matrix is rounded into two copies, itself and its transpose, in one pass. The summed
dim is a multiple of 16 (zeros behind the tokens, which change neither scales nor sums).
"""

from __future__ import annotations

import functools

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_lightning.precision.cublas_lt import add_product_
from megatron_lightning.precision.delayed import DelayedRecipe
from megatron_lightning.precision.fp8_casts import (
    BLOCK,
    Cast,
    cast_blocks,
    cast_both,
    cast_columns,
    cast_rows,
    column_largest_of,
    largest_and_scales_of,
    largest_of,
    row_largest_of,
    scale_rows,
    scales_of,
    scales_of_parts,
)
from megatron_lightning.precision.operands import (
    BOTH,
    Noise,
    Operand,
    Pair,
    Reduce,
    Role,
    Wanted,
    identity,
)
from megatron_lightning.precision.simulated import TensorRecipe

_CAPABILITY = (8, 9)
_ROWS = 16
"""Products with scales of blocks need a multiple of it."""
_BLOCKS = 9
"""Compute capability, its first number, of scales by blocks of 128."""
_BLOCKS_CUDA = (12, 9)
"""CUDA whose cuBLAS has them."""


def device_problem(device: torch.device, *, blocks: bool = False) -> str | None:
    """Why the device has no FP8 products, with the remedy; None when it has. `blocks`: those with
    scales of blocks.
    """
    remedy = "set simulate=True, which gives the recipe's numbers on any device"
    if device.type != "cuda":
        return f"there are no FP8 products on {device.type}; {remedy}"
    capability = torch.cuda.get_device_capability(device)
    name = f"{torch.cuda.get_device_name(device)} has compute capability"
    name += f" {capability[0]}.{capability[1]}, and"
    if capability < _CAPABILITY:
        return f"{name} FP8 products need {_CAPABILITY[0]}.{_CAPABILITY[1]} or newer; {remedy}"
    if blocks and capability[0] != _BLOCKS:
        return (
            f"{name} cuBLAS has FP8 products with scales of 1x128 and 128x128 on {_BLOCKS}.x only;"
            f" use recipe='fp8_rowwise', or {remedy}"
        )
    return blocks_problem() if blocks else None


def blocks_problem() -> str | None:
    """Why this build of torch has no products with scales of blocks on any device; None when it
    has. Asks no device.
    """
    version = torch.version.cuda
    if version is not None and tuple(map(int, version.split(".")[:2])) >= _BLOCKS_CUDA:
        return None
    needed = ".".join(map(str, _BLOCKS_CUDA))
    return (
        f"torch is built for CUDA {version}, and cuBLAS has FP8 products with scales of 1x128 and"
        f" 128x128 from {needed} on; install a build for {needed} or newer, use"
        " recipe='fp8_rowwise', or set simulate=True, which gives the recipe's numbers on any"
        " device"
    )


class FP8TensorRecipe(TensorRecipe):
    """One scale for a tensor: of its own largest value, or by `delayed` of those before."""

    layout = "tensor"
    takes_parts = True

    def __init__(self, gradient: str, delayed: DelayedRecipe | None = None) -> None:
        super().__init__(gradient)
        self._delayed = delayed
        self.lends_scales = delayed is not None

    @property
    def is_settled(self) -> bool:
        """See `Recipe.is_settled`."""
        return self._delayed is None or self._delayed.is_settled

    def pair(
        self,
        x: Tensor,
        role: Role,
        *,
        over_rows: Reduce = identity,
        over_columns: Reduce = identity,
        noise: Noise | None = None,
        wanted: Wanted = BOTH,
        parts: Tensor | None = None,
        cast: Cast | None = None,
    ) -> Pair:
        """See `Recipe.pair`. `parts`: contiguous, the largest absolute values of parts of `x`, of
        all or of its rows, by whoever wrote `x`. With `cast`, which needs `parts`, values of `x`
        are not looked at.
        """
        name = self.format_of(role)
        x = x.contiguous()
        write = functools.partial(cast_both, x) if cast is None else cast
        if self._delayed is not None and self._delayed.store.has_history:
            seen, scale, inverse = self._delayed.place(role)
            if self._delayed.store.recording:  # a pass of its own is faster than within the cast
                own = largest_of(x) if parts is None else scales_of_parts(parts, name)[0]
                torch.maximum(seen, own, out=seen)
            values, transposed = write(scale, name, wanted)
        else:
            found = (
                largest_and_scales_of(x, name) if parts is None else scales_of_parts(parts, name)
            )
            amax, scale, inverse = found
            if self._delayed is not None and self._delayed.store.recording:
                seen, _, _ = self._delayed.place(role)
                torch.maximum(seen, amax, out=seen)
            if over_rows is not identity or over_columns is not identity:
                scale, inverse = scales_of(over_columns(over_rows(amax)), name)
            values, transposed = write(scale, name, wanted, bounded=True)
        return Pair(
            None if values is None else Operand(values, inverse),
            None if transposed is None else Operand(transposed, inverse),
        )

    def product(
        self,
        a: Operand,
        b: Operand,
        dtype: torch.dtype,
        *,
        forward: bool,
        out: Tensor | None = None,
    ) -> Tensor:
        """See `Recipe.product`."""
        return _scaled(a, b, dtype, forward=forward, out=out)

    def add_product_(self, total: Tensor, a: Operand, b: Operand) -> bool:
        """See `Recipe.add_product_`."""
        assert a.scale is not None
        assert b.scale is not None
        return add_product_(total, a.values, a.scale, b.values, b.scale)


class FP8RowRecipe(TensorRecipe):
    """A scale for each row of an operand."""

    layout = "rows"

    def pair(
        self,
        x: Tensor,
        role: Role,
        *,
        over_rows: Reduce = identity,
        over_columns: Reduce = identity,
        noise: Noise | None = None,
        wanted: Wanted = BOTH,
    ) -> Pair:
        """See `Recipe.pair`."""
        x, name = x.contiguous(), self.format_of(role)
        itself = transposed = None
        if wanted[0] and over_columns is identity:  # one pass over memory
            itself = Operand(*scale_rows(x, name))
        elif wanted[0]:
            scale, inverse = scales_of(over_columns(row_largest_of(x)), name)
            itself = Operand(cast_rows(x, scale, name), inverse)
        if wanted[1]:
            transposed = Operand(*cast_columns(x, over_rows(column_largest_of(x)), name))
        return Pair(itself, transposed)

    def product(
        self,
        a: Operand,
        b: Operand,
        dtype: torch.dtype,
        *,
        forward: bool,
        out: Tensor | None = None,
    ) -> Tensor:
        """See `Recipe.product`. The sum comes out in bfloat16, which every device has."""
        direct = out if dtype is torch.bfloat16 else None
        result = _scaled(a, b, torch.bfloat16, forward=forward, out=direct)
        if out is not None and direct is None:
            return out.copy_(result)
        return result if dtype is torch.bfloat16 else result.to(dtype)


class FP8BlockRecipe(TensorRecipe):
    """A scale for each 1x128 values along the summed dim, and for each 128x128 of a weight."""

    block = BLOCK
    layout = "blocks"
    joins_parts = False  # scales lie by blocks first

    def pair(
        self,
        x: Tensor,
        role: Role,
        *,
        over_rows: Reduce = identity,
        over_columns: Reduce = identity,
        noise: Noise | None = None,
        wanted: Wanted = BOTH,
    ) -> Pair:
        """See `Recipe.pair`. Scales of 1x128 are views (rows, blocks) of (blocks, rows)."""
        square = role == "weight"
        pairs = cast_blocks(x.contiguous(), self.format_of(role), square=square, wanted=wanted)
        operands = [
            None if each is None else Operand(each[0], each[1] if square else each[1].t())
            for each in pairs
        ]
        return Pair(*operands)

    def product(
        self,
        a: Operand,
        b: Operand,
        dtype: torch.dtype,
        *,
        forward: bool,
        out: Tensor | None = None,
    ) -> Tensor:
        """See `Recipe.product`."""
        exact = dtype is not torch.bfloat16
        result = _scaled_blocks(a, b, torch.float32 if exact else dtype)
        if out is not None:
            return out.copy_(result)
        return result if dtype is result.dtype else result.to(dtype)


def _scaled_blocks(a: Operand, b: Operand, dtype: torch.dtype) -> Tensor:
    """The product a b^T of (M, K) in blocks of 1x128 and (N, K) in such or those of 128x128."""
    values, scale = a
    assert scale is not None
    assert b.scale is not None
    rows = len(values)
    missing = -rows % _ROWS
    if missing:
        padded = F.pad(values.view(torch.uint8), (0, 0, 0, missing))
        values, scale = padded.view(values.dtype), F.pad(scale.t(), (0, missing)).t()
    of_rows = b.scale.shape[0] == b.values.shape[0]  # which is a multiple of 16
    kind = F.ScalingType.BlockWise1x128 if of_rows else F.ScalingType.BlockWise128x128
    y = F.scaled_mm(
        values,
        b.values.t(),
        scale,
        F.ScalingType.BlockWise1x128,
        b.scale if of_rows else b.scale.t(),
        kind,
        output_dtype=dtype,
    )
    return y[:rows] if missing else y


def _scaled(
    a: Operand, b: Operand, dtype: torch.dtype, *, forward: bool, out: Tensor | None = None
) -> Tensor:
    """The product a b^T with a scale for each factor, or for each of their rows."""
    assert a.scale is not None
    assert b.scale is not None
    if a.values.device.type == "cpu" and b.scale.numel() > 1 and not _cpu_scales_rows():
        one = torch.ones(())
        y = torch._scaled_mm(a.values, b.values.t(), one, one, out_dtype=torch.float32)
        y = (y * a.scale * b.scale.t()).to(dtype)
        return y if out is None else out.copy_(y)
    return torch._scaled_mm(
        a.values,
        b.values.t(),
        scale_a=a.scale,
        scale_b=b.scale.t(),
        out_dtype=dtype,
        use_fast_accum=forward,
        out=out,
    )


@functools.cache
def _cpu_scales_rows() -> bool:
    """Whether torch's product on the CPU takes a scale for each row; that of torch 2.11 doesn't."""
    values, scale = torch.zeros(16, 16).to(torch.float8_e4m3fn), torch.ones(16, 1)
    try:
        torch._scaled_mm(values, values.t(), scale, scale.t(), out_dtype=torch.float32)
    except RuntimeError:
        return False
    return True
