"""Matrix products and norms by Transformer Engine: operations, and layers with the torch back end's
parameters.

Operations are custom ones, so that compiled layers call them as they are. A layer falls back on its
torch form where that is better or the only one: on the CPU, under autocast, where the borders of a
split stand around the product (they are fused with it), and for norms inside of compiled regions,
where the compiler fuses them with what stands around.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.library import custom_op

from megatron_lightning.layers.embedding import VocabularyHead
from megatron_lightning.layers.linear import Linear
from megatron_lightning.layers.norm import LayerNorm, RMSNorm
from megatron_lightning.parallel.main_gradient import main_gradient_of
from megatron_lightning.precision import te

_HALVES = (torch.bfloat16, torch.float16)


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """(..., in), (out, in), (out,) -> (..., out)."""
    y = te.multiply(_rows(x), weight, x.dtype, bias=bias)
    return y.view(*x.shape[:-1], weight.shape[0])


def _input_gradient(grad: Tensor, weight: Tensor) -> Tensor:
    """(..., out), (out, in) -> (..., in)."""
    grad_x = te.multiply(_rows(grad), weight, grad.dtype, layout="NN")
    return grad_x.view(*grad.shape[:-1], weight.shape[1])


def _weight_gradient(grad: Tensor, x: Tensor) -> Tensor:
    """(..., out), (..., in) -> (out, in)."""
    return te.multiply(_rows(grad), _rows(x), x.dtype, layout="NT")


def _linear_gradients(grad: Tensor, x: Tensor, weight: Tensor, ticket: Tensor) -> Tensor:
    """Gradient of `x`; that of `weight` goes to its sum. `ticket`: see `parallel/main_gradient`."""
    grad_x = te.multiply(_rows(grad), weight, grad.dtype, layout="NN")
    _add_weight_gradient(grad, x, weight)
    return grad_x.view(*grad.shape[:-1], weight.shape[1])


te_linear = custom_op("megatron_lightning::te_linear", _linear, mutates_args=())
te_input_gradient = custom_op(
    "megatron_lightning::te_input_gradient", _input_gradient, mutates_args=()
)
te_weight_gradient = custom_op(
    "megatron_lightning::te_weight_gradient", _weight_gradient, mutates_args=()
)
te_linear_gradients = custom_op(
    "megatron_lightning::te_linear_gradients", _linear_gradients, mutates_args=()
)


@te_linear.register_fake
def _(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return x.new_empty((*x.shape[:-1], weight.shape[0]))


@te_input_gradient.register_fake
def _(grad: Tensor, weight: Tensor) -> Tensor:
    return grad.new_empty((*grad.shape[:-1], weight.shape[1]))


@te_weight_gradient.register_fake
def _(grad: Tensor, x: Tensor) -> Tensor:
    return x.new_empty((grad.shape[-1], x.shape[-1]))


@te_linear_gradients.register_fake
def _(grad: Tensor, x: Tensor, weight: Tensor, ticket: Tensor) -> Tensor:
    return grad.new_empty((*grad.shape[:-1], weight.shape[1]))


def _rows(x: Tensor) -> Tensor:
    return x.reshape(-1, x.shape[-1]).contiguous()


def _add_weight_gradient(grad: Tensor, x: Tensor, weight: Tensor) -> None:
    def write(total: Tensor, add: bool) -> None:
        total = total.view(weight.shape)
        te.multiply(_rows(grad), _rows(x), total.dtype, layout="NT", out=total, add=add)

    main_gradient_of(weight).add_written(write)


class _Product(torch.autograd.Function):
    """Calls the operations in a compiled region, and elsewhere what is behind them: less of the
    host's time.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, sums: bool) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.sums = sums
        linear = te_linear if torch.compiler.is_compiling() else _linear
        return linear(x, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        grad_x = grad_weight = grad_bias = None
        if torch.compiler.is_compiling():
            if needs_x and needs_weight and ctx.sums:
                grad_x = te_linear_gradients(grad, x, weight, torch.empty(0, device=grad.device))
            else:  # the region would leave out an operation without a result
                grad_x = te_input_gradient(grad, weight) if needs_x else None
                grad_weight = te_weight_gradient(grad, x) if needs_weight else None
        else:
            grad_x = _input_gradient(grad, weight) if needs_x else None
            if needs_weight and ctx.sums:
                _add_weight_gradient(grad, x, weight)
            elif needs_weight:
                grad_weight = _weight_gradient(grad, x)
        if needs_bias:
            grad_bias = grad.flatten(0, -2).sum(dim=0)
        return grad_x, grad_weight, grad_bias, None


def _takes(x: Tensor, weight: Tensor) -> bool:
    """Whether the kernels have these dtypes and sizes: CUDA, lines of 16 bytes."""
    return (
        x.is_cuda
        and x.dtype in _HALVES
        and weight.dtype is x.dtype
        and x.shape[-1] % 8 == 0
        and (weight.dim() == 1 or weight.shape[0] % 8 == 0)
        and not torch.is_autocast_enabled("cuda")
    )


class TELinear(Linear):
    """`Linear` with Transformer Engine's products."""

    def _forward(self, x: Tensor) -> Tensor:
        *output_shape, in_features = self.weight.shape
        weight = self.weight.view(-1, in_features)
        others = (self.quantized, self.weight_sink, self.before, self.after)
        if any(each is not None for each in others) or not _takes(x, weight):
            return super()._forward(x)
        bias = None if self.bias is None else self.bias.view(-1)
        y = _Product.apply(x, weight, bias, self.sums_weight_gradient)
        return y.unflatten(-1, output_shape) if len(output_shape) > 1 else y


class TEVocabularyHead(TELinear, VocabularyHead):
    """`VocabularyHead` with Transformer Engine's products."""


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, epsilon: float, centered: bool) -> Tensor:
        rows = _rows(x)
        y, inverse = te.rms_norm(rows, weight, epsilon, centered)
        ctx.save_for_backward(rows, weight, inverse)
        ctx.centered = centered
        return y.view(x.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        rows, weight, inverse = ctx.saved_tensors
        grad_x, grad_weight = te.rms_norm_backward(_rows(grad), rows, inverse, weight, ctx.centered)
        return grad_x.view(grad.shape), grad_weight, None, None


class _LayerNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, epsilon: float) -> Tensor:
        rows = _rows(x)
        y, mean, inverse = te.layer_norm(rows, weight, bias, epsilon)
        ctx.save_for_backward(rows, weight, mean, inverse)
        return y.view(x.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        rows, weight, mean, inverse = ctx.saved_tensors
        grad_x, grad_weight, grad_bias = te.layer_norm_backward(
            _rows(grad), rows, mean, inverse, weight
        )
        return grad_x.view(grad.shape), grad_weight, grad_bias, None


def _norms(x: Tensor, weight: Tensor) -> bool:
    # A part of packed projections would have to be copied first.
    return not torch.compiler.is_compiling() and _takes(x, weight) and x.is_contiguous()


class TERMSNorm(RMSNorm):
    """`RMSNorm` by Transformer Engine's kernel."""

    def forward(self, x: Tensor) -> Tensor:
        """See `RMSNorm.forward`."""
        if not _norms(x, self.weight):
            return super().forward(x)
        return _RMSNorm.apply(x, self.weight, self.epsilon, self.zero_centered)


class TELayerNorm(LayerNorm):
    """`LayerNorm` by Transformer Engine's kernel."""

    def forward(self, x: Tensor) -> Tensor:
        """See `LayerNorm.forward`."""
        if not _norms(x, self.weight):
            return super().forward(x)
        return _LayerNorm.apply(x, self.weight, self.bias, self.epsilon)
