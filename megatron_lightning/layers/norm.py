"""RMSNorm (arXiv 1910.07467) and LayerNorm over the last dim. Statistics are float32 whatever the
input.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron_lightning.parallel.random import Constant, Initial


class RMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + epsilon) * weight."""

    def __init__(self, size: int, epsilon: float, *, device: str | None = None) -> None:
        super().__init__()
        self.epsilon = epsilon
        self.weight = nn.Parameter(torch.empty(size, device=device))
        self.initials: dict[str, Initial] = {"weight": Constant(1.0)}

    def forward(self, x: Tensor) -> Tensor:
        """(..., size) -> (..., size)."""
        return F.rms_norm(x, self.weight.shape, self.weight, self.epsilon)


class LayerNorm(nn.Module):
    """(x - mean) / sqrt(variance + epsilon) * weight + bias."""

    def __init__(self, size: int, epsilon: float, *, device: str | None = None) -> None:
        super().__init__()
        self.epsilon = epsilon
        self.weight = nn.Parameter(torch.empty(size, device=device))
        self.bias = nn.Parameter(torch.empty(size, device=device))
        self.initials: dict[str, Initial] = {"weight": Constant(1.0), "bias": Constant(0.0)}

    def forward(self, x: Tensor) -> Tensor:
        """(..., size) -> (..., size)."""
        return F.layer_norm(x, self.weight.shape, self.weight, self.bias, self.epsilon)
