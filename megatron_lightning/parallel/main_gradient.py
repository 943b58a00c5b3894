"""Linear layers that add their weight's gradient to its main gradient themselves.

Autograd hands over a weight's gradient in the weight's dtype, to be added to the float32 sum in one
more pass over memory. Here the matrix product adds to the sum (what Megatron-LM calls gradient
accumulation fusion), and autograd is told that the weight has no gradient in this pass. It calls
the weight's accumulation hook all the same, after all of the weight's uses, and so the gradient
buckets learn that the sum is complete.

An operation in a compiled region is given tensors only: it finds the sum by the weight's address.
Its effect is hidden from the compiler, so it must be neither merged with another one (each call has
a `ticket` of its own) nor left out (its result, the input's gradient, is needed).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import Parameter

from megatron_lightning.parallel.axes import MeshAxis
from megatron_lightning.utils.tensors import no_view

_HALVES = (torch.bfloat16, torch.float16)

PutOff = Callable[[Tensor, Tensor, MeshAxis, int | None], bool]
"""`DefersWeightGradient.defer`: (gradient, input, axis and dim of what the input is a part of) ->
whether they are kept for later."""
_WHOLE = MeshAxis(name="whole")


class MainGradient(Protocol):
    """One weight and the sum of its gradients: `parallel.flat.Slot`."""

    parameter: Parameter
    put_off: PutOff | None
    """What an operation of a compiled region asks first, where the schedule splits backwards."""

    def add_product(self, grad: Tensor, x: Tensor) -> None:
        """Add grad^T x: (..., out), (..., in) -> (out, in)."""
        ...

    def add_gradient(self, compute: Callable[[Tensor | None], Tensor]) -> None:
        """Add what `compute(None)` gives, or let `compute(out)` write to the flat sum."""
        ...

    def add_written(self, write: Callable[[Tensor, bool], None]) -> None:
        """Let `write(total, add)` add to the flat sum, or without `add` overwrite it."""
        ...


class AddsAtOnce:
    """Takes a weight's gradient where a layer would put it off (`weight_sink`), and adds it to the
    main gradient there and then: on the stream that made it, and without a tensor left over.
    """

    sums_weight_gradient = False
    """Set by the buckets; False: autograd gets the gradient."""
    weight_sink = None
    """Nobody is asked first."""

    def __init__(self, weight: Parameter) -> None:
        self.weight = weight

    def defer_call(self, multiply: Callable[[], Tensor]) -> bool:
        """Add what `multiply` gives, of as many elements as the weight; False: not done."""
        if not self.sums_weight_gradient:
            return False

        def compute(out: Tensor | None) -> Tensor:
            grad = multiply()
            return grad if out is None else out.copy_(grad.reshape(-1))

        main_gradient_of(self.weight).add_gradient(compute)
        return True


_by_address: weakref.WeakValueDictionary[int, MainGradient] = weakref.WeakValueDictionary()


def announce(gradient: MainGradient) -> None:
    """Let layers find the sum; again when the weight's memory has moved."""
    address = gradient.parameter.data_ptr()
    if _by_address.get(address) is not gradient:
        _by_address[address] = gradient


def main_gradient_of(weight: Tensor) -> MainGradient:
    """What was announced for the parameter that `weight` is a view of, from its first element."""
    found = _by_address.get(weight.data_ptr())
    if found is None or found.parameter.data_ptr() != weight.data_ptr():
        raise RuntimeError(
            f"a weight of shape {tuple(weight.shape)} got a gradient outside of training, or was"
            " given other memory within an accumulation window; to differentiate by weights"
            " yourself, set DataParallelConfig(fuse_weight_gradients=False)"
        )
    return found


def is_put_off(weight: Tensor, grad: Tensor, x: Tensor, axis: MeshAxis, dim: int | None) -> bool:
    """Whether grad^T x is taken for later: (..., out) and the part along `dim` of (..., in)."""
    put_off = main_gradient_of(weight).put_off
    return put_off is not None and put_off(grad, x, axis, dim)


def add_or_put_off(weight: Tensor, grad: Tensor, x: Tensor) -> None:
    """Add grad^T x to the sum of `weight`, at once or later: (..., out), (..., in) -> (out, in)."""
    if not is_put_off(weight, grad, x, _WHOLE, None):
        main_gradient_of(weight).add_product(grad, x)


def add_product_(total: Tensor, grad: Tensor, x: Tensor, *, first: bool) -> None:
    """`total` += grad^T x, or with `first` `total` = grad^T x: (..., out), (..., in) -> (out, in),
    in whatever shape `total` has.

    On CUDA the product adds in the dtype of `total`; elsewhere it is rounded to that of its factors
    before, as autograd would do it.
    """
    rows, columns = grad.flatten(0, -2).t(), x.flatten(0, -2)
    total = total.view(rows.shape[0], columns.shape[1])
    if not total.is_cuda or (total.dtype, x.dtype) not in _FUSED:
        product = rows @ columns
        if first:
            total.copy_(product)
        else:
            total.add_(product)
    elif total.dtype is x.dtype:
        if first:
            torch.mm(rows, columns, out=total)
        else:
            torch.addmm(total, rows, columns, out=total)
    elif first:
        torch.ops.aten.mm.dtype_out(rows, columns, total.dtype, out=total)
    else:
        torch.ops.aten.addmm.dtype_out(total, rows, columns, total.dtype, out=total)


_FUSED = {(torch.float32, dtype) for dtype in (torch.float32, *_HALVES)}


@torch.library.custom_op("megatron_lightning::linear_gradients", mutates_args=())
def linear_gradients(grad: Tensor, x: Tensor, weight: Tensor, ticket: Tensor) -> Tensor:
    """(..., out), (..., in), (out, in) -> gradient of `x`; that of `weight` goes to its sum.

    `ticket`: a new empty tensor, so that equal calls are not merged into one.
    """
    grad_x = grad @ weight
    add_or_put_off(weight, grad, x)
    return grad_x


@linear_gradients.register_fake
def _(grad: Tensor, x: Tensor, weight: Tensor, ticket: Tensor) -> Tensor:
    return grad.new_empty((*grad.shape[:-1], weight.shape[1]))


def summing_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """`F.linear` whose weight's gradient goes to the main gradient: (..., in), (out, in) -> (...,
    out).
    """
    return _SummingLinear.apply(x, weight, bias)


class _SummingLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        return no_view(F.linear(x, weight, bias))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad
        grad_x = grad_weight = grad_bias = None
        if needs_x and needs_weight:
            grad_x = both_gradients(grad, x, weight)
        elif needs_x:
            grad_x = grad @ weight
        elif needs_weight:
            grad_weight = weight_gradient(grad, x, weight)
        if needs_bias:
            grad_bias = grad.flatten(0, -2).sum(dim=0)
        return grad_x, grad_weight, grad_bias


def both_gradients(grad: Tensor, x: Tensor, weight: Tensor) -> Tensor:
    """Gradient of `x`; that of `weight` goes to its sum."""
    if torch.compiler.is_compiling():
        return linear_gradients(grad, x, weight, torch.empty(0, device=grad.device))
    grad_x = grad @ weight
    main_gradient_of(weight).add_product(grad, x)
    return grad_x


def weight_gradient(grad: Tensor, x: Tensor, weight: Tensor) -> Tensor | None:
    """None, and the gradient of `weight` goes to its sum; in a compiled region, which would leave
    out an operation without a result, the gradient for autograd.
    """
    if torch.compiler.is_compiling():
        return grad.flatten(0, -2).t() @ x.flatten(0, -2)
    main_gradient_of(weight).add_product(grad, x)
    return None
