"""Each run-time check finds the fault that it is for, on every rank, and a clean run passes."""

from collections.abc import Callable
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor

from megatron_lightning.callbacks import SanityChecks, SanityError
from megatron_lightning.config import DataParallelConfig
from megatron_lightning.config.validate import ConfigurationError
from megatron_lightning.models.gpt import GPTModel
from tests.harness import run_ranks_fresh
from tests.layout_runs import Batches, Run, TokenBatches, make_strategy, tiny_config

EMBEDDING = "network.embedding.word_embeddings.weight"
NORM = "network.decoder.layers.0.input_layernorm.weight"
PROJECTION = "network.decoder.layers.1.mlp.linear_fc2.weight"


class Plant(L.Callback):
    """Changes a parameter of one rank after the first step, or a gradient of the second."""

    def __init__(
        self, rank: int, name: str, change: Callable[[Tensor], Any], *, grad: bool
    ) -> None:
        self.rank, self.name, self.change, self.grad = rank, name, change, grad

    def _tensor(self, trainer: L.Trainer) -> Tensor | None:
        if trainer.global_rank != self.rank or trainer.global_step != 1:
            return None
        parameter = trainer.strategy.parallel_model.parameters[self.name]
        return parameter.grad if self.grad else parameter.data

    def on_train_batch_end(self, trainer: L.Trainer, *args: Any) -> None:
        tensor = None if self.grad else self._tensor(trainer)
        if tensor is not None:
            self.change(tensor)

    def on_before_optimizer_step(self, trainer: L.Trainer, *args: Any) -> None:
        tensor = self._tensor(trainer) if self.grad else None
        if tensor is not None:
            self.change(tensor)


def drift(tensor: Tensor) -> None:
    tensor.view(-1)[3] += 0.25


def spoil(tensor: Tensor) -> None:
    tensor.view(-1)[5] = torch.nan


def overflow(tensor: Tensor) -> None:
    tensor.view(-1)[7] = -torch.inf


class OtherBatches(Batches):
    """Rank 1 reads other tokens, or a shorter batch, from the second batch on."""

    def __init__(self, run: Run, shorter: bool) -> None:
        super().__init__(run)
        self.shorter = shorter

    def train_dataloader(self) -> TokenBatches:
        loader = super().train_dataloader()
        assert self.trainer is not None
        return Corrupted(loader, self.shorter) if self.trainer.global_rank == 1 else loader


class Corrupted(TokenBatches):
    def __init__(self, loader: TokenBatches, shorter: bool) -> None:
        super().__init__(loader.run, loader.batches, loader.rank, loader.size)
        self.shorter = shorter

    def __iter__(self) -> Any:
        for index, batch in enumerate(super().__iter__()):
            if index > 0 and self.shorter:
                batch = {key: value[:, :-4] for key, value in batch.items()}
            elif index > 0:
                batch["labels"] = batch["labels"].flip(0)
            yield batch


def fit(
    rank: int, world_size: int, run: Run, plant: Plant | None, data: L.LightningDataModule
) -> tuple[str, tuple[Any, ...], str] | int:
    """The first finding as (check, (name, ranks), message), or the number of steps done."""
    checks = SanityChecks(every_n_steps=1)
    trainer = L.Trainer(
        strategy=make_strategy(run.layout),
        callbacks=[checks] if plant is None else [plant, checks],
        accelerator="cpu",
        devices=world_size,
        max_steps=run.steps,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        limit_val_batches=0,
        **run.trainer,
    )
    try:
        trainer.fit(GPTModel(run.config), data)
    except SanityError as error:
        first = error.findings[0]
        return first.check, (first.name, first.ranks), str(error)
    return trainer.global_step


def run_of(layout: dict[str, Any], **changes: Any) -> Run:
    return Run(config=tiny_config(tie_word_embeddings=True, **changes), layout=layout, steps=3)


CASES: dict[str, tuple[dict[str, Any], Plant, str, tuple[int, ...]]] = {
    "data_replica": ({}, Plant(1, PROJECTION, drift, grad=False), "replicas", (1,)),
    "tensor_replica": (
        dict(tensor_parallel_size=2, sequence_parallel=True),
        Plant(1, NORM, drift, grad=False),
        "replicas",
        (1,),
    ),
    "tied_copy": (
        dict(pipeline_parallel_size=2, micro_batch_size=2),
        Plant(1, EMBEDDING, drift, grad=False),
        "tied",
        (1,),
    ),
    "gradient": (
        dict(tensor_parallel_size=2),
        Plant(1, PROJECTION, spoil, grad=True),
        "finite",
        (1,),
    ),
    "parameter": (
        dict(pipeline_parallel_size=2, micro_batch_size=4),
        Plant(0, PROJECTION, overflow, grad=False),
        "finite",
        (0,),
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_a_planted_fault_is_named_on_every_rank(case: str) -> None:
    layout, plant, check, ranks = CASES[case]
    run = run_of(layout)
    found = run_ranks_fresh(fit, 2, run, plant, Batches(run))
    assert found[0] == found[1]
    got_check, (name, got_ranks), message = found[0]
    assert (got_check, name) == (check, plant.name)
    if case in ("data_replica", "tensor_replica", "tied_copy"):  # of two ranks none is the odd one
        assert set(got_ranks) <= {0, 1}
    else:
        assert got_ranks == ranks
    assert plant.name in message


@pytest.mark.parametrize("shorter", [False, True])
def test_another_batch_on_a_tensor_rank(shorter: bool) -> None:
    run = run_of(dict(tensor_parallel_size=2))
    found = run_ranks_fresh(fit, 2, run, None, OtherBatches(run, shorter))
    assert found[0] == found[1]
    check, (name, _), message = found[0]
    assert check == "batches"
    assert name == ("batch" if shorter else "['labels']")
    assert "after 1 optimizer steps" in message


def test_the_odd_rank_among_four_is_named() -> None:
    run = run_of({})
    plant = Plant(2, PROJECTION, drift, grad=False)
    found = run_ranks_fresh(fit, 4, run, plant, Batches(run))
    assert len(set(found)) == 1
    assert found[0][1] == (PROJECTION, (2,))


@pytest.mark.parametrize(
    ("world_size", "layout"),
    [
        (1, {}),
        (2, dict(tensor_parallel_size=2, sequence_parallel=True)),
        (2, dict(data_parallel=DataParallelConfig(sharding="optimizer"))),
        (2, dict(data_parallel=DataParallelConfig(sharding="fsdp"))),
        (2, dict(context_parallel_size=2)),
        pytest.param(
            8,
            dict(
                tensor_parallel_size=2,
                pipeline_parallel_size=2,
                sequence_parallel=True,
                micro_batch_size=1,
            ),
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_clean_run_passes(world_size: int, layout: dict[str, Any]) -> None:
    run = run_of(layout, qk_layernorm=True, hidden_dropout=0.1)
    assert run_ranks_fresh(fit, world_size, run, None, Batches(run)) == [3] * world_size


def test_wrong_settings_and_strategies_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="every_n_steps=0"):
        SanityChecks(every_n_steps=0)
    trainer = L.Trainer(accelerator="cpu", devices=1, logger=False, enable_checkpointing=False)
    with pytest.raises(ConfigurationError, match="SingleDeviceStrategy"):
        SanityChecks().setup(trainer, L.LightningModule(), "fit")
