"""Evaluation under `inference_mode` before training steps.

Lightning takes `no_grad` in its place under gloo, so the ranks here tell it that there is no
process group: on GPUs every evaluation runs so. What an evaluation makes first and a training step
uses again (gathered parameters, tables) must not be made by it for good.
"""

from dataclasses import replace
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.loops import utilities as loops

from megatron_lightning.config import DataParallelConfig
from megatron_lightning.models import GPTModel
from tests.harness import RankError, run_ranks_fresh
from tests.layout_runs import Batches, Run, tiny_config
from tests.tolerances import assert_loss_close
from tests.user_runs import quiet_trainer

STEPS = 2
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "single": (1, {}),
    "fsdp2": (2, dict(data_parallel=DataParallelConfig(sharding="fsdp"))),
    "zero1": (2, dict(data_parallel=DataParallelConfig(sharding="optimizer"))),
    "tp2": (2, dict(tensor_parallel_size=2, sequence_parallel=True)),
    "pp2": (2, dict(pipeline_parallel_size=2, micro_batch_size=2)),
    "cp2": (2, dict(context_parallel_size=2)),
    "fsdp2_pp2": (
        4,
        dict(
            pipeline_parallel_size=2,
            micro_batch_size=2,
            data_parallel=DataParallelConfig(sharding="fsdp"),
        ),
    ),
}
SLOW = ("zero1", "tp2", "cp2", "fsdp2_pp2")


class Watch(L.Callback):
    """Whether evaluation ran under `inference_mode`, and the training losses."""

    def __init__(self) -> None:
        self.inferred: list[bool] = []
        self.losses: list[float] = []

    def on_validation_batch_start(self, *_: Any) -> None:
        self.inferred.append(torch.is_inference_mode_enabled())

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, *_: Any) -> None:
        self.losses.append(float(outputs["loss"]))


def evaluate_and_train(
    rank: int, world_size: int, run: Run, evaluate: bool
) -> tuple[list[bool], list[float]]:
    loops._distributed_is_initialized = lambda: False  # type: ignore[attr-defined]
    model, watch = GPTModel(run.config), Watch()
    trainer = quiet_trainer(run, world_size, [watch])
    if evaluate:
        trainer.validate(model, Batches(run), verbose=False)
    trainer.fit(model, Batches(run))
    return watch.inferred, watch.losses


@pytest.mark.parametrize(
    "layout", [pytest.param(n, marks=pytest.mark.slow if n in SLOW else ()) for n in LAYOUTS]
)
def test_training_after_evaluation(layout: str) -> None:
    world_size, options = LAYOUTS[layout]
    often = dict(val_check_interval=1, limit_val_batches=1)
    run = Run(config=tiny_config(num_layers=2), layout=options, steps=STEPS, trainer=often)
    never = replace(run, layout={}, trainer=dict(limit_val_batches=0))
    ((_, wanted),) = run_ranks_fresh(evaluate_and_train, 1, never, False)
    for inferred, losses in run_ranks_fresh(evaluate_and_train, world_size, run, True):
        # Those within a fit run under no_grad in any case, by Lightning's choice.
        assert inferred == ["fsdp2" not in layout, *(1 + STEPS) * [False]]
        for step, (got, want) in enumerate(zip(losses, wanted, strict=True)):
            assert_loss_close(got, want, step)


def infer_by_hand(rank: int, world_size: int) -> None:
    run = Run(config=tiny_config(num_layers=2), layout=LAYOUTS["fsdp2"][1], steps=1)
    model = GPTModel(run.config)
    quiet_trainer(run, world_size, []).fit(model, Batches(run))
    with torch.inference_mode():
        model(torch.zeros(1, 8, dtype=torch.int64))


def test_sharded_parameters_are_not_gathered_under_inference_mode() -> None:
    with pytest.raises(RankError, match=r"call the model under torch\.no_grad\(\)"):
        run_ranks_fresh(infer_by_hand, 2)


def test_a_network_built_under_inference_mode_can_be_trained() -> None:
    model = GPTModel(tiny_config(num_layers=2))
    tokens = torch.zeros(1, 8, dtype=torch.int64)
    with torch.inference_mode():
        model(tokens)
    model(tokens).float().sum().backward()
    assert all(p.grad is not None and not p.is_inference() for p in model.parameters())
