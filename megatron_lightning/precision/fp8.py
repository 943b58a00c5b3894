"""FP8 products on the GPU's own units, by torch's `_scaled_mm` alone.

Forward products may add in less than float32 within the unit (fast accumulation), gradients do not.
Hardware of the time multiplies A B^T with both factors contiguous along the dim that is summed
over, so that a matrix is rounded into two copies, itself and its transpose, in one pass. The summed
dim is a multiple of 16 (zeros behind the tokens, which change neither scales nor sums).
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_lightning.precision.delayed import DelayedRecipe
from megatron_lightning.precision.fp8_casts import (
    cast_both,
    cast_rows,
    largest_of,
    row_largest_of,
    scales_of,
)
from megatron_lightning.precision.operands import (
    BOTH,
    Noise,
    Operand,
    Pair,
    Reduce,
    Role,
    RowRecipe,
    TensorRecipe,
    Wanted,
    identity,
)

_CAPABILITY = (8, 9)


def device_problem(device: torch.device) -> str | None:
    """Why the device has no FP8 products, with the remedy; None when it has."""
    remedy = "set simulate=True, which gives the recipe's numbers on any device"
    if device.type != "cuda":
        return f"there are no FP8 products on {device.type}; {remedy}"
    capability = torch.cuda.get_device_capability(device)
    if capability < _CAPABILITY:
        name = torch.cuda.get_device_name(device)
        return (
            f"{name} has compute capability {capability[0]}.{capability[1]}, and FP8 products need"
            f" {_CAPABILITY[0]}.{_CAPABILITY[1]} or newer; {remedy}"
        )
    return None


class FP8TensorRecipe(TensorRecipe):
    """One scale for a tensor: of its own largest value, or by `delayed` of those before."""

    def __init__(self, gradient: str, delayed: DelayedRecipe | None = None) -> None:
        super().__init__(gradient)
        self._delayed = delayed

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
        name = self.format_of(role)
        x = x.contiguous()
        if self._delayed is not None and self._delayed.store.has_history:
            seen, scale, inverse = self._delayed.place(role)
            record = seen if self._delayed.store.recording else None
            values, transposed = cast_both(x, scale, name, wanted, record)
        else:
            amax = largest_of(x)
            if self._delayed is not None and self._delayed.store.recording:
                seen, _, _ = self._delayed.place(role)
                torch.maximum(seen, amax, out=seen)
            scale, inverse = scales_of(over_columns(over_rows(amax)), name)
            values, transposed = cast_both(x, scale, name, wanted, None)
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


class FP8RowRecipe(RowRecipe):
    """A scale for each row of an operand."""

    def _rows(self, x: Tensor, role: Role, reduce: Reduce) -> Operand:
        x = x.contiguous()
        name = self.format_of(role)
        scale, inverse = scales_of(reduce(row_largest_of(x)), name)
        return Operand(cast_rows(x, scale, name), inverse)

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
        result = _scaled(a, b, torch.bfloat16, forward=forward)
        if out is not None:
            return out.copy_(result)
        return result if dtype is torch.bfloat16 else result.to(dtype)


def _scaled(
    a: Operand, b: Operand, dtype: torch.dtype, *, forward: bool, out: Tensor | None = None
) -> Tensor:
    """The product a b^T with a scale for each factor, or for each of their rows."""
    assert a.scale is not None
    assert b.scale is not None
    return torch._scaled_mm(
        a.values,
        b.values.t(),
        scale_a=a.scale,
        scale_b=b.scale.t(),
        out_dtype=dtype,
        use_fast_accum=forward,
        out=out,
    )
