"""Operands of a weight that stay in their memory while the weight changes, since CUDA graphs read
them there.
"""

from __future__ import annotations

from torch import Tensor

from megatron_lightning.precision.operands import Operand, Pair


def overwrite(kept: Pair, pair: Pair, *, lends_scales: bool) -> Pair:
    """Put `pair` where `kept` lies, both operands of one weight by one recipe; `pair` itself where
    it doesn't fit in. With `lends_scales` scales are the recipe's, and stay where it has them.
    """
    copies: dict[int, tuple[Tensor, Tensor]] = {}  # operands may share values, and scales
    done: list[Operand] = []
    for old, new in zip(kept, pair, strict=True):
        if old is None or new is None or _differ(old.values, new.values):
            return pair
        copies[new.values.data_ptr()] = old.values, new.values
        scale = new.scale
        if scale is not None and not lends_scales:
            if old.scale is None or _differ(old.scale, scale):
                return pair
            copies[scale.data_ptr()] = old.scale, scale
            scale = old.scale
        done.append(Operand(old.values, scale))
    for into, value in copies.values():
        into.copy_(value)
    return Pair(*done)


def addresses(pair: Pair | None) -> tuple[int, ...]:
    """Where operands and scales lie."""
    operands = () if pair is None else pair
    parts = (part for operand in operands if operand is not None for part in operand)
    return tuple(part.data_ptr() for part in parts if part is not None)


def _differ(one: Tensor, two: Tensor) -> bool:
    return (one.shape, one.dtype, one.device) != (two.shape, two.dtype, two.device)
