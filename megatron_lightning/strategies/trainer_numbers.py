"""Numbers of the Trainer that Lightning takes as they come, and that train otherwise than meant."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from lightning.pytorch import Trainer


def number_problems(_: Any, trainer: Trainer, __: Any) -> Iterator[str]:
    """Yield explained problems of numbers that are out of range whatever is trained."""
    clip = trainer.gradient_clip_val
    if clip is not None and not clip >= 0:  # also nan
        yield (
            f"gradient_clip_val={clip}: gradients are clipped to a norm or value above 0; give a"
            " positive number, e.g. 1.0, or None for no clipping"
        )
    batches = trainer.accumulate_grad_batches
    if batches < 1:
        yield f"accumulate_grad_batches={batches}: batches of one step; it must be at least 1"
    steps: int = trainer.log_every_n_steps  # type: ignore[attr-defined]
    if steps < 0:
        yield f"log_every_n_steps={steps}: it must be at least 1, or 0 for no logging"
