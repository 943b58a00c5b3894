"""The input border of column-split layers, and the matrix product fused with it.

The product also serves layers without a border whose weight's gradient may be put off.

Apart, border and product keep the gathered sequence for the weight's gradient, which undoes what
sequence parallelism saves. Fused, only the own part is kept and gathered once more in the backward
pass, while the input's gradient is computed; that is then reduced while the weight's gradient is
computed (Korthikanti et al., arXiv 2205.05198, section 4.2.2).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron_lightning.parallel.axes import MeshAxis
from megatron_lightning.parallel.collectives import (
    all_gather,
    begin_all_gather,
    begin_all_reduce_,
    begin_reduce_scatter,
    copy_to_axis,
    gather_dim,
)
from megatron_lightning.parallel.main_gradient import both_gradients, weight_gradient
from megatron_lightning.parallel.overlap.layers import Overlap, gathered_linear
from megatron_lightning.parallel.overlap.sums import copied_linear
from megatron_lightning.utils.tensors import no_view


class DefersWeightGradient(Protocol):
    """A place for the factors of a weight's gradient, see `parallel/weight_gradient.py`."""

    def run(self, forward: Callable[[Tensor], Tensor], x: Tensor, *, sums: bool) -> Tensor:
        """`forward(x)` of the layer, if need be outside of compiled regions. `sums`: its weight's
        gradient goes to a main gradient, or there is none.
        """
        ...

    @property
    def is_asked(self) -> bool:
        """False in a compiled region, where the operations ask."""
        ...

    def defer(self, grad: Tensor, x: Tensor, axis: MeshAxis, dim: int | None) -> bool:
        """Keep (..., out) and this rank's part along `dim` of (..., in); False: not now."""
        ...


@dataclass(frozen=True)
class ColumnInput:
    """Makes the whole input of a layer whose output features are split over `axis`."""

    axis: MeshAxis
    sequence_dim: int | None
    """Dim that is split and gathered; None: the input is whole, its gradient is summed."""
    overlap: Overlap | None = None
    """Set where product and collective are one operation, in which one may hide the other."""

    def __call__(self, x: Tensor) -> Tensor:
        """Part of the sequence, or whole input -> whole input."""
        if self.sequence_dim is None:
            return copy_to_axis(x, self.axis)
        return gather_dim(x, self.axis, self.sequence_dim)

    def linear(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        sink: DefersWeightGradient | None = None,
        *,
        sums: bool = False,
    ) -> Tensor:
        """`F.linear` of the whole input: (..., in), (out/tp, in) -> (..., out/tp).

        With `sums` the weight's gradient goes to its main gradient.
        """
        if torch.is_autocast_enabled(x.device.type):  # which casts around each operation of its own
            return F.linear(self(x), weight, bias)
        overlap = self.overlap
        if overlap is not None and sink is None and overlap.gathers(x, self.sequence_dim):
            return gathered_linear(x, weight, bias, overlap, sums=sums)
        if overlap is not None and sink is None and self.sequence_dim is None:
            return copied_linear(x, weight, bias, overlap, sums=sums)
        return _ColumnLinear.apply(x, weight, bias, self.axis, self.sequence_dim, sink, sums)


def deferrable_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, sink: DefersWeightGradient
) -> Tensor:
    """`F.linear` whose weight's gradient `sink` may put off: (..., in), (out, in) -> (..., out)."""
    if torch.is_autocast_enabled(x.device.type):
        return F.linear(x, weight, bias)
    return _ColumnLinear.apply(x, weight, bias, _WHOLE, None, sink, False)


_WHOLE = MeshAxis(name="whole")


class _ColumnLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        axis: MeshAxis,
        dim: int | None,
        sink: DefersWeightGradient | None,
        sums: bool,
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.axis, ctx.dim, ctx.sink, ctx.sums = axis, dim, sink, sums
        return no_view(F.linear(x if dim is None else all_gather(x, axis, dim), weight, bias))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        axis, dim = ctx.axis, ctx.dim
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        grad_x = grad_weight = grad_bias = reduced = gathered = None
        if needs_weight and ctx.sink is not None:
            needs_weight = not ctx.sink.defer(grad, x, axis, dim)
        if needs_weight and dim is not None:
            gathered = begin_all_gather(x, axis, dim)
        together = ctx.sums and needs_x and needs_weight and torch.compiler.is_compiling()
        if needs_x and not together:
            grad_x = grad @ weight
        whole = x if gathered is None else gathered()
        if together:
            grad_x = both_gradients(grad, whole, weight)
        if grad_x is not None:
            reduced = (
                begin_all_reduce_(grad_x, axis)
                if dim is None
                else begin_reduce_scatter(grad_x, axis, dim)
            )
        rows = grad.flatten(0, -2)
        if needs_weight and not together:
            grad_weight = (
                weight_gradient(grad, whole, weight)
                if ctx.sums
                else rows.t() @ whole.flatten(0, -2)
            )
        if needs_bias:
            grad_bias = rows.sum(dim=0)
        grad_x = None if reduced is None else reduced()
        return grad_x, grad_weight, grad_bias, None, None, None, None
