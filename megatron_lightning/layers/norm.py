"""RMSNorm (arXiv 1910.07467) and LayerNorm over the last dim. Statistics are float32 whatever the
input.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron_lightning.parallel.random import Constant, Initial


class RMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + epsilon) * weight, or `zero_centered` with the factor 1 + weight."""

    def __init__(
        self,
        size: int,
        epsilon: float,
        *,
        zero_centered: bool = False,
        device: str | None = None,
    ) -> None:
        super().__init__()
        self.epsilon = epsilon
        self.zero_centered = zero_centered
        self.weight = nn.Parameter(torch.empty(size, device=device))
        self.initials: dict[str, Initial] = {"weight": Constant(0.0 if zero_centered else 1.0)}

    def forward(self, x: Tensor) -> Tensor:
        """(..., size) -> (..., size)."""
        if not self.zero_centered:
            return F.rms_norm(x, self.weight.shape, self.weight, self.epsilon)
        # 1 + weight is never made: bfloat16 would round the weight away.
        normed = F.rms_norm(x, self.weight.shape, None, self.epsilon)
        return torch.addcmul(normed, normed, self.weight)


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
