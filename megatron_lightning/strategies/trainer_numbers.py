"""Numbers of the Trainer that Lightning takes as they come, and that train otherwise than meant."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from lightning.pytorch import Trainer


def number_problems(_: Any, trainer: Trainer, __: Any) -> Iterator[str]:
    """Yield explained problems of numbers that are out of range whatever is trained."""
    clip = trainer.gradient_clip_val
    if clip is not None and math.isnan(clip):
        yield (
            f"gradient_clip_val={clip}: it must be a number, e.g. 1.0; None, 0 and less mean no"
            " clipping"
        )
    batches = trainer.accumulate_grad_batches
    if batches < 1:
        yield f"accumulate_grad_batches={batches}: batches of one step; it must be at least 1"
    steps: int = trainer.log_every_n_steps  # type: ignore[attr-defined]
    if steps < 0:
        yield f"log_every_n_steps={steps}: it must be at least 1, or 0 for no logging"
