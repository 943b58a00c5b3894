"""The accumulation window: from the first batch after an optimizer step to the next step.

Gradients and logged numbers of a window are sums; they are divided once, at its end, by the weight
that was seen. So a short last window divides by what it contains.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from megatron_lightning.runtime.metrics import LogKey, merge_total
from megatron_lightning.runtime.publish import Published

Total = tuple[Tensor, Tensor]


class AccumulationWindow:
    """Running totals of one window. `is_open` is False from an optimizer step to the next batch."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.is_open = False
        self.weight = torch.zeros((), dtype=torch.float64, device=device)
        """Global weight so far (tokens or batches), equal on all ranks."""
        self._logs: dict[LogKey, Total] = {}

    def open(self) -> None:
        """Begin a window."""
        self.is_open = True
        self.weight = torch.zeros((), dtype=torch.float64, device=self._device)
        self._logs = {}

    def add(self, published: Published) -> Mapping[LogKey, Total]:
        """Add one batch's totals; returns the window's running totals of the keys that this batch
        logged.
        """
        self.weight = self.weight + published.weight
        for key, total in published.logs.items():
            self._logs[key] = merge_total(key, self._logs.get(key), total)
        return {key: self._logs[key] for key in published.logs}

    def close(self) -> None:
        """End the window, after the optimizer step."""
        self.is_open = False
