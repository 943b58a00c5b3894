"""Interrupted and uninterrupted runs agree bitwise over 10 steps in the same layout: losses,
weights, masters and moments; saved in the foreground or in the background.
"""

import functools
import random
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn

from megatron_lightning.config import (
    CheckpointConfig,
    DataParallelConfig,
    PipelineConfig,
    RecomputeConfig,
)
from megatron_lightning.config.training import OptimizerConfig, SchedulerConfig
from megatron_lightning.models.gpt import GPTModel
from tests.distributed.test_distributed_optimizer_resume import stored
from tests.harness import run_ranks_fresh
from tests.layout_runs import Batches, Recorder, Run, make_strategy, tiny_config
from tests.user_modules import Decoder, OwnTransformer, decoder_plan

STEPS = 10
BACKGROUND = CheckpointConfig(asynchronous=True)
slow = functools.partial(pytest.param, marks=pytest.mark.slow)


class Noisy(OwnTransformer):
    """Draws from every generator of the process."""

    def __init__(self) -> None:
        super().__init__(lambda: Decoder(dropout=0.2))
        self.noise = nn.Dropout(0.3)

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Any:
        result = super().training_step(batch, batch_idx)
        factor = 1 + 0.1 * random.random() + 0.1 * float(np.random.normal())  # noqa: NPY002
        return result | {"loss": result["loss"] * factor * (1 + 0.1 * random.gauss(0, 1))}


class StartSave(L.Callback):
    """Saves before the first step."""

    def __init__(self, path: str) -> None:
        self.path = path

    def on_train_start(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        if trainer.global_step == 0:
            trainer.save_checkpoint(self.path)


class EndSave(L.Callback):
    """Saves the end."""

    def __init__(self, folder: str) -> None:
        self.folder = folder

    def on_train_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        trainer.save_checkpoint(f"{self.folder}/end.ckpt")


def fit(
    rank: int,
    world_size: int,
    run: Run,
    folder: str,
    resume: str | None,
    cut: int,
    module: str = "gpt",
    frozen: str = "",
) -> list[float]:
    """Train; saves before the first step, after `cut` steps, and the last one are in `folder`."""
    torch.manual_seed(rank + (100 if resume else 0))  # a new process draws other numbers
    random.seed(rank + (100 if resume else 0))
    np.random.seed(rank + (100 if resume else 0))
    model: L.LightningModule
    if module == "gpt":
        model = GPTModel(
            run.config,
            OptimizerConfig(lr=run.learning_rate),
            SchedulerConfig(lr_warmup_steps=2, lr_decay_steps=STEPS),
        )
        model.configure_model()
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(not frozen or frozen not in name)
    else:
        model = Noisy()
    recorder = Recorder(run)
    saver = ModelCheckpoint(
        folder, filename="{step}", every_n_train_steps=cut or STEPS, save_top_k=-1, save_last=True
    )
    trainer = L.Trainer(
        strategy=make_strategy(run.layout),
        accelerator="cpu",
        devices=world_size,
        max_steps=STEPS,
        gradient_clip_val=1.0,
        logger=False,
        callbacks=[recorder, StartSave(f"{folder}/start.ckpt"), saver, EndSave(folder)],
        enable_progress_bar=False,
        enable_model_summary=False,
        limit_val_batches=0,
        **run.trainer,
    )
    trainer.fit(model, Batches(run), ckpt_path=resume)
    return recorder.losses


def assert_exact(size: int, run: Run, tmp_path: Path, cut: int, *options: str) -> None:
    """10 steps, against `cut` steps and the rest in new processes."""
    whole = run_ranks_fresh(fit, size, run, str(tmp_path / "whole"), None, cut, *options)
    folder = tmp_path / "rest"
    name = f"step={cut}.ckpt" if cut else "start.ckpt"
    resume = str(tmp_path / "whole" / name)
    rest = run_ranks_fresh(fit, size, run, str(folder), resume, cut, *options)
    for one, other in zip(whole, rest, strict=True):
        assert len(one) == STEPS
        assert other == one[cut:]
    wanted, found = stored(tmp_path / "whole" / "end.ckpt"), stored(folder / "end.ckpt")
    assert wanted.keys() == found.keys()
    for key, value in wanted.items():
        assert torch.equal(found[key], value), key


SHARDED = DataParallelConfig(sharding="optimizer", bucket_size=20_000)
FULLY = DataParallelConfig(sharding="fsdp")
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "zero1": (2, dict(data_parallel=SHARDED)),
    "fsdp": (2, dict(data_parallel=FULLY)),
    "cp2": (2, dict(context_parallel_size=2)),
    "zb_h1": (2, dict(pipeline_parallel_size=2, pipeline=PipelineConfig(schedule="zb-h1"))),
    "zb_v": (
        2,
        dict(
            pipeline_parallel_size=2,
            pipeline=PipelineConfig(schedule="zb-v", virtual_pipeline_size=2),
        ),
    ),
    "tp2_sp_dp2": (
        4,
        dict(
            tensor_parallel_size=2,
            sequence_parallel=True,
            data_parallel=SHARDED,
            recompute=RecomputeConfig(mode="full"),
        ),
    ),
}


@pytest.mark.parametrize(
    ("layout", "background"),
    [
        ("zero1", True),
        slow("zb_h1", False),
        slow("fsdp", True),
        slow("cp2", True),
        slow("zb_v", True),
        slow("tp2_sp_dp2", True),
    ],
)
def test_in_the_middle_of_an_epoch(layout: str, background: bool, tmp_path: Path) -> None:
    """Dropout, bfloat16 weights with float32 masters, warm-up."""
    size, options = LAYOUTS[layout]
    if background:
        options = options | dict(checkpoint=BACKGROUND)
    run = Run(
        config=tiny_config(hidden_dropout=0.1, attention_dropout=0.0 if layout == "cp2" else 0.1),
        layout=options,
        trainer=dict(precision="bf16-mixed"),
        steps=STEPS,
        keep_gradients=(),
    )
    assert_exact(size, run, tmp_path, 4)


@pytest.mark.parametrize(
    ("cut", "layout", "frozen"),
    [
        slow(5, "fsdp", ""),  # where an epoch ends
        slow(0, "zero1", ""),  # before the first step
        slow(3, "tp2_sp_dp2", "embedding"),
        slow(5, "zero1", "linear_fc1"),
    ],
)
def test_at_the_end_of_an_epoch_before_the_first_step_and_with_frozen_parameters(
    cut: int, layout: str, frozen: str, tmp_path: Path
) -> None:
    size, options = LAYOUTS[layout]
    run = Run(
        config=tiny_config(num_layers=2, hidden_dropout=0.1),
        layout=options | dict(checkpoint=BACKGROUND),
        steps=5,  # of an epoch: there are two
        keep_gradients=(),
    )
    assert_exact(size, run, tmp_path, cut, "gpt", frozen)


@pytest.mark.parametrize(
    ("cut", "layout"),
    [
        (3, {}),
        slow(5, dict(tensor_parallel_size=2, plan=decoder_plan())),
        slow(7, dict(pipeline_parallel_size=2, plan=decoder_plan())),
        slow(5, dict(data_parallel=FULLY)),
    ],
)
def test_generators_of_the_process(cut: int, layout: dict[str, Any], tmp_path: Path) -> None:
    """A user's module whose dropout and noise come from torch's, Python's and NumPy's."""
    run = Run(
        config=tiny_config(vocab_size=64),
        layout=layout | dict(checkpoint=BACKGROUND),
        steps=5,
        keep_gradients=(),
    )
    assert_exact(2, run, tmp_path, cut, "own")
