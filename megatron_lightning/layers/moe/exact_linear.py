"""A linear layer computed in a wider dtype than its input and weight, which are what it keeps."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron_lightning.utils.tensors import no_view


def exact_linear(x: Tensor, weight: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    """(T, in), (out, in), (out,) -> (T, out) in `dtype`; gradients come in the inputs' dtypes."""
    if x.dtype == weight.dtype == dtype:
        return F.linear(x, weight, bias)
    return _ExactLinear.apply(x, weight, bias, dtype)


class _ExactLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, dtype: torch.dtype
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.bias_dtype = None if bias is None else bias.dtype
        other = None if bias is None else bias.to(dtype)
        return no_view(F.linear(x.to(dtype), weight.to(dtype), other))

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, grad: Tensor
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None, None]:
        x, weight = ctx.saved_tensors
        of_x, of_weight = ctx.needs_input_grad[:2]  # a frozen router needs the first alone
        grad_x = (grad @ weight.to(grad.dtype)).to(x.dtype) if of_x else None
        grad_weight = (grad.t() @ x.to(grad.dtype)).to(weight.dtype) if of_weight else None
        grad_bias = None if ctx.bias_dtype is None else grad.sum(0).to(ctx.bias_dtype)
        return grad_x, grad_weight, grad_bias, None
