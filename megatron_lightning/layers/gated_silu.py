"""silu(gate) * up (SwiGLU, arXiv 2002.05202) as one operation that keeps nothing but its input.

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
