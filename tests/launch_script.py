"""A training script as a user writes it, for tests of launching and failing.

    python launch_script.py --devices 2 --mode raise --rank 1

It trains a small network with TP, PP or DP and prints `done rank=R loss=X` on every rank.
"""

import argparse
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import OnExceptionCheckpoint
from torch.utils.data import DataLoader, Dataset

from megatron_lightning.config import RuntimeConfig
from megatron_lightning.models.gpt import GPTModel
from megatron_lightning.strategies import MegatronStrategy, lifeline
from tests.layout_runs import Batches, Run, tiny_config


def say(line: str) -> None:
    """A line in one write: ranks share the output."""
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


class Trouble(L.Callback):
    """Does something bad, or says where the run is, at the second batch."""

    def __init__(self, mode: str, rank: int, folder: str) -> None:
        self.mode, self.rank, self.folder = mode, rank, folder

    def note(self) -> None:
        """Leave the time of the failure."""
        if self.folder:
            (Path(self.folder) / "failed").write_text(str(time.time()))

    def setup(self, trainer: L.Trainer, pl_module: Any, stage: str) -> None:
        if self.mode == "setup" and trainer.global_rank == self.rank:
            self.note()
            raise KeyError("no such thing in setup")

    def on_train_start(self, trainer: L.Trainer, pl_module: Any) -> None:
        say(f"first step of rank {trainer.global_rank}: {trainer.global_step}")

    def on_train_batch_end(self, trainer: L.Trainer, *args: Any) -> None:
        if self.folder:
            file = Path(self.folder) / f"step-{trainer.global_rank}"
            if not file.exists():  # a reader must never find it empty
                file.with_suffix(".new").write_text(str(os.getpid()))
                file.with_suffix(".new").rename(file)
        if trainer.global_step != 2:
            return
        if self.mode == "exit_all":
            sys.exit(0)
        if self.mode == "fail_all":
            raise ValueError("boom on every rank")
        if trainer.global_rank != self.rank:
            if self.mode == "stuck":
                time.sleep(1000)
            if self.mode == "stuck_teardown":  # as freeing memory is while a collective waits
                lifeline.BUSY_SECONDS = 1.0
                trainer.accelerator.teardown = lambda: time.sleep(1000)
            return
        self.note()
        if self.mode in ("callback", "stuck_teardown"):
            raise ValueError("boom in a callback")
        if self.mode == "stuck":
            time.sleep(1)
            raise ValueError("boom while others wait")
        if self.mode == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if self.mode == "exit":
            sys.exit(0)
        if self.mode == "memory":
            raise MemoryError("no room for 3 GiB")


class Model(GPTModel):
    """Raises inside of the schedule, on one rank."""

    trouble: Trouble

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        trouble = self.trouble
        if trouble.mode == "step" and batch_idx == 2 and self.trainer.global_rank == trouble.rank:
            trouble.note()
            raise ValueError("boom in training_step")
        if trouble.mode == "slow":
            time.sleep(0.05)
        return super().training_step(batch, batch_idx)


class Poisoned(Dataset):
    """A data set whose worker fails on one rank."""

    def __init__(self, rank: int, trouble: Trouble) -> None:
        self.rank, self.trouble = rank, trouble

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        if self.rank == self.trouble.rank:
            self.trouble.note()
            raise OSError("cannot read this sample")
        tokens = torch.arange(17) + index
        return {"tokens": tokens[:-1], "labels": tokens[1:], "loss_mask": torch.ones(16)}


class Data(Batches):
    """Batches of random tokens; with a DataLoader and a worker where that is the trouble."""

    def __init__(self, run: Run, trouble: Trouble) -> None:
        super().__init__(run)
        self.trouble = trouble

    def train_dataloader(self) -> Any:
        if self.trouble.mode != "worker":
            return super().train_dataloader()
        assert self.trainer is not None
        return DataLoader(Poisoned(self.trainer.global_rank, self.trouble), 4, num_workers=1)


def run(arguments: argparse.Namespace) -> None:
    """Make everything and fit."""
    if arguments.folder:
        Path(arguments.folder).mkdir(parents=True, exist_ok=True)
    if arguments.mode == "import" and os.environ.get("LOCAL_RANK", "0") == str(arguments.rank):
        sys.exit(3)
    trouble = Trouble(arguments.mode, arguments.rank, arguments.folder)
    callbacks: list[L.Callback] = [trouble]
    if arguments.save:
        callbacks.append(OnExceptionCheckpoint(arguments.folder))
    model = Model(tiny_config(num_layers=2, hidden_size=32, ffn_hidden_size=64))
    model.trouble = trouble
    trainer = L.Trainer(
        accelerator=arguments.accelerator,
        devices=arguments.devices,
        max_steps=arguments.steps,
        logger=False,
        callbacks=callbacks,
        enable_checkpointing=arguments.save,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=arguments.folder or None,
        num_sanity_val_steps=0,
        limit_val_batches=0,
        strategy=MegatronStrategy(
            arguments.tp, arguments.pp, runtime=RuntimeConfig(launcher=arguments.launcher)
        ),
    )
    data = Data(Run(steps=arguments.steps, config=model.config), trouble)
    try:
        trainer.fit(model, data)
    finally:
        if arguments.mode == "slow":
            say(f"ended rank={trainer.global_rank} step={trainer.global_step}")
    loss = trainer.callback_metrics["train_loss"]
    say(f"done rank={trainer.global_rank} loss={loss:.6f}")


def arguments_of(argv: list[str] | None = None) -> argparse.Namespace:
    """Command line; also called by tests that run in a forked rank."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--devices", type=int, default=2)
    parser.add_argument("--accelerator", default="cpu")
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--pp", type=int, default=1)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--launcher", default="auto")
    parser.add_argument("--mode", default="none")
    parser.add_argument("--rank", type=int, default=1)
    parser.add_argument("--save", action="store_true")
    parser.add_argument("--folder", default="")
    return parser.parse_args(argv)


if __name__ == "__main__":
    run(arguments_of())
