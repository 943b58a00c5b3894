"""Sums of gradients in float32."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from megatron_lightning.utils.logging import is_installed

_HALVES = (torch.bfloat16, torch.float16)


@functools.lru_cache(maxsize=1)
def _has_triton() -> bool:
    return is_installed("triton")


def add_to_sum_(total: Tensor, grad: Tensor) -> None:
    """`total` += `grad`, of the same shape; the numbers of torch's addition, which is slow between
    two dtypes.
    """
    fits = total.dtype is torch.float32 and grad.dtype in _HALVES and total.is_cuda
    if fits and total.is_contiguous() and grad.is_contiguous() and _has_triton():
        from megatron_lightning.precision.kernels import add

        add.add_(total, grad)
    else:
        total.add_(grad)
