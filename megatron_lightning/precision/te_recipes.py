"""FP8 by Transformer Engine's casts and products: one scale for a tensor, or blocks of 128.

The operands are those of our own recipes (`operands.py`): a matrix and its transpose, each
contiguous along the dim that is summed over, so that each of the three products is a b^T. Largest
values, histories and scales of tensors are ours too (`delayed.py`); what differs is who casts and
who multiplies, and that a weight's gradient is added to its sum by the product itself.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_lightning.precision import te
from megatron_lightning.precision.delayed import DelayedRecipe
from megatron_lightning.precision.formats import FP8_DTYPES
from megatron_lightning.precision.fp8_casts import largest_of, scales_of
from megatron_lightning.precision.operands import (
    BOTH,
    Noise,
    Operand,
    Pair,
    Recipe,
    Reduce,
    Role,
    TensorRecipe,
    Wanted,
    identity,
    pad_to,
)

_MULTIPLE = 16
"""Rows and columns of an FP8 product."""


class _Square(Operand):
    """A weight's operand, whose scales are those of 128x128 blocks."""


def _name(kernels: Any, dtype: torch.dtype) -> Any:
    """Transformer Engine's name of an FP8 dtype."""
    wide = dtype is torch.float8_e5m2
    return kernels.DType.kFloat8E5M2 if wide else kernels.DType.kFloat8E4M3


class TETensorRecipe(TensorRecipe):
    """One scale for a tensor: of its own largest value, or by `delayed` of those before."""

    adds_products = True

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
        name, x = self.format_of(role), x.contiguous()
        delayed = self._delayed
        seen = None
        if delayed is not None and delayed.store.has_history:
            recorded, scale, _ = delayed.place(role)
            seen = recorded if delayed.store.recording else None
        else:
            amax = largest_of(x)
            if delayed is not None and delayed.store.recording:
                recorded, _, _ = delayed.place(role)
                torch.maximum(recorded, amax, out=recorded)
            scale, _ = scales_of(over_columns(over_rows(amax)), name)
        return _cast(x, scale, FP8_DTYPES[name], wanted, seen)

    def product(
        self,
        a: Operand,
        b: Operand,
        dtype: torch.dtype,
        *,
        forward: bool,
        out: Tensor | None = None,
        add: bool = False,
    ) -> Tensor:
        """See `Recipe.product`; with `add` it is added to `out`."""
        engine = te.engine()

        def wrap(operand: Operand) -> Any:
            assert operand.scale is not None
            return engine.float8_tensor(
                data=_padded(operand.values).view(torch.uint8),
                fp8_scale_inv=operand.scale.view(1),
                fp8_dtype=_name(engine.kernels, operand.values.dtype),
            )

        result = te.multiply(wrap(a), wrap(b), dtype, out=out, add=add, exact=not forward)
        return result[: len(a.values)]


class TEBlockRecipe(Recipe):
    """Scales of 1x128 blocks along the summed dim, powers of two; of 128x128 for weights."""

    adds_products = True
    block = 128
    joins_parts = False

    def __init__(self, gradient: str) -> None:
        self._gradient = gradient

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
        engine = te.engine()
        dtype = FP8_DTYPES[self._gradient if role == "gradient" else "e4m3"]
        itself, transposed = wanted
        quantizer = engine.block_quantizer(
            _name(engine.kernels, dtype),
            rowwise=itself,
            columnwise=transposed,
            block_scaling_dim=2 if role == "weight" else 1,
        )
        quantizer.internal = True  # no subclass of Tensor around the result
        cast = quantizer.quantize_impl(pad_to(x, 0, _MULTIPLE).contiguous())
        kind = _Square if role == "weight" else Operand

        def operand(values: Tensor | None, scale: Tensor | None) -> Operand | None:
            return None if values is None else kind(values.view(dtype), scale)

        rows = cast._rowwise_data[: len(x)] if itself else None
        return Pair(
            operand(rows, cast._rowwise_scale_inv) if itself else None,
            operand(cast._columnwise_data, cast._columnwise_scale_inv) if transposed else None,
        )

    def product(
        self,
        a: Operand,
        b: Operand,
        dtype: torch.dtype,
        *,
        forward: bool,
        out: Tensor | None = None,
        add: bool = False,
    ) -> Tensor:
        """See `Recipe.product`; with `add` it is added to `out`."""
        engine = te.engine()

        def wrap(operand: Operand) -> Any:
            return engine.block_tensor(
                rowwise_data=_padded(operand.values).view(torch.uint8),
                rowwise_scale_inv=operand.scale,
                columnwise_data=None,
                columnwise_scale_inv=None,
                fp8_dtype=_name(engine.kernels, operand.values.dtype),
                quantizer=None,
                is_2D_scaled=isinstance(operand, _Square),
            )

        result = te.multiply(wrap(a), wrap(b), dtype, out=out, add=add, exact=True)
        return result[: len(a.values)]


def _cast(
    x: Tensor, scale: Tensor, dtype: torch.dtype, wanted: Wanted, seen: Tensor | None
) -> Pair:
    """`x` (R, C) times a 0-dim `scale`; rows of the transpose are padded with zeros to 16.

    `seen`: 0-dim, becomes the largest of itself and the absolute values of `x`.
    """
    engine = te.engine()
    itself, transposed = wanted
    rows = len(x)
    quantizer = engine.float8_quantizer(
        scale.reshape(1),
        _unread(x.device) if seen is None else seen.view(1),
        _name(engine.kernels, dtype),
        rowwise=itself,
        columnwise=transposed,
    )
    quantizer.internal = True  # no subclass of Tensor around the result
    cast = quantizer.quantize_impl(pad_to(x, 0, _MULTIPLE))
    inverse = cast._scale_inv.view(())
    return Pair(
        Operand(cast._data.view(dtype)[:rows], inverse) if itself else None,
        Operand(cast._transpose.view(dtype), inverse) if transposed else None,
    )


@functools.lru_cache
def _unread(device: torch.device) -> Tensor:
    """Where largest values go that nobody asks for."""
    return torch.zeros(1, device=device)


def _padded(values: Tensor) -> Tensor:
    """Zeros behind the rows up to a multiple of 16."""
    if not len(values) % _MULTIPLE:
        return values
    padded = F.pad(values.view(torch.uint8), (0, 0, 0, -len(values) % _MULTIPLE))
    return padded.view(values.dtype)


def recipe_problem(name: str, device: torch.device) -> str | None:
    """Why Transformer Engine can't run a recipe here, with the remedy; None when it can."""
    missing = te.missing()
    if missing is not None:
        return missing
    capability = torch.cuda.get_device_capability(device)
    needed = {"fp8_blockwise": (9, 0)}.get(name, (8, 9))
    if capability < needed:
        return (
            f"{torch.cuda.get_device_name(device)} has compute capability"
            f" {capability[0]}.{capability[1]}, and the recipe needs {needed[0]}.{needed[1]} or"
            " newer; use simulate=True"
        )
    return None
