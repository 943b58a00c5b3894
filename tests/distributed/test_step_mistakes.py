"""Mistakes in a step that one rank alone sees: all ranks hear of them, in the same words, soon."""

import time
from dataclasses import replace
from typing import Any

import lightning as L
import pytest
import torch

from megatron_lightning.config import DataParallelConfig
from megatron_lightning.models.gpt import GPTModel
from megatron_lightning.strategies import lifeline
from tests.harness import RankError, run_ranks_fresh
from tests.layout_runs import (
    Batches,
    Run,
    assemble,
    boxes,
    global_batch,
    make_strategy,
    tiny_config,
)

CONFIG = tiny_config(num_layers=2, hidden_size=32, ffn_hidden_size=64)
PP2 = Run(config=CONFIG, layout=dict(pipeline_parallel_size=2, micro_batch_size=4), steps=3)
FSDP = dict(data_parallel=DataParallelConfig(sharding="fsdp"))


class Model(GPTModel):
    """Calls the network as often as is asked for."""

    calls = 1

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        for _ in range(self.calls - 1):
            super().training_step(batch, batch_idx)
        if self.calls == 0:
            return torch.zeros((), requires_grad=True)
        return super().training_step(batch, batch_idx)


class Sparse(GPTModel):
    """Has no loss on one data rank in one step."""

    silent_rank, silent_step, calls = 1, 1, True

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        strategy: Any = self.trainer.strategy
        silent = strategy.mesh.dp.rank == self.silent_rank
        if not (silent and batch_idx == self.silent_step):
            return super().training_step(batch, batch_idx)
        if self.calls:
            super().training_step(batch, batch_idx)
        return None


def trainer_of(run: Run, world_size: int) -> L.Trainer:
    return L.Trainer(
        strategy=make_strategy(run.layout),
        accelerator="cpu",
        devices=world_size,
        max_steps=run.steps,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        limit_val_batches=0,
    )


def fail_slowly(run: Run, world_size: int, model: GPTModel) -> None:
    """Fit, and leave late: the others are to be told, not to notice."""
    lifeline.GRACE_SECONDS = 0.5
    try:
        trainer_of(run, world_size).fit(model, Batches(run))
    finally:
        time.sleep(2)


def count_calls(rank: int, world_size: int, calls: int) -> None:
    model = Model(CONFIG)
    model.calls = calls
    fail_slowly(PP2, world_size, model)


@pytest.mark.parametrize(("calls", "seeing"), [(2, 1), pytest.param(0, 0, marks=pytest.mark.slow)])
def test_calls_of_the_network_are_told_to_all_stages(
    calls: int, seeing: int, capfd: pytest.CaptureFixture[str]
) -> None:
    began = time.monotonic()
    with pytest.raises(RankError):
        run_ranks_fresh(count_calls, 2, calls)
    assert time.monotonic() - began < 12
    said = f"RuntimeError: the step called the network {calls} times; under pipeline_parallel_size"
    output = capfd.readouterr().err
    assert f"[rank {seeing}] {said}" in output
    assert f"[rank {1 - seeing}] ends because rank {seeing} failed: {said}" in output


def train_sparse(rank: int, world_size: int, run: Run, mean: bool) -> Any:
    """Final weights; with `mean`, the silent rank's samples are masked in place of left out."""
    model = Sparse(CONFIG)
    if mean:
        model.silent_rank = -1
    trainer = trainer_of(run, world_size)
    data = Batches(run)
    trainer.fit(model, data)
    return boxes(trainer, "value")


def masked(run: Run, index: int) -> dict[str, torch.Tensor]:
    """The global batches, less the second half of the second one."""
    whole = global_batch(replace(run, make_batch=None), index)
    if index == Sparse.silent_step:
        whole["loss_mask"][run.global_batch_size // 2 :] = 0
    return whole


@pytest.mark.parametrize(
    "layout",
    [
        FSDP,
        pytest.param(
            FSDP | dict(pipeline_parallel_size=2, micro_batch_size=2), marks=pytest.mark.slow
        ),
    ],
)
def test_no_loss_on_one_rank_of_a_sharded_model(layout: dict[str, Any]) -> None:
    size = 2 * layout.get("pipeline_parallel_size", 1)
    run = Run(config=CONFIG, layout=layout, steps=3)
    expected = Run(config=CONFIG, layout=layout, steps=3, make_batch=masked)
    got = assemble(run_ranks_fresh(train_sparse, size, run, False))
    for name, value in assemble(run_ranks_fresh(train_sparse, size, expected, True)).items():
        torch.testing.assert_close(got[name], value, rtol=0, atol=0)


def skip_network(rank: int, world_size: int) -> None:
    run = Run(config=CONFIG, layout=FSDP, steps=3)
    model = Sparse(CONFIG)
    model.calls = False
    fail_slowly(run, world_size, model)


@pytest.mark.slow
def test_no_call_of_the_network_on_one_rank_of_a_sharded_model(
    capfd: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(RankError):
        run_ranks_fresh(skip_network, 2)
    said = "ValueError: training_step returned None without a call of the network"
    output = capfd.readouterr().err
    assert f"[rank 1] {said}" in output
    assert f"[rank 0] ends because rank 1 failed: {said}" in output
