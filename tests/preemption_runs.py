"""Runs that a signal stops at a chosen place, for tests of preemption and of local copies."""

import os
import signal
import threading
import time
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import Checkpoint

from megatron_lightning.config.training import OptimizerConfig, SchedulerConfig
from megatron_lightning.models.gpt import GPTModel
from tests.layout_runs import Batches, Run, assemble, boxes, make_strategy

STEPS = 6


class Signal(L.Callback):
    """Sends a signal to one rank, by itself, at a place of the run."""

    reads_parameters = False

    def __init__(self, place: str, rank: int, signum: int = signal.SIGTERM) -> None:
        self.place, self.rank, self.signum = place, rank, signum

    def send(self, trainer: L.Trainer) -> None:
        """Send it, where this is the rank."""
        if trainer.global_rank == self.rank:
            os.kill(os.getpid(), self.signum)

    def setup(self, trainer: L.Trainer, pl_module: Any, stage: str) -> None:
        if self.place == "setup":
            self.send(trainer)

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: Any, batch: Any, batch_idx: int
    ) -> None:
        if self.place == "collective" and trainer.global_step == 2:
            if trainer.global_rank == self.rank:  # reached while this rank waits for the others
                threading.Timer(0.15, self.send, (trainer,)).start()
            elif trainer.global_rank == 0:
                time.sleep(0.4)
        wanted = {"step": 2, "window": 2, "due": 3, "epoch_end": 5, "twice": 2}
        if batch_idx == wanted.get(self.place):
            self.send(trainer)

    def on_validation_batch_end(self, trainer: L.Trainer, *args: Any, **kwargs: Any) -> None:
        steps = {"validation": 2, "last_validation": 6}
        if trainer.global_step == steps.get(self.place):
            self.send(trainer)

    def on_save_checkpoint(self, trainer: L.Trainer, *args: Any) -> None:
        if self.place == "save" or (self.place == "twice" and trainer.global_step > 2):
            self.send(trainer)


class Record(L.Callback):
    """Losses of all batches and of all validations."""

    reads_parameters = False

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.validations: list[float] = []

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: Any, outputs: Any, *_: Any) -> None:
        self.losses.append(float(outputs["loss"]))

    def on_validation_end(self, trainer: L.Trainer, pl_module: Any) -> None:
        if not trainer.sanity_checking:
            self.validations.append(float(trainer.callback_metrics["val_loss"]))


def fit(
    rank: int,
    world_size: int,
    run: Run,
    folder: str,
    sender: Signal | None = None,
    resume: str | None = None,
    callbacks: tuple[L.Callback, ...] = (),
) -> dict[str, Any]:
    """Train `run` in this rank; what it saw, and the status with which it would have ended."""
    model = GPTModel(
        run.config,
        OptimizerConfig(lr=run.learning_rate),
        SchedulerConfig(lr_warmup_steps=2, lr_decay_steps=2 * STEPS),
    )
    record = Record()
    trainer = L.Trainer(
        strategy=make_strategy(run.layout),
        devices=world_size,
        gradient_clip_val=1.0,
        logger=False,
        callbacks=[record, *callbacks, *([sender] if sender else [])],
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=any(isinstance(each, Checkpoint) for each in callbacks),
        num_sanity_val_steps=0,
        default_root_dir=folder,
        **{"accelerator": "cpu", "max_steps": STEPS, "limit_val_batches": 0, **run.trainer},
    )
    status: Any = 0
    before = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR1)]
    try:
        trainer.fit(model, Batches(run), ckpt_path=resume)
    except SystemExit as error:
        status = error.code
    assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR1)] == before
    return {
        "losses": record.losses,
        "validations": record.validations,
        "final": boxes(trainer, "value"),
        "status": status,
        "step": trainer.global_step,
    }


def assert_continues(
    whole: list[dict[str, Any]], part: list[dict[str, Any]], rest: list[dict[str, Any]]
) -> None:
    """The two parts together are the whole run, bit for bit."""
    for one, first, second in zip(whole, part, rest, strict=True):
        assert first["losses"] + second["losses"] == one["losses"]
        assert first["validations"] + second["validations"] == one["validations"]
    final, expected = (assemble([rank["final"] for rank in ranks]) for ranks in (rest, whole))
    for name, value in expected.items():
        assert torch.equal(final[name], value), name
