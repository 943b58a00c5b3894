"""The recorded Megatron-Core training runs, reproduced under Lightning in one process and TP=2 x
PP=2.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning as L
import pytest
from torch import Tensor

from megatron_lightning.config.training import OptimizerConfig, SchedulerConfig
from megatron_lightning.models import GPTModel
from megatron_lightning.strategies import MegatronStrategy
from tests import tolerances
from tests.harness import run_ranks_fresh
from tests.layout_runs import Recorder, Run
from tests.parity.mcore_cases import FOLDER, NAMES, Case, load_case

LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "single": (1, {}),
    "tp2_pp2": (4, dict(tensor_parallel_size=2, pipeline_parallel_size=2)),
    "tp2_sp_pp2": (
        4,
        dict(tensor_parallel_size=2, pipeline_parallel_size=2, sequence_parallel=True),
    ),
}


class RecordedBatches(L.LightningDataModule):
    """The case's micro-batches, joined to one batch a step and dealt to the data ranks."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        self.case = case

    def train_dataloader(self) -> "RecordedBatches":
        return self

    def __len__(self) -> int:
        return len(self.case.tokens)

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        for step in range(len(self)):
            fields = {
                "tokens": self.case.tokens,
                "labels": self.case.labels,
                "loss_mask": self.case.loss_mask,
            }
            place = self.trainer.strategy.distributed_sampler_kwargs  # type: ignore[union-attr]
            yield {
                name: values[step].flatten(0, 1).chunk(place["num_replicas"])[place["rank"]]
                for name, values in fields.items()
            }


def replay(
    rank: int,
    world_size: int,
    name: str,
    layout: dict[str, Any],
    folder: Path = FOLDER,
    keep_gradients: tuple[int, ...] = (),
) -> dict[str, Any]:
    """Train on the recorded batches from the recorded weights."""
    case = load_case(name, folder)
    recorded = case.optimizer
    model = GPTModel(
        case.config,
        OptimizerConfig(lr=recorded["lr"], weight_decay=recorded["weight_decay"]),
        SchedulerConfig(
            lr_warmup_steps=recorded["warmup"],
            lr_decay_steps=recorded["decay"],
            min_lr=recorded["min_lr"],
        ),
        loss_normalization="micro_batch",
    )
    model.configure_model()
    network = model.built_network()
    for key, parameter in network.named_parameters():
        parameter.data[tuple(slice(0, size) for size in case.state[key].shape)] = case.state[key]
    recorder = Recorder(Run(keep_gradients=keep_gradients))
    trainer = L.Trainer(
        strategy=MegatronStrategy(**layout, micro_batch_size=case.tokens.shape[2]),
        accelerator="cpu",
        devices=world_size,
        max_steps=len(case.tokens),
        gradient_clip_val=recorded["clip_grad"],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[recorder],
    )
    trainer.fit(model, RecordedBatches(case))
    seen = {"loss": recorder.losses, "grad_norm": recorder.norms, "lr": recorder.rates}
    return seen | {"gradients": recorder.gradients, "logged": recorder.logged}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", NAMES)
def test_recorded_training(name: str, layout: str) -> None:
    world_size, options = LAYOUTS[layout]
    expected = load_case(name).expected
    for seen in run_ranks_fresh(replay, world_size, name, options):
        assert seen["lr"] == pytest.approx(expected["lr"], rel=1e-12)
        assert seen["loss"] == pytest.approx(expected["loss"], rel=tolerances.RECORDED)
        assert seen["grad_norm"] == pytest.approx(expected["grad_norm"], rel=tolerances.RECORDED)
