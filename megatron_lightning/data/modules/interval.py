"""A `val_check_interval` longer than an epoch, before Lightning finds it in the ranks."""

from __future__ import annotations

from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.trainer.states import TrainerFn


def interval_errors(trainer: Trainer, batches: int) -> list[str]:
    """Returns what is wrong with a `val_check_interval` in batches, of which an epoch has at most
    `batches` before the Trainer's limits.
    """
    interval: Any = trainer.val_check_interval
    if not isinstance(interval, int) or trainer.check_val_every_n_epoch is None:
        return []
    if trainer.state.fn != TrainerFn.FITTING or trainer.limit_val_batches == 0:
        return []
    limit = trainer.limit_train_batches
    batches = min(batches, limit) if isinstance(limit, int) else int(batches * limit)
    if batches < 1 or interval <= batches:
        return []
    return [
        f"val_check_interval={interval}: an epoch has {batches} batches; set it to at most"
        f" {batches}, or check_val_every_n_epoch=None to count batches over epochs, or"
        " limit_val_batches=0 for no validation"
    ]
