"""Clipping by a known norm, and products of many tensors with a factor in memory."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

EPSILON = 1e-6
"""Added to the norm before dividing by it, as torch.nn.utils.clip_grad_norm_ does."""


def clip_by_norm(grads: Iterable[Tensor], norm: Tensor, max_norm: float) -> None:
    """Scale `grads` in place by min(1, max_norm / (norm + 1e-6)). A norm that isn't finite makes
    them so too.
    """
    groups: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for grad in grads:
        groups.setdefault((grad.device, grad.dtype), []).append(grad)
    scale = clip_factor(norm, max_norm)
    for (device, dtype), members in groups.items():
        exact = torch.promote_types(dtype, torch.float32)
        scale_tensors_(members, scale.to(device=device, dtype=exact))


def clip_factor(norm: Tensor, max_norm: float) -> Tensor:
    """min(1, max_norm / (norm + 1e-6)), what clipping multiplies gradients with."""
    return torch.clamp(max_norm / (norm + EPSILON), max=1.0)


def scale_tensors_(tensors: Sequence[Tensor], factor: Tensor) -> None:
    """Multiply tensors of one dtype and device in place by a 0-dim tensor.

    On CUDA with the kernel that unscales gradients, which takes many tensors at once at the speed
    of memory; torch's other products with a factor in memory take twice as long.
    """
    if not tensors:
        return
    first = tensors[0]
    if first.is_cuda and first.dtype is torch.float32:
        inverse = factor.to(device=first.device, dtype=torch.float32).reshape(1)
        is_infinite = torch.zeros_like(inverse)  # not needed
        torch._amp_foreach_non_finite_check_and_unscale_(list(tensors), is_infinite, inverse)
    else:
        torch._foreach_mul_(list(tensors), factor)
