"""The operations behind `parallel/overlap.py`: plain functions, and the same for compiled regions.

An operation in a region is given tensors and numbers only and finds its exchange by name. All ranks
compile the same graph, so their turns come in the same order.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor

from megatron_lightning.parallel.exchange import Exchange
from megatron_lightning.parallel.main_gradient import main_gradient_of
from megatron_lightning.parallel.overlapped import (
    WeightGradient,
    gather_product,
    gather_product_backward,
    product_scatter,
    product_scatter_backward,
)

exchanges: weakref.WeakValueDictionary[str, Exchange] = weakref.WeakValueDictionary()
"""By the name of their axis."""


def run_gather_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, name: str, size: int
) -> Tensor:
    """See `gathered_linear`."""
    y = gather_product(_rows(x), weight, bias, exchanges[name])
    return y.view(size * x.shape[0], *x.shape[1:-1], weight.shape[0])


def run_linear_scatter(x: Tensor, weight: Tensor, name: str, size: int) -> Tensor:
    """See `scattered_linear`."""
    y = product_scatter(_rows(x), weight, exchanges[name])
    return y.view(x.shape[0] // size, *x.shape[1:-1], weight.shape[0])


def run_gather_linear_backward(
    grad: Tensor,
    x: Tensor,
    weight: Tensor,
    name: str,
    needs_x: bool,
    needs_weight: bool,
    sums: bool,
) -> tuple[Tensor | None, Tensor | None]:
    """Gradients of x and weight; None: not needed, or in its sum."""
    multiply = _multiply(weight, needs_weight, sums)
    grad_x, grad_weight = gather_product_backward(
        _rows(grad), _rows(x), weight, multiply, exchanges[name], needs_x=needs_x
    )
    return None if grad_x is None else grad_x.view(x.shape), grad_weight


def run_linear_scatter_backward(
    grad: Tensor,
    x: Tensor,
    weight: Tensor,
    name: str,
    needs_x: bool,
    needs_weight: bool,
    sums: bool,
) -> tuple[Tensor | None, Tensor | None]:
    """Gradients of x and weight; None: not needed, or in its sum."""
    multiply = _multiply(weight, needs_weight, sums)
    grad_x, grad_weight = product_scatter_backward(
        _rows(grad), _rows(x), weight, multiply, exchanges[name], needs_x=needs_x
    )
    return None if grad_x is None else grad_x.view(x.shape), grad_weight


def _rows(x: Tensor) -> Tensor:
    return x.contiguous().flatten(0, -2)


def _multiply(weight: Tensor, needed: bool, sums: bool) -> WeightGradient | None:
    if not needed:
        return None
    if not sums:
        return lambda grad, x: grad.t() @ x
    return main_gradient_of(weight).add_product  # returns None


# ------------------------------------------------------------------ the same in compiled regions


def in_region(
    operation: Any,
    grad: Tensor,
    x: Tensor,
    weight: Tensor,
    name: str,
    needs_x: bool,
    needs_weight: bool,
    sums: bool,
) -> tuple[Tensor | None, Tensor | None]:
    """Call a backward operation. One without a result would be left out, so without the gradient of
    `x` that of `weight` goes to autograd.
    """
    sums = sums and needs_x
    ticket = torch.empty(0, device=grad.device)  # equal calls must not be merged into one
    grad_x, grad_weight = operation(grad, x, weight, ticket, name, needs_x, needs_weight, sums)
    return grad_x if needs_x else None, grad_weight if needs_weight and not sums else None


gather_linear = torch.library.custom_op(
    "megatron_lightning::gather_linear", run_gather_linear, mutates_args=()
)
linear_scatter = torch.library.custom_op(
    "megatron_lightning::linear_scatter", run_linear_scatter, mutates_args=()
)


@gather_linear.register_fake
def _(x: Tensor, weight: Tensor, bias: Tensor | None, name: str, size: int) -> Tensor:
    return x.new_empty(size * x.shape[0], *x.shape[1:-1], weight.shape[0])


@linear_scatter.register_fake
def _(x: Tensor, weight: Tensor, name: str, size: int) -> Tensor:
    return x.new_empty(x.shape[0] // size, *x.shape[1:-1], weight.shape[0])


@torch.library.custom_op("megatron_lightning::gather_linear_backward", mutates_args=())
def gather_linear_backward(
    grad: Tensor,
    x: Tensor,
    weight: Tensor,
    ticket: Tensor,
    name: str,
    needs_x: bool,
    needs_weight: bool,
    sums: bool,
) -> tuple[Tensor, Tensor]:
    """See `_GatherLinear`; a gradient that is not needed, or in its sum, is an empty tensor."""
    found = run_gather_linear_backward(grad, x, weight, name, needs_x, needs_weight, sums)
    return _or_empty(found, grad)


@torch.library.custom_op("megatron_lightning::linear_scatter_backward", mutates_args=())
def linear_scatter_backward(
    grad: Tensor,
    x: Tensor,
    weight: Tensor,
    ticket: Tensor,
    name: str,
    needs_x: bool,
    needs_weight: bool,
    sums: bool,
) -> tuple[Tensor, Tensor]:
    """See `_LinearScatter`; a gradient that is not needed, or in its sum, is an empty tensor."""
    found = run_linear_scatter_backward(grad, x, weight, name, needs_x, needs_weight, sums)
    return _or_empty(found, grad)


def _or_empty(found: tuple[Tensor | None, Tensor | None], like: Tensor) -> tuple[Tensor, Tensor]:
    grad_x, grad_weight = (like.new_empty(0) if one is None else one for one in found)
    return grad_x, grad_weight


@gather_linear_backward.register_fake
@linear_scatter_backward.register_fake
def _(
    grad: Tensor,
    x: Tensor,
    weight: Tensor,
    ticket: Tensor,
    name: str,
    needs_x: bool,
    needs_weight: bool,
    sums: bool,
) -> tuple[Tensor, Tensor]:
    grad_x = x.new_empty(x.shape if needs_x else (0,))
    return grad_x, x.new_empty(weight.shape if needs_weight and not sums else (0,))
