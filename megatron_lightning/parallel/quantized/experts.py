"""Experts whose products take factors of eight bits, each of them for all experts at once
(`precision/grouped.py`).

The weights' gradients of small experts are not rounded, see `rounds_weight_gradient`. Where they
are, the rounded transpose of the input is kept for the backward pass, in place of the input.
Weights are rounded once in a window, for each product when it is first needed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron_lightning.parallel.axes import MeshAxis
from megatron_lightning.parallel.quantized.products import WeightClock, largest_over
from megatron_lightning.parallel.quantized.tensor_split import TensorSplit
from megatron_lightning.precision.grouped import Columns, ExpertRecipe
from megatron_lightning.precision.operands import Operand, Reduce, identity

Multiply = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
"""The weight's gradient in the precision of the run: (R, N) gradient, (R, K) input, (E, N, K)
weight, (E,) counts -> (E, N, K)."""
Defer = Callable[[Callable[[], Tensor]], bool]
"""Takes what computes the weight's gradient, to add it to its sum at once or later; False: not."""


@dataclass
class _Rounded:
    """An operand of the weight, and what it was made of."""

    key: tuple[int, ...] = ()
    operand: Operand | None = None


@dataclass(eq=False, kw_only=True)
class RowScaledExperts:
    """What a layer of experts holds to run in FP8 with a scale for each row."""

    recipe: ExpertRecipe
    split: TensorSplit
    axis: MeshAxis
    """Tensor axis of experts."""
    clock: WeightClock
    keeps_weights: bool = True
    """False: round weights at each use (fully sharded ones come and go)."""
    _itself: _Rounded = field(default_factory=_Rounded, repr=False)
    _transposed: _Rounded = field(default_factory=_Rounded, repr=False)

    def __deepcopy__(self, memo: dict[int, Any]) -> RowScaledExperts:
        """The same without rounded weights, for a copy of the layer."""
        return RowScaledExperts(
            recipe=self.recipe,
            split=self.split,
            axis=self.axis,
            clock=self.clock,
            keeps_weights=self.keeps_weights,
        )

    def __call__(
        self, rows: Tensor, weight: Tensor, counts: Tensor, multiply: Multiply, defer: Defer | None
    ) -> Tensor:
        """(R, K) by expert, (E, N, K), (E,) rows of each -> (R, N). `multiply` gives the weight's
        gradient where it isn't rounded; `defer` may take it.
        """
        return _outside_of_regions(self, rows, weight, counts, multiply, defer)

    def forward(self, rows: Tensor, weight: Tensor, counts: Tensor) -> Tensor:
        """The product with each expert's weight."""
        x = self.recipe.tokens(rows, "input", self._over("rows"))
        w = self._weight(self._itself, weight, self.recipe.weight, "rows")
        return self.recipe.product(x, w, counts, rows.dtype, forward=True)

    def input_gradient(self, grad: Tensor, weight: Tensor, counts: Tensor) -> Tensor:
        """The product with each expert's transposed weight."""
        g = self.recipe.tokens(grad, "gradient", self._over("columns"))
        w = self._weight(self._transposed, weight, self.recipe.transposed, "columns")
        return self.recipe.product(g, w, counts, grad.dtype, forward=False)

    def _weight(
        self,
        place: _Rounded,
        weight: Tensor,
        make: Callable[[Tensor, Reduce], Operand],
        summed: TensorSplit,
    ) -> Operand:
        key = (self.clock.time, weight._version, weight.data_ptr())
        if place.operand is not None and place.key == key:
            return place.operand
        place.operand = None  # before the new one takes memory
        operand = make(weight.contiguous(), self._over(summed))
        if self.keeps_weights:
            place.key, place.operand = key, operand
        return operand

    def _over(self, summed: TensorSplit) -> Reduce:
        """Largest values over ranks, where they hold other parts of the summed dim."""
        if self.split != summed or self.axis.size == 1:
            return identity
        return partial(largest_over, axes=[self.axis])


def _run(
    experts: RowScaledExperts,
    rows: Tensor,
    weight: Tensor,
    counts: Tensor,
    multiply: Multiply,
    defer: Defer | None,
) -> Tensor:
    keeps = weight.requires_grad and torch.is_grad_enabled()
    return _Experts.apply(rows, weight, counts, experts, multiply, defer, keeps)


_outside_of_regions: Any = torch.compiler.disable(_run)


class _Experts(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        rows: Tensor,
        weight: Tensor,
        counts: Tensor,
        experts: RowScaledExperts,
        multiply: Multiply,
        defer: Defer | None,
        keeps: bool,
    ) -> Tensor:
        rows, recipe = rows.contiguous(), experts.recipe
        kept: tuple[Tensor, ...] = ()
        if keeps:
            rounds = recipe.rounds_weight_gradient
            kept = recipe.columns(rows, "input", counts) if rounds else (rows,)
        ctx.save_for_backward(weight, counts, *kept)
        ctx.experts, ctx.multiply, ctx.defer = experts, multiply, defer
        return experts.forward(rows, weight, counts)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        weight, counts, *kept = ctx.saved_tensors
        grad = grad.contiguous()
        grad_rows = grad_weight = None
        if ctx.needs_input_grad[0]:
            grad_rows = ctx.experts.input_gradient(grad, weight, counts)
        if ctx.needs_input_grad[1]:
            grad_weight = _weight_gradient(ctx, grad, weight, counts, kept)
        return grad_rows, grad_weight, None, None, None, None, None


def _weight_gradient(
    ctx: Any, grad: Tensor, weight: Tensor, counts: Tensor, kept: list[Tensor]
) -> Tensor | None:
    """None once it is taken care of."""
    recipe: ExpertRecipe = ctx.experts.recipe
    dtype = weight.dtype
    if not recipe.rounds_weight_gradient:
        multiply = partial(ctx.multiply, grad, *kept, weight, counts)
    else:
        factors = recipe.columns(grad, "gradient", counts), Columns(*kept)
        # In a sum float16 could overflow.
        exact = torch.float32 if dtype is torch.float16 else dtype
        multiply = partial(recipe.weight_gradient, *factors, exact)
    if ctx.defer is not None and ctx.defer(multiply):
        return None
    return multiply().to(dtype)
