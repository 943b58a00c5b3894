"""FP8 by Transformer Engine's casts and products: one scale for a tensor, or blocks of 128.

The operands are those of our own recipes (`operands.py`): a matrix and its transpose, each
contiguous along the dim that is summed over, so that each of the three products is a b^T. Largest
values, histories and scales of tensors are ours too (`delayed.py`); what differs is who casts and
who multiplies, and that a weight's gradient is added to its sum by the product itself.
"""

from __future__ import annotations

import copy
import functools
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_lightning.precision import te
from megatron_lightning.precision.delayed import DelayedRecipe
from megatron_lightning.precision.formats import FP8_DTYPES, FP8_MULTIPLE
from megatron_lightning.precision.fp8_casts import largest_of, scales_of
from megatron_lightning.precision.operands import (
    BOTH,
    Noise,
    Operand,
    Pair,
    Recipe,
    Reduce,
    Role,
    Wanted,
    identity,
    pad_to,
)
from megatron_lightning.precision.simulated import TensorRecipe


class _Square(Operand):
    """A weight's operand, whose scales are those of 128x128 blocks."""


def _name(kernels: Any, dtype: torch.dtype) -> Any:
    """Transformer Engine's name of an FP8 dtype."""
    wide = dtype is torch.float8_e5m2
    return kernels.DType.kFloat8E5M2 if wide else kernels.DType.kFloat8E4M3


class TETensorRecipe(TensorRecipe):
    """One scale for a tensor: of its own largest value, or by `delayed` of those before."""

    layout = "tensor"

    def __init__(self, gradient: str, delayed: DelayedRecipe | None = None) -> None:
        super().__init__(gradient)
        self._delayed = delayed
        self._quantizers: dict[Any, Any] = {}

    def __deepcopy__(self, memo: dict[int, Any]) -> TETensorRecipe:
        """The same with places of its own, for a copy of the layer."""
        return TETensorRecipe(self._gradient, copy.deepcopy(self._delayed, memo))

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
        delayed = self._delayed
        seen = scale = None
        if delayed is not None and delayed.store.has_history:
            recorded, scale, _ = delayed.place(role)
            seen = recorded if delayed.store.recording else None
        elif delayed is not None or not _by_itself(x, over_rows, over_columns):
            amax = largest_of(x.contiguous())
            if delayed is not None and delayed.store.recording:
                recorded, _, _ = delayed.place(role)
                torch.maximum(recorded, amax, out=recorded)
            scale, _ = scales_of(over_columns(over_rows(amax)), self.format_of(role))
        return self._cast(x, role, wanted, scale, seen)

    def _cast(
        self, x: Tensor, role: Role, wanted: Wanted, scale: Tensor | None, seen: Tensor | None
    ) -> Pair:
        """`x` (R, C) times a 0-dim `scale`, None: that of its own largest value; rows of the
        transpose are padded with zeros to 16.

        `seen`: 0-dim, becomes the largest of itself and the absolute values of `x`.
        """
        dtype = FP8_DTYPES[self.format_of(role)]
        itself, transposed = wanted
        quantizer = self._quantizer(role, wanted, dtype, x.device, own=scale is None)
        if scale is not None:
            quantizer.scale = scale.view(1)
            quantizer.amax = _unread(x.device) if seen is None else seen.view(1)
        cast = quantizer.quantize_impl(pad_to(x, 0, FP8_MULTIPLE).contiguous())
        inverse = cast._scale_inv.view(())
        return Pair(
            Operand(cast._data.view(dtype)[: len(x)], inverse) if itself else None,
            Operand(cast._transpose.view(dtype), inverse) if transposed else None,
        )

    def _quantizer(
        self, role: Role, wanted: Wanted, dtype: torch.dtype, device: torch.device, *, own: bool
    ) -> Any:
        """Kept from call to call, one for each stream: it holds the place of a largest value."""
        stream = torch.cuda.current_stream().cuda_stream if device.type == "cuda" else 0
        key = (role, wanted, own, stream)
        found = self._quantizers.get(key)
        if found is not None:
            return found
        engine = te.engine()
        name = _name(engine.kernels, dtype)
        sides = dict(rowwise=wanted[0], columnwise=wanted[1])
        if own:
            found = engine.own_quantizer(name, device, force_pow_2_scales=True, **sides)
        else:
            place = _unread(device)
            found = engine.float8_quantizer(place, place, name, **sides)
        found.internal = True  # no subclass of Tensor around the result
        self._quantizers[key] = found
        return found

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
        assert a.scale is not None
        assert b.scale is not None
        return torch._scaled_mm(  # Transformer Engine's, at less of the host's time
            a.values,
            b.values.t(),
            scale_a=a.scale,
            scale_b=b.scale,
            out_dtype=dtype,
            use_fast_accum=forward,
            out=out,
        )

    def add_product_(self, total: Tensor, a: Operand, b: Operand) -> bool:
        """See `Recipe.add_product_`."""
        te.multiply(_wrapped(a), _wrapped(b), total.dtype, out=total, add=True, exact=True)
        return True


def _by_itself(x: Tensor, over_rows: Reduce, over_columns: Reduce) -> bool:
    """Whether the scale may be left to Transformer Engine: no other rank has a part, and a value
    that isn't finite need not be seen (in float16 the loss scale depends on it).
    """
    alone = over_rows is identity and over_columns is identity
    return alone and x.dtype is not torch.float16


def _wrapped(operand: Operand) -> Any:
    engine = te.engine()
    assert operand.scale is not None
    return engine.float8_tensor(
        data=operand.values.view(torch.uint8),
        fp8_scale_inv=operand.scale.view(1),
        fp8_dtype=_name(engine.kernels, operand.values.dtype),
    )


class TEBlockRecipe(Recipe):
    """Scales of 1x128 blocks along the summed dim, powers of two; of 128x128 for weights."""

    block = 128
    joins_parts = False  # scales lie by blocks first
    layout = "blocks"

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
        cast = quantizer.quantize_impl(pad_to(x, 0, FP8_MULTIPLE).contiguous())

        def operand(values: Tensor, scale: Tensor) -> Operand:
            values = values.view(dtype)
            return _Square(values, scale) if role == "weight" else Operand(values, scale.t())

        rows = len(x)
        return Pair(
            operand(cast._rowwise_data[:rows], cast._rowwise_scale_inv) if itself else None,
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
    ) -> Tensor:
        """See `Recipe.product`."""
        return _multiplied_blocks(a, b, dtype, out, add=False)

    def add_product_(self, total: Tensor, a: Operand, b: Operand) -> bool:
        """See `Recipe.add_product_`."""
        _multiplied_blocks(a, b, total.dtype, total, add=True)
        return True


def _multiplied_blocks(
    a: Operand, b: Operand, dtype: torch.dtype, out: Tensor | None, *, add: bool
) -> Tensor:
    engine = te.engine()

    def wrap(operand: Operand) -> Any:
        square = isinstance(operand, _Square)
        assert operand.scale is not None
        return engine.block_tensor(
            rowwise_data=_padded(operand.values).view(torch.uint8),
            rowwise_scale_inv=operand.scale if square else operand.scale.t(),
            columnwise_data=None,
            columnwise_scale_inv=None,
            fp8_dtype=_name(engine.kernels, operand.values.dtype),
            quantizer=None,
            is_2D_scaled=square,
        )

    result = te.multiply(wrap(a), wrap(b), dtype, out=out, add=add, exact=True)
    return result[: len(a.values)]


@functools.lru_cache
def _unread(device: torch.device) -> Tensor:
    """Where largest values go that nobody asks for."""
    with torch.inference_mode(False):
        return torch.zeros(1, device=device)


def _padded(values: Tensor) -> Tensor:
    """Zeros behind the rows up to a multiple of 16."""
    if not len(values) % FP8_MULTIPLE:
        return values
    padded = F.pad(values.view(torch.uint8), (0, 0, 0, -len(values) % FP8_MULTIPLE))
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
