"""A `val_check_interval` in batches against the batches of an epoch, known before the start."""

from pathlib import Path
from typing import Any

import lightning as L
import pytest
from lightning.pytorch.trainer.states import TrainerFn

from megatron_lightning.config.validate import ConfigurationError
from megatron_lightning.data import PretrainingDataModule
from megatron_lightning.data.modules.interval import interval_errors

QUIET: dict[str, Any] = dict(
    accelerator="cpu", logger=False, enable_progress_bar=False, enable_checkpointing=False
)


def trainer(fn: TrainerFn = TrainerFn.FITTING, **options: Any) -> L.Trainer:
    made = L.Trainer(**QUIET, **options)
    made.state.fn = fn
    return made


@pytest.mark.parametrize(
    ("options", "batches"),
    [
        (dict(val_check_interval=10), 2),
        (dict(val_check_interval=3, limit_train_batches=2), 5),
        (dict(val_check_interval=3, limit_train_batches=0.5), 4),
    ],
)
def test_longer_than_an_epoch(options: dict[str, Any], batches: int) -> None:
    (told,) = interval_errors(trainer(**options), batches)
    assert told.startswith(f"val_check_interval={options['val_check_interval']}: an epoch has 2 ba")
    assert "set it to at most 2, or check_val_every_n_epoch=None" in told


@pytest.mark.parametrize(
    "options",
    [
        dict(val_check_interval=2),
        dict(val_check_interval=0.5),
        dict(val_check_interval=10, check_val_every_n_epoch=None),
        dict(val_check_interval=10, limit_val_batches=0),
        dict(val_check_interval=10, fn=TrainerFn.VALIDATING),
        dict(val_check_interval=10, fast_dev_run=True),
    ],
)
def test_nothing_to_say(options: dict[str, Any]) -> None:
    assert interval_errors(trainer(**options), 2) == []


def module(**changes: Any) -> PretrainingDataModule:
    return PretrainingDataModule(None, 8, 2, 4, mock_data=True, **changes)


def test_of_the_data_module() -> None:
    (told,) = module().check_trainer(trainer(max_steps=2, val_check_interval=10))
    assert "an epoch has 2 batches" in told
    (told,) = module(num_train_samples=13).check_trainer(trainer(val_check_interval=4))
    assert "an epoch has 3 batches" in told
    (told,) = module().check_trainer(
        trainer(max_steps=2, accumulate_grad_batches=3, val_check_interval=7)
    )
    assert "an epoch has 6 batches" in told
    assert module().check_trainer(trainer(max_steps=10, val_check_interval=10)) == []


def test_found_when_the_data_are_there(tmp_path: Path) -> None:
    """Where the number of samples is that of the data."""
    data = module(split="90,10,0")
    data.trainer = trainer(max_epochs=1, val_check_interval=10**9)
    with pytest.raises(ConfigurationError, match="val_check_interval=1000000000: an epoch has"):
        data.setup("fit")
