"""Numbers as tensors."""

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
