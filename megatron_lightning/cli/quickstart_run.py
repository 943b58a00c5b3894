"""What the quickstart trains: a small GPT on the text that Python ships, in a given layout.

Ordinary Lightning: a model, a data module, a Trainer with `ModelCheckpoint`, a progress bar and a
callback. The ranks are forked from this process, which has imported everything already: on a small
machine that saves most of the time that starting them otherwise takes.
"""

import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint, TQDMProgressBar

from megatron_lightning.cli.loss_plot import Part
from megatron_lightning.cli.progress import LineProgress, LossRecorder, read_losses
from megatron_lightning.config import GPTConfig, RuntimeConfig
from megatron_lightning.config.training import OptimizerConfig, SchedulerConfig
from megatron_lightning.data import (
    DataCard,
    PretrainingDataModule,
    preprocess_jsonl,
    python_help_texts,
    train_byte_bpe,
    write_python_help,
)
from megatron_lightning.models import GPTModel
from megatron_lightning.strategies import MegatronStrategy

VOCAB_SIZE = 1024
SEQ_LENGTH = 128
GLOBAL_BATCH_SIZE = 16
MICRO_BATCH_SIZE = 4
STEPS_UNIT = 10
"""The number of steps is a multiple of it, so that each part ends with a validation."""


@dataclass(frozen=True, kw_only=True)
class Layout:
    """How the ranks share the work."""

    tensor: int
    pipeline: int
    data: int

    @property
    def devices(self) -> int:
        """Ranks in all."""
        return self.tensor * self.pipeline * self.data

    def __str__(self) -> str:
        return f"TP={self.tensor} x PP={self.pipeline} x DP={self.data}"


LAYOUTS: dict[int, tuple[Layout, Layout]] = {
    1: (Layout(tensor=1, pipeline=1, data=1), Layout(tensor=1, pipeline=1, data=1)),
    2: (Layout(tensor=2, pipeline=1, data=1), Layout(tensor=1, pipeline=1, data=2)),
    4: (Layout(tensor=2, pipeline=2, data=1), Layout(tensor=1, pipeline=1, data=2)),
    8: (Layout(tensor=2, pipeline=2, data=2), Layout(tensor=2, pipeline=1, data=2)),
}
"""Number of devices -> layout of the first part and of the resumed one."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What the options of the quickstart come to."""

    output: Path
    """Folder for everything."""
    steps: int
    """Optimizer steps of both parts together."""
    seed: int
    """Seed of initial weights, order of samples and generation."""
    accelerator: Literal["cpu", "gpu"]
    devices: int
    """Ranks of the first part: a key of LAYOUTS."""

    @property
    def first_steps(self) -> int:
        """Optimizer steps before the checkpoint from which the second part is resumed."""
        return 7 * self.validation_interval

    @property
    def validation_interval(self) -> int:
        """Optimizer steps between validations: a tenth of all."""
        return self.steps // STEPS_UNIT

    @property
    def precision(self) -> Literal["32-true", "bf16-mixed"]:
        """Lightning's name of the precision."""
        return "bf16-mixed" if self.accelerator == "gpu" else "32-true"

    @property
    def resume_tolerance(self) -> float:
        """Largest difference of the validation losses before and after the change of layout: sums
        in another order, of float32 or of bfloat16 products.
        """
        return 1e-2 if self.accelerator == "gpu" else 1e-4

    @property
    def corpus(self) -> Path:
        """Path of the `.bin/.idx` pair without suffix."""
        return self.output / "data" / "corpus"

    @property
    def tokenizer(self) -> Path:
        """The tokenizer's file."""
        return self.corpus.with_name("tokenizer.json")

    def checkpoints(self, part: str) -> Path:
        """Folder for the checkpoints of a part of the run."""
        return self.output / "checkpoints" / part

    def losses(self, part: str) -> Path:
        """File of the losses of a part of the run."""
        return self.output / f"losses-{part}.jsonl"


def prepare(settings: Settings) -> DataCard:
    """Text to JSON lines, tokenizer, corpus; under a second."""
    text = settings.corpus.with_name("text.jsonl")
    write_python_help(text)
    tokenizer = train_byte_bpe(python_help_texts(), VOCAB_SIZE, settings.tokenizer)
    return preprocess_jsonl(text, settings.corpus, tokenizer)


def train(settings: Settings, layout: Layout, part: str, *, resume: Path | None = None) -> Path:
    """Train up to the end of the part and return its last checkpoint."""
    steps = settings.first_steps if resume is None else settings.steps
    # Without a monitor it keeps the newest; one with a monitor writes nothing, not even `last`,
    # when a validation is worse than the best.
    checkpoints = ModelCheckpoint(settings.checkpoints(part), filename="{step}")
    trainer = _trainer(settings, layout, steps, [checkpoints, LossRecorder(settings.losses(part))])
    trainer.fit(build_model(settings), _data(settings), ckpt_path=resume)
    return settings.checkpoints(part) / f"step={steps}.ckpt"


def validate(settings: Settings, layout: Layout, checkpoint: Path) -> float:
    """The validation loss of a checkpoint, computed in `layout`."""
    trainer = _trainer(settings, layout, settings.steps, [])
    results = trainer.validate(
        build_model(settings), _data(settings), ckpt_path=checkpoint, verbose=False
    )
    return results[0]["val_loss"]


def recorded(settings: Settings, layout: Layout, part: str) -> Part:
    """The recorded losses of a part of the run."""
    path = settings.losses(part)
    return Part(
        label=str(layout),
        train=read_losses(path, "train_loss"),
        validation=read_losses(path, "val_loss"),
    )


def build_model(settings: Settings) -> GPTModel:
    """A Llama-like GPT of a million parameters; this costs nothing until a Trainer builds it."""
    config = GPTConfig(
        vocab_size=VOCAB_SIZE,
        num_layers=4,
        hidden_size=96,
        num_attention_heads=4,
        num_query_groups=2,
        max_position_embeddings=2 * SEQ_LENGTH,
        init_method_std=0.05,
    )
    schedule = SchedulerConfig(lr_warmup_steps=5, lr_decay_steps=settings.steps, min_lr=6e-4)
    return GPTModel(config, OptimizerConfig(lr=6e-3), schedule)


def _data(settings: Settings) -> PretrainingDataModule:
    return PretrainingDataModule(
        str(settings.corpus),
        SEQ_LENGTH,
        MICRO_BATCH_SIZE,
        GLOBAL_BATCH_SIZE,
        split="90,10,0",
        num_train_samples=settings.steps * GLOBAL_BATCH_SIZE,  # of both parts: one order for both
        seed=settings.seed,
    )


def _trainer(
    settings: Settings, layout: Layout, max_steps: int, callbacks: list[Callback]
) -> Trainer:
    strategy = MegatronStrategy(
        tensor_parallel_size=layout.tensor,
        pipeline_parallel_size=layout.pipeline,
        sequence_parallel=layout.tensor > 1,
        runtime=RuntimeConfig(launcher="fork", seed=settings.seed),
    )
    interval = settings.validation_interval
    bar = TQDMProgressBar() if _has_screen() else LineProgress(interval)
    return Trainer(
        strategy=strategy,
        accelerator=settings.accelerator,
        devices=layout.devices,
        precision=settings.precision,
        max_steps=max_steps,
        val_check_interval=interval,
        check_val_every_n_epoch=None,
        num_sanity_val_steps=-1,  # the whole validation set: the loss before training
        gradient_clip_val=1.0,
        logger=False,
        enable_checkpointing=bool(callbacks),
        enable_model_summary=False,
        enable_progress_bar=bool(callbacks),
        callbacks=[*callbacks, bar] if callbacks else [],
    )


def _has_screen() -> bool:
    """Whether output goes to a terminal that has a size; bars stay invisible on one without."""
    return sys.stdout.isatty() and os.get_terminal_size(sys.stdout.fileno()).lines > 0


def count_gpus() -> int:
    """CUDA devices; found without touching them, which would forbid forking."""
    return torch.cuda.device_count()
