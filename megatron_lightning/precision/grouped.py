"""FP8 products of stacked experts: rows of tokens, sorted by expert, times each expert's weight.

A token's row has one scale, and so has each row of an expert's weight along the dim that is summed
over. So no value knows of another token, of another expert or of rows that hold nothing, and no
group of rows needs filling up. Both factors are E4M3, which is all that grouped products take; with
a scale for each row gradients don't need the range of E5M2. On compute capability 9.0 one product
does all experts (`torch._scaled_grouped_mm`), elsewhere one comes after the other.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from megatron_lightning.precision.fp8 import FP8RowRecipe
from megatron_lightning.precision.fp8_casts import cast_stack_columns
from megatron_lightning.precision.operands import Operand, Reduce, Role, RowRecipe, identity

FORMAT = "e4m3"
_CAPABILITY = (9, 0)
_MOST_GROUPS = 1023


class ExpertOperands(NamedTuple):
    """Weights of stacked experts (E, N, K) as factors of two products."""

    itself: Operand | None
    """(E, N, K) values, (E, N, 1) scales: summed over K."""
    transposed: Operand | None
    """(E, K, N) values, (E, K, 1) scales: summed over N."""


class ExpertRecipe:
    """How tokens and weights of experts are rounded and multiplied."""

    def __init__(self, *, simulate: bool) -> None:
        """`simulate`: the same numbers on any device."""
        self._rows = RowRecipe(FORMAT) if simulate else FP8RowRecipe(FORMAT)
        self._simulate = simulate

    def tokens(self, x: Tensor, role: Role, reduce: Reduce = identity) -> Operand:
        """(R, C) -> the same with scales (R, 1). `reduce`: over ranks that hold other columns."""
        operand = self._rows.pair(x, role, over_columns=reduce, wanted=(True, False)).itself
        assert operand is not None
        return operand

    def weight(self, weight: Tensor, reduce: Reduce = identity) -> Operand:
        """(E, N, K), contiguous -> the same with scales (E, N, 1). `reduce`: over ranks that hold
        other columns.
        """
        values, scale = self.tokens(weight.flatten(0, 1), "weight", reduce)
        assert scale is not None
        return Operand(values.view(weight.shape), scale.view(*weight.shape[:2], 1))

    def transposed(self, weight: Tensor, reduce: Reduce = identity) -> Operand:
        """(E, N, K), contiguous -> (E, K, N) with scales (E, K, 1). `reduce`: over ranks that hold
        other rows.
        """
        if self._simulate:
            return self.weight(weight.transpose(1, 2).contiguous(), reduce)
        return Operand(*cast_stack_columns(weight, FORMAT, reduce))

    def product(
        self, rows: Operand, weight: Operand, counts: Tensor, dtype: torch.dtype, *, forward: bool
    ) -> Tensor:
        """(R, K) by expert, (E, N, K), (E,) rows of each -> (R, N) in `dtype`, summed in float32.
        What comes of rows behind the sum of `counts` means nothing.
        """
        if not self._simulate and can_group(rows, weight):
            assert rows.scale is not None
            assert weight.scale is not None
            y = torch._scaled_grouped_mm(
                rows.values,
                weight.values.transpose(1, 2),
                rows.scale.view(-1),
                weight.scale.squeeze(2),
                offs=counts.cumsum(0, dtype=torch.int32),
                out_dtype=torch.bfloat16,
                use_fast_accum=forward,
            )
            return y if dtype is torch.bfloat16 else y.to(dtype)
        return self._one_by_one(rows, weight, counts, dtype, forward)

    def _one_by_one(
        self, rows: Operand, weight: Operand, counts: Tensor, dtype: torch.dtype, forward: bool
    ) -> Tensor:
        y = rows.values.new_zeros((len(rows.values), weight.values.shape[1]), dtype=dtype)
        begin = 0
        for expert, count in enumerate(counts.tolist()):
            if count:
                part, factor = (
                    Operand(each.values[place], None if each.scale is None else each.scale[place])
                    for each, place in ((rows, slice(begin, begin + count)), (weight, expert))
                )
                y[begin : begin + count] = self._rows.product(part, factor, dtype, forward=forward)
            begin += count
        return y


def can_group(rows: Operand, weight: Operand) -> bool:
    """Whether one product does all experts."""
    return (
        rows.values.is_cuda
        and len(weight.values) <= _MOST_GROUPS
        and torch.cuda.get_device_capability(rows.values.device) == _CAPABILITY
    )
