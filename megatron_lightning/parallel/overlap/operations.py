"""The operations behind `layers.py`: plain functions, and the same for compiled regions. What they
move, they move part by part (`by_parts.py`) or by one collective (`whole.py`).

An operation in a region is given tensors and numbers only and finds its exchange by name. All ranks
compile the same graph, so their turns come in the same order.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from megatron_lightning.parallel.main_gradient import add_or_put_off, is_put_off
from megatron_lightning.parallel.overlap import by_parts as overlapped
from megatron_lightning.parallel.overlap import whole as whole_products
from megatron_lightning.parallel.overlap.by_parts import WeightGradient
from megatron_lightning.parallel.overlap.whole import Collectives
from megatron_lightning.parallel.peers.exchange import Exchange
from megatron_lightning.utils.tensors import no_view

exchanges: weakref.WeakValueDictionary[str, Exchange | Collectives] = weakref.WeakValueDictionary()
"""By the name of their axis."""


def run_gather_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, name: str, size: int
) -> Tensor:
    """See `gathered_linear`."""
    exchange = exchanges[name]
    if isinstance(exchange, Collectives):
        y = whole_products.gather_product(_rows(x), weight, bias, exchange.axis)
    else:
        y = overlapped.gather_product(_rows(x), weight, bias, exchange)
    return no_view(y.view(size * x.shape[0], *x.shape[1:-1], weight.shape[0]))


def run_linear_scatter(x: Tensor, weight: Tensor, name: str, size: int) -> Tensor:
    """See `scattered_linear`."""
    exchange = exchanges[name]
    if isinstance(exchange, Collectives):
        y = whole_products.product_scatter(_rows(x), weight, exchange.axis)
    else:
        y = overlapped.product_scatter(_rows(x), weight, exchange)
    return no_view(y.view(x.shape[0] // size, *x.shape[1:-1], weight.shape[0]))


def run_linear_sum(x: Tensor, weight: Tensor, name: str) -> Tensor:
    """See `summed_product`."""
    y = whole_products.product_sum(_rows(x), weight, exchanges[name].axis)
    return no_view(y.view(*x.shape[:-1], weight.shape[0]))


def run_gather_linear_backward(
    grad: Tensor,
    x: Tensor,
    weight: Tensor,
    name: str,
    needs_x: bool,
    needs_weight: bool,
    sums: bool,
) -> tuple[Tensor | None, Tensor | None]:
    """Gradients of x and weight; None: not needed, in its sum, or put off with the own part."""
    exchange, rows, own = exchanges[name], _rows(grad), _rows(x)
    if needs_weight and sums:
        needs_weight = not is_put_off(weight, rows, own, exchange.axis, 0)
    factors = rows, own, weight, _multiply(weight, needs_weight, sums)
    if isinstance(exchange, Collectives):
        grad_x, grad_weight = whole_products.gather_product_backward(
            *factors, exchange.axis, needs_x=needs_x
        )
    else:
        grad_x, grad_weight = overlapped.gather_product_backward(
            *factors, exchange, needs_x=needs_x
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
    exchange, factors = exchanges[name], (_rows(grad), _rows(x), weight, multiply)
    if isinstance(exchange, Collectives):
        grad_x, grad_weight = whole_products.product_scatter_backward(
            *factors, exchange.axis, needs_x=needs_x
        )
    else:
        grad_x, grad_weight = overlapped.product_scatter_backward(
            *factors, exchange, needs_x=needs_x
        )
    return None if grad_x is None else grad_x.view(x.shape), grad_weight


def run_copy_linear_backward(
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
    grad_x, grad_weight = whole_products.copy_product_backward(
        _rows(grad), _rows(x), weight, multiply, exchanges[name].axis, needs_x=needs_x
    )
    return None if grad_x is None else grad_x.view(x.shape), grad_weight


def _rows(x: Tensor) -> Tensor:
    return x.contiguous().view(-1, x.shape[-1])


def _multiply(weight: Tensor, needed: bool, sums: bool) -> WeightGradient | None:
    if not needed:
        return None
    if not sums:
        return lambda grad, x: grad.t() @ x
    return partial(add_or_put_off, weight)  # returns None


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


# Defined by hand: `torch.library.custom_op` costs the host some ten microseconds more at each call.
_library = torch.library.Library("megatron_lightning", "FRAGMENT")
_BACKWARD = (
    "(Tensor grad, Tensor x, Tensor weight, Tensor ticket, str name, bool needs_x,"
    " bool needs_weight, bool sums) -> (Tensor, Tensor)"
)
for _schema in (
    "gather_linear(Tensor x, Tensor weight, Tensor? bias, str name, int size) -> Tensor",
    "linear_scatter(Tensor x, Tensor weight, str name, int size) -> Tensor",
    "linear_sum(Tensor x, Tensor weight, str name) -> Tensor",
    f"gather_linear_backward{_BACKWARD}",
    f"linear_scatter_backward{_BACKWARD}",
    f"copy_linear_backward{_BACKWARD}",
):
    _library.define(_schema)
_operations: Any = torch.ops.megatron_lightning
gather_linear: Any = _operations.gather_linear.default
linear_scatter: Any = _operations.linear_scatter.default
linear_sum: Any = _operations.linear_sum.default
gather_linear_backward: Any = _operations.gather_linear_backward.default
"""See `gathered_linear`; a gradient that is not needed, or in its sum, is an empty tensor."""
linear_scatter_backward: Any = _operations.linear_scatter_backward.default
"""See `scattered_linear`; likewise."""
copy_linear_backward: Any = _operations.copy_linear_backward.default
"""See `copied_linear`; likewise."""


def _run_both(
    run: Callable[..., tuple[Tensor | None, Tensor | None]],
) -> Callable[..., tuple[Tensor, Tensor]]:
    """A backward operation: as `run`, with empty tensors for None."""

    def operation(
        grad: Tensor,
        x: Tensor,
        weight: Tensor,
        ticket: Tensor,
        name: str,
        needs_x: bool,
        needs_weight: bool,
        sums: bool,
    ) -> tuple[Tensor, Tensor]:
        grad_x, grad_weight = run(grad, x, weight, name, needs_x, needs_weight, sums)
        return (
            grad.new_empty(0) if grad_x is None else grad_x,
            grad.new_empty(0) if grad_weight is None else grad_weight,
        )

    return operation


def _gather_shape(x: Tensor, weight: Tensor, bias: Tensor | None, name: str, size: int) -> Tensor:
    return x.new_empty(size * x.shape[0], *x.shape[1:-1], weight.shape[0])


def _scatter_shape(x: Tensor, weight: Tensor, name: str, size: int) -> Tensor:
    return x.new_empty(x.shape[0] // size, *x.shape[1:-1], weight.shape[0])


def _sum_shape(x: Tensor, weight: Tensor, name: str) -> Tensor:
    return x.new_empty(*x.shape[:-1], weight.shape[0])


def _backward_shapes(
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


for _name, _run, _shape in (
    ("gather_linear", run_gather_linear, _gather_shape),
    ("linear_scatter", run_linear_scatter, _scatter_shape),
    ("linear_sum", run_linear_sum, _sum_shape),
    ("gather_linear_backward", _run_both(run_gather_linear_backward), _backward_shapes),
    ("linear_scatter_backward", _run_both(run_linear_scatter_backward), _backward_shapes),
    ("copy_linear_backward", _run_both(run_copy_linear_backward), _backward_shapes),
):
    _library.impl(_name, _run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"megatron_lightning::{_name}", _shape, lib=_library)
