"""Split layers of a whole sequence as one operation with their collectives, for autograd.

A column-split layer takes what all ranks have, so its input's gradient is a sum over them, and a
row-split one makes partial sums. Compiled, an asynchronous collective would break the graph; within
an operation the sum of the input's gradient runs beside the weight's.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron_lightning.parallel.main_gradient import both_gradients, weight_gradient
from megatron_lightning.parallel.overlap.layers import Overlap
from megatron_lightning.parallel.overlap.operations import (
    copy_linear_backward,
    in_region,
    linear_sum,
    run_copy_linear_backward,
    run_linear_sum,
)
from megatron_lightning.utils.tensors import no_view


def copied_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, overlap: Overlap, *, sums: bool
) -> Tensor:
    """`F.linear` of what all ranks have, whose gradient is a sum over them: (..., in), (out, in) ->
    (..., out).

    With `sums` the weight's gradient goes to its main gradient.
    """
    return _CopyLinear.apply(x, weight, bias, overlap.way_of_whole, sums)


def summed_linear(x: Tensor, weight: Tensor, overlap: Overlap, *, sums: bool) -> Tensor:
    """The sum of all ranks' `F.linear`: (..., in), (out, in) -> (..., out).

    With `sums` the weight's gradient goes to its main gradient.
    """
    keeps = weight.requires_grad  # the input of a frozen weight isn't needed again
    return _LinearSum.apply(x, weight, overlap.way_of_whole, sums, keeps)


def summed_product(x: Tensor, weight: Tensor, name: str) -> Tensor:
    """The forward pass of `summed_linear` by the way `name`."""
    if torch.compiler.is_compiling():
        return linear_sum(x, weight, name)
    return run_linear_sum(x, weight, name)


class _CopyLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, name: str, sums: bool
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.name, ctx.sums = name, sums
        return no_view(F.linear(x, weight, bias))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        grad_x = grad_weight = grad_bias = None
        if needs_x:
            factors, how = (grad, x, weight, ctx.name), (needs_x, needs_weight, ctx.sums)
            if torch.compiler.is_compiling():
                grad_x, grad_weight = in_region(copy_linear_backward, *factors, *how)
            else:
                grad_x, grad_weight = run_copy_linear_backward(*factors, *how)
        elif needs_weight:
            grad_weight = _weight_gradient(grad, x, weight, sums=ctx.sums)
        if needs_bias:
            grad_bias = grad.flatten(0, -2).sum(dim=0)
        return grad_x, grad_weight, grad_bias, None, None


class _LinearSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, name: str, sums: bool, keeps: bool) -> Tensor:
        ctx.save_for_backward(x if keeps else None, weight)
        ctx.sums = sums
        return summed_product(x, weight, name)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        needs_x, needs_weight = ctx.needs_input_grad[:2]
        grad_x = grad_weight = None
        if needs_x and needs_weight and ctx.sums:
            grad_x = both_gradients(grad, x, weight)
        else:
            if needs_x:
                grad_x = grad @ weight
            if needs_weight:
                grad_weight = _weight_gradient(grad, x, weight, sums=ctx.sums)
        return grad_x, grad_weight, None, None, None


def _weight_gradient(grad: Tensor, x: Tensor, weight: Tensor, *, sums: bool) -> Tensor | None:
    if sums:
        return weight_gradient(grad, x, weight)
    return grad.flatten(0, -2).t() @ x.flatten(0, -2)
