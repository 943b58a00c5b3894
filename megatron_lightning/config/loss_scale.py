"""How float16 losses are scaled. Pure data."""

from __future__ import annotations

import math
from dataclasses import dataclass

from megatron_lightning.config.names import NamesFields


@dataclass(frozen=True, kw_only=True)
class LossScaleConfig(NamesFields):
    """Loss scaling of `precision="16-mixed"`; without effect in other precisions."""

    initial: float = 65536.0
    """Factor of the loss at the first step; for a `static` scale, at every step. Until a first step
    has been made, too large a scale falls by 16 at a time."""
    static: bool = False
    """Keep the initial scale; steps whose gradients are not finite are skipped all the same."""
    growth_interval: int = 1000
    """Steps in a row with finite gradients after which the scale is doubled."""
    hysteresis: int = 1
    """Steps with gradients that are not finite, since the scale last grew, after which it is
    halved; 1: at once."""
    minimum: float = 2.0**-16
    """The scale never falls below this. Losses that are summed over tokens may need one below 1."""
    max_skipped_steps: int = 100
    """Steps skipped in a row after which training ends with an error: no scale helps then."""

    def check(self) -> list[str]:
        """Return every violation as one explained sentence; an empty list when there is none."""
        problems = []
        for name in ("initial", "minimum"):
            value = getattr(self, name)
            if not value > 0 or math.isinf(value):
                problems.append(f"loss_scale.{name}={value}: must be a positive finite number")
        if self.minimum > self.initial:
            problems.append(
                f"loss_scale.minimum={self.minimum} is above loss_scale.initial={self.initial};"
                " lower it"
            )
        for name in ("growth_interval", "hysteresis", "max_skipped_steps"):
            value = getattr(self, name)
            if value < 1:
                problems.append(f"loss_scale.{name}={value}: must be at least 1 step")
        return problems
