"""Two Lightning callbacks: progress as lines, for logs, and the losses of a run as JSON lines."""

import json
import time
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ProgressBar


class LineProgress(ProgressBar):
    """A progress bar for where output isn't a terminal: a line every `every_steps` optimizer steps
    and after every validation.
    """

    def __init__(self, every_steps: int) -> None:
        super().__init__()
        self._every_steps = every_steps
        self._enabled = True
        self._started = (0, time.monotonic())  # optimizer step and time at the beginning

    def disable(self) -> None:
        """Print nothing from now on; Lightning calls it on all ranks but the first."""
        self._enabled = False

    def enable(self) -> None:
        """Print again."""
        self._enabled = True

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Remember where the rate is counted from."""
        self._started = (trainer.global_step, time.monotonic())

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Print a line when it is due."""
        step = trainer.global_step
        if step % self._every_steps == 0 or step == trainer.max_steps:
            rate = (step - self._started[0]) / (time.monotonic() - self._started[1])
            self._print(trainer, f"{_metric(trainer, 'train_loss')}  {rate:.1f} steps/s")

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Print the validation loss."""
        self._print(trainer, _metric(trainer, "val_loss"))

    def _print(self, trainer: Trainer, text: str) -> None:
        if self._enabled:
            width = len(str(trainer.max_steps))
            print(f"  step {trainer.global_step:>{width}}/{trainer.max_steps}  {text}", flush=True)


class LossRecorder(Callback):
    """Appends `{"step": ..., "train_loss": ...}` and `{"step": ..., "val_loss": ...}` to a file.

    `step` counts finished optimizer steps. The sanity validation before training is recorded too.
    The numbers are the same on every rank, so that the first one writes for all.
    """

    def __init__(self, path: Path) -> None:
        self._path = path

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Record the training loss of the step."""
        self._append(trainer, "train_loss")

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Record the loss of the whole validation set."""
        self._append(trainer, "val_loss")

    def _append(self, trainer: Trainer, name: str) -> None:
        if trainer.is_global_zero:
            entry = {"step": trainer.global_step, name: float(trainer.callback_metrics[name])}
            with self._path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(entry) + "\n")


def read_losses(path: Path, name: str) -> list[tuple[int, float]]:
    """(step, loss) of every entry that has `name`, in the order of recording."""
    entries = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    return [(entry["step"], entry[name]) for entry in entries if name in entry]


def _metric(trainer: Trainer, name: str) -> str:
    value = trainer.callback_metrics.get(name)
    label = {"train_loss": "training loss", "val_loss": "validation loss"}[name]
    return label if value is None else f"{label} {float(value):.4f}"
