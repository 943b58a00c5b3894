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
from megatron_lightning.utils.logging import warn_once

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


def check_zeroed(parameters: Mapping[str, Tensor]) -> None:
    """Refuse an `optimizer_zero_grad` that keeps gradients: windows are zeroed by the strategy."""
    kept = [name for name, parameter in parameters.items() if parameter.grad is not None]
    if kept:
        raise ValueError(
            f"gradients of {kept[:3]} were there before backward: gradients accumulate in the "
            f"strategy's buckets, so an"
            " optimizer_zero_grad that keeps them has no effect; use "
            "Trainer(accumulate_grad_batches=...)"
        )


def warn_no_tokens() -> None:
    """Warn that a window held no token with a loss."""
    warn_once(
        "No token of an accumulation window has a loss (every label is masked, or training_step "
        "returned None): the optimizer "
        "step leaves all parameters"
        " unchanged, weight decay included; it still counts as a step."
    )
