"""silu(gate) * up (SwiGLU, arXiv 2002.05202) as one operation that keeps nothing but its input, and
the same for rows with weights (experts' outputs).

On CUDA with triton it is one kernel forward and one backward; compiled torch takes twice the time
for the latter. Elsewhere torch computes it. Regions that are compiled call it as it is.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_lightning.layers import kernels


@torch.library.custom_op("megatron_lightning::gated_silu", mutates_args=())
def gated_silu(inner: Tensor) -> Tensor:
    """(..., 2, F), gate first -> (..., F)."""
    if kernels.can_run(inner):
        from megatron_lightning.layers.kernels import gated_silu as kernel

        return kernel.forward(inner.contiguous())
    gate, up = inner.unbind(-2)
    return F.silu(gate) * up


@torch.library.custom_op("megatron_lightning::gated_silu_backward", mutates_args=())
def gated_silu_backward(grad: Tensor, inner: Tensor) -> Tensor:
    """Gradient of (..., F) and the input -> gradient of the input."""
    if kernels.can_run(inner):
        from megatron_lightning.layers.kernels import gated_silu as kernel

        return kernel.backward(grad.contiguous(), inner.contiguous())
    gate, up = inner.unbind(-2)
    grad_gate = torch.ops.aten.silu_backward(grad * up, gate)
    return torch.stack((grad_gate, grad * F.silu(gate)), dim=-2)


@gated_silu.register_fake
def _(inner: Tensor) -> Tensor:
    return inner.new_empty((*inner.shape[:-2], inner.shape[-1]))


@gated_silu_backward.register_fake
def _(grad: Tensor, inner: Tensor) -> Tensor:
    return torch.empty_like(inner, memory_format=torch.contiguous_format)


def _keep(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
    ctx.save_for_backward(inputs[0])


def _backward(ctx: Any, grad: Tensor) -> Tensor:
    (inner,) = ctx.saved_tensors
    return gated_silu_backward(grad, inner)


gated_silu.register_autograd(_backward, setup_context=_keep)


@torch.library.custom_op("megatron_lightning::weighted_gated_silu", mutates_args=())
def weighted_gated_silu(inner: Tensor, weights: Tensor) -> Tensor:
    """(R, 2, F), gate first, and weights (R,) in any floating dtype -> (R, F) in `inner`'s dtype,
    rounded once.
    """
    if kernels.can_run(inner) and weights.element_size() <= 4:
        from megatron_lightning.layers.kernels import weighted_silu

        return weighted_silu.forward(inner.contiguous(), weights.contiguous())
    wide = torch.promote_types(inner.dtype, weights.dtype)
    gate, up = inner.to(wide).unbind(-2)
    return (weights.unsqueeze(-1) * (F.silu(gate) * up)).to(inner.dtype)


@torch.library.custom_op("megatron_lightning::weighted_gated_silu_backward", mutates_args=())
def weighted_gated_silu_backward(
    grad: Tensor, inner: Tensor, weights: Tensor
) -> tuple[Tensor, Tensor]:
    """Gradient of (R, F) and the inputs -> gradients of the inputs, in their dtypes."""
    if kernels.can_run(inner) and weights.element_size() <= 4:
        from megatron_lightning.layers.kernels import weighted_silu

        return weighted_silu.backward(grad.contiguous(), inner.contiguous(), weights.contiguous())
    wide = torch.promote_types(inner.dtype, weights.dtype)
    gate, up = inner.to(wide).unbind(-2)
    silu, dy = F.silu(gate), grad.to(wide)
    weighted = weights.unsqueeze(-1) * dy
    grad_gate = torch.ops.aten.silu_backward(weighted * up, gate)
    grad_inner = torch.stack((grad_gate, weighted * silu), dim=-2).to(inner.dtype)
    return grad_inner, (dy * silu * up).sum(-1).to(weights.dtype)


@weighted_gated_silu.register_fake
def _(inner: Tensor, weights: Tensor) -> Tensor:
    return inner.new_empty((inner.shape[0], inner.shape[-1]))


@weighted_gated_silu_backward.register_fake
def _(grad: Tensor, inner: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    return (
        torch.empty_like(inner, memory_format=torch.contiguous_format),
        torch.empty_like(weights, memory_format=torch.contiguous_format),
    )


def _keep_both(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _weighted_backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
    return weighted_gated_silu_backward(grad, *ctx.saved_tensors)


weighted_gated_silu.register_autograd(_weighted_backward, setup_context=_keep_both)
