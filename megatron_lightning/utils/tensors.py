"""Numbers as tensors, and tensors that are no views."""

from __future__ import annotations

import torch
from torch import Tensor


def scalar(
    value: Tensor | float, device: torch.device, dtype: torch.dtype = torch.float64
) -> Tensor:
    """`value` as a tensor on `device`. A number is filled in there: to copy one from the host would
    wait for the device.
    """
    if isinstance(value, Tensor):
        return value.to(device=device, dtype=dtype)
    return torch.full((), float(value), dtype=dtype, device=device)


def no_view(y: Tensor) -> Tensor:
    """What a function of autograd of our own gives, where it may be a view of a tensor made there
    (`F.linear` of three dims and a bias gives one): autograd would let nobody write to it, such as
    an activation in place.
    """
    return torch.ops.aten._unsafe_view(y, y.shape)
