"""Layers that are frozen as a whole in the first passes, and trained from the second epoch on."""

from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
import torch

from megatron_lightning.config import DataParallelConfig
from megatron_lightning.models.gpt import GPTModel
from tests import layout_runs
from tests.harness import run_ranks_fresh
from tests.layout_runs import Recorder, Run, assert_same_training, boxes, tiny_config, train

RUN = Run(
    config=tiny_config(num_layers=2, tie_word_embeddings=True),
    steps=4,
    learning_rate=3e-4,
    keep_gradients=(0, 2, 3),
    trainer=dict(
        precision="bf16-mixed", max_epochs=2, limit_train_batches=2, val_check_interval=1.0
    ),
)
FULL = DataParallelConfig(sharding="fsdp")
LAYOUTS: dict[str, dict[str, Any]] = {
    "fsdp": dict(data_parallel=FULL),
    "optimizer": dict(data_parallel=DataParallelConfig(sharding="optimizer")),
}
ELSEWHERE: dict[str, dict[str, Any]] = {
    "fsdp_kept": dict(data_parallel=replace(FULL, reshard_after_forward=False)),
    "fsdp_each": dict(
        data_parallel=replace(FULL, reduce_each_micro_batch=True), micro_batch_size=2
    ),
    "data": {},
}


class Frozen(GPTModel):
    """Without a gradient for the embedding, which is the head, and for the first layer."""

    def configure_model(self) -> None:
        if self.network is None:
            super().configure_model()
            for name, parameter in self.named_parameters():
                if "embedding" in name or "layers.0" in name:
                    parameter.requires_grad_(False)


class Thaws(Recorder):
    """Unfreezes everything before the second epoch; masters begin when they are there."""

    def on_train_epoch_start(self, trainer: Any, module: Any) -> None:
        if trainer.current_epoch == 1:
            for parameter in module.parameters():
                parameter.requires_grad_(True)

    def on_before_optimizer_step(self, trainer: Any, module: Any, optimizer: Any) -> None:
        if trainer.current_epoch == 1:
            self.initial_masters = {**boxes(trainer, "master"), **self.initial_masters}
        super().on_before_optimizer_step(trainer, module, optimizer)


def thaw(rank: int, world_size: int, run: Run) -> dict[str, Any]:
    with patch.multiple(layout_runs, GPTModel=Frozen, Recorder=Thaws):
        return train(rank, world_size, run)


def check(run: Run, layout: dict[str, Any], dtype: torch.dtype) -> None:
    (single,) = run_ranks_fresh(thaw, 1, run)
    assert len(single["masters"][1]) > len(single["gradients"][0])
    assert_same_training(run_ranks_fresh(thaw, 2, replace(run, layout=layout)), single, dtype)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_unfrozen_layers_train_as_in_one_process(layout: str) -> None:
    check(RUN, LAYOUTS[layout], torch.bfloat16)


@pytest.mark.slow
@pytest.mark.parametrize("layout", ELSEWHERE)
def test_unfrozen_layers_train_as_in_one_process_elsewhere(layout: str) -> None:
    check(RUN, ELSEWHERE[layout], torch.bfloat16)


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_unfrozen_layers_train_alike_in_float32_with_accumulation(layout: str) -> None:
    changes = dict(precision="32-true", limit_train_batches=4, accumulate_grad_batches=2)
    check(replace(RUN, trainer=RUN.trainer | changes), LAYOUTS[layout], torch.float32)
