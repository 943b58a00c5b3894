"""FP8 products of stacked experts: rows of tokens, sorted by expert, and each expert's weight.

A token's row has one scale, and so has each row of an expert's weight along the dim that is summed
over; for a weight's gradient each feature has one over the tokens of an expert. So no value knows
of another expert or of rows that hold nothing. Factors are E4M3, which is all that grouped products
take; with scales as fine as these gradients don't need the range of E5M2. On compute capability 9.0
one product does all experts (`torch._scaled_grouped_mm`), elsewhere one comes after the other, and
the host waits for the counts. Either gives bfloat16, also in a run in float32. Groups along the
summed dim must be multiples of 16 and not empty: zeros stand behind their tokens. The grouped
product adds within the unit (fast accumulation) in forwards and gradients: with sums in float32
throughout its kernels take up to three times as long, for many small experts more than without FP8.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from megatron_lightning.precision.formats import FP8_MULTIPLE
from megatron_lightning.precision.fp8 import FP8RowRecipe
from megatron_lightning.precision.fp8_casts import cast_groups, cast_stack_columns
from megatron_lightning.precision.operands import Operand, Reduce, Role, identity, pad_to
from megatron_lightning.precision.simulated import RowRecipe

FORMAT = "e4m3"
_CAPABILITY = (9, 0)
_MOST_GROUPS = 1023
_LEAST = 2048
"""Multiplications of a weight's gradient for each value that is rounded for it, from which on an
H200 gains: it loses at 880 and gains a fifth at 3200."""


class Columns(NamedTuple):
    """A transposed matrix, summed over the rows of each expert."""

    values: Tensor
    """(C, P): of each expert its rows, then zeros."""
    scale: Tensor
    """(E * C,): of each expert one for each row of `values`."""
    ends: Tensor
    """(E,) int32: behind which column of `values` an expert's part ends."""


class ExpertRecipe:
    """How tokens and weights of experts are rounded and multiplied."""

    def __init__(self, *, simulate: bool, rounds_weight_gradient: bool = True) -> None:
        """`simulate`: the same numbers on any device. `rounds_weight_gradient`: its product too."""
        self.rounds_weight_gradient = rounds_weight_gradient
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

    def columns(self, x: Tensor, role: Role, counts: Tensor) -> Columns:
        """(R, C) by expert, (E,) rows of each -> the transpose."""
        if not self._simulate:
            made = cast_groups(x, counts, FORMAT)
            if made is not None:
                return Columns(*made)
        sizes: list[int] = counts.tolist()
        parts = [self._column(part, role) for part in x[: sum(sizes)].split(sizes)]
        rooms = torch.tensor([part.values.shape[1] for part in parts], device=x.device)
        as_bytes = [part.values.view(torch.uint8) for part in parts]  # FP8 can't be joined
        return Columns(
            torch.cat(as_bytes, dim=1).view(parts[0].values.dtype),
            torch.cat([part.scale.flatten() for part in parts if part.scale is not None]),
            rooms.cumsum(0, dtype=torch.int32),
        )

    def _column(self, x: Tensor, role: Role) -> Operand:
        """The transpose of one expert's rows, filled up."""
        filled = x if len(x) else x.new_zeros(FP8_MULTIPLE, x.shape[1])
        operand = self._rows.pair(filled, role, wanted=(False, True)).transposed
        assert operand is not None
        values = operand.values
        if values.element_size() > 1:
            values = pad_to(values, 1, FP8_MULTIPLE)
        return Operand(values.contiguous(), operand.scale)

    def product(
        self, rows: Operand, weight: Operand, counts: Tensor, dtype: torch.dtype, *, forward: bool
    ) -> Tensor:
        """(R, K) by expert, (E, N, K), (E,) rows of each -> (R, N) in `dtype`. What comes of rows
        behind the sum of `counts` means nothing. `forward`: where one comes after the other, as in
        `Recipe.product`.
        """
        if not self._simulate and can_group(rows.values, len(weight.values)):
            assert rows.scale is not None
            assert weight.scale is not None
            y = torch._scaled_grouped_mm(
                rows.values,
                weight.values.transpose(1, 2),
                rows.scale.view(-1),
                weight.scale.squeeze(2),
                offs=counts.cumsum(0, dtype=torch.int32),
                out_dtype=torch.bfloat16,
                use_fast_accum=True,
            )
            return y if dtype is torch.bfloat16 else y.to(dtype)
        return self._one_by_one(rows, weight, counts, dtype, forward)

    def weight_gradient(self, grad: Columns, x: Columns, dtype: torch.dtype) -> Tensor:
        """Transposed (N, P) and (K, P) of the same rows -> (E, N, K) in `dtype`, zero for an expert
        without rows.
        """
        num_experts = len(x.ends)
        if not self._simulate and can_group(x.values, num_experts):
            y = torch._scaled_grouped_mm(
                grad.values,
                x.values.t(),
                grad.scale,
                x.scale,
                offs=x.ends,
                out_dtype=torch.bfloat16,
                use_fast_accum=True,
            )
            return y if dtype is torch.bfloat16 else y.to(dtype)
        ends: list[int] = x.ends.tolist()
        made = []
        for expert, (begin, end) in enumerate(zip([0, *ends], ends, strict=False)):
            a, b = (
                Operand(
                    each.values[:, begin:end].contiguous(),
                    each.scale.view(num_experts, -1, 1)[expert].contiguous(),
                )
                for each in (grad, x)
            )
            made.append(self._rows.product(a, b, dtype, forward=False))
        return torch.stack(made)

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


def rounds_weight_gradient(outputs: int, inputs: int) -> bool:
    """Whether the product of a weight's gradient pays in FP8, for features of the whole layer: each
    token's input and gradient take another two passes for it.
    """
    return outputs * inputs >= _LEAST * (outputs + inputs)


def can_group(values: Tensor, num_experts: int) -> bool:
    """Whether one product does all experts."""
    return (
        values.is_cuda
        and num_experts <= _MOST_GROUPS
        and torch.cuda.get_device_capability(values.device) == _CAPABILITY
    )
