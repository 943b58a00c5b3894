"""Masters begin as the initial values before rounding, in every layout."""

from dataclasses import replace
from typing import Any
from unittest.mock import patch

import lightning as L
import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from megatron_lightning.config import DataParallelConfig, MoEConfig
from megatron_lightning.models.gpt import GPTModel
from megatron_lightning.parallel.fsdp import shard_of
from tests import layout_runs
from tests.harness import run_ranks_fresh
from tests.layout_runs import (
    Recorder,
    Run,
    assemble,
    assert_same_training,
    boxes,
    tiny_config,
    train,
)

RUN = Run(
    config=tiny_config(num_layers=2, tie_word_embeddings=True),
    steps=2,
    keep_gradients=(),
    trainer=dict(precision="bf16-mixed", limit_val_batches=0),
)
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "one": (1, {}),
    "dp2_sharded_optimizer": (2, dict(data_parallel=DataParallelConfig(sharding="optimizer"))),
    "dp2_fully_sharded": (2, dict(data_parallel=DataParallelConfig(sharding="fsdp"))),
    "tp2": (2, dict(tensor_parallel_size=2, sequence_parallel=True)),
    "pp2_tied": (2, dict(pipeline_parallel_size=2, micro_batch_size=4)),
}


def exact_values() -> dict[str, Tensor]:
    """Initial weights of a run in float32."""
    run = replace(RUN, trainer=dict(precision="32-true", limit_val_batches=0))
    return assemble([run_ranks_fresh(train, 1, run)[0]["initial"]])


@pytest.mark.parametrize("layout", LAYOUTS)
def test_masters_begin_as_the_weights_of_a_float32_run(layout: str) -> None:
    size, options = LAYOUTS[layout]
    ranks = run_ranks_fresh(train, size, replace(RUN, layout=options))
    masters = assemble([rank["masters"][0] for rank in ranks])
    weights = assemble([rank["initial"] for rank in ranks])
    for name, value in exact_values().items():
        assert torch.equal(masters[name], value), name
        assert torch.equal(weights[name], value.bfloat16().float()), name
        if value.std() > 0:
            assert not torch.equal(masters[name], weights[name]), name


CHANGED_NAMES = ("word_embeddings.weight", "linear_qkv.weight", "experts.linear_fc2.weight")


class Changed(GPTModel):
    """Some values are others than the initial ones, which one rank alone holds."""

    def configure_optimizers(self) -> Any:
        strategy: Any = self.trainer.strategy
        model = strategy.parallel_model
        with torch.no_grad():
            for name, parameter in model.parameters.items():
                if name.endswith(CHANGED_NAMES) and not any(model.table[name].offsets):
                    parameter.view(-1)[:5] += 1.0
        return super().configure_optimizers()


def train_changed(rank: int, world_size: int, run: Run) -> dict[str, Any]:
    with patch.object(layout_runs, "GPTModel", Changed):
        return train(rank, world_size, run)


CHANGED = replace(
    RUN,
    config=tiny_config(num_layers=1, moe=MoEConfig(num_experts=4, ffn_hidden_size=64)),
    steps=1,
)
SHARDED = DataParallelConfig(sharding="optimizer")


@pytest.mark.parametrize(
    ("size", "options"),
    [
        (2, dict(tensor_parallel_size=2, sequence_parallel=True)),
        (2, dict(expert_parallel_size=2)),
        (4, dict(tensor_parallel_size=2, sequence_parallel=True, data_parallel=SHARDED)),
    ],
    ids=["tp2", "ep2", "tp2_dp2_sharded_optimizer"],
)
def test_a_changed_row_means_the_same_in_every_layout(size: int, options: dict[str, Any]) -> None:
    (single,) = run_ranks_fresh(train_changed, 1, CHANGED)
    ranks = run_ranks_fresh(train_changed, size, replace(CHANGED, layout=options))
    wanted, weights = assemble([single["masters"][0]]), assemble([single["initial"]])
    masters = assemble([rank["masters"][0] for rank in ranks])
    equal = {name for name, value in wanted.items() if torch.equal(masters[name], value)}
    assert equal == wanted.keys()
    rounded = {name for name, value in wanted.items() if torch.equal(weights[name], value)}
    assert sum(wanted[name].std() > 0 for name in rounded) == 3
    assert rounded != wanted.keys()


ROW = 3
"""The row that is changed of each of these parameters, in the hook that stands behind it."""
CHANGED_IN = {
    "decoder.layers.0.self_attention.linear_proj.weight": "configure_optimizers",
    "decoder.layers.1.mlp.linear_fc2.weight": "on_fit_start",
    "embedding.word_embeddings.weight": "on_train_start",
    "decoder.layers.1.self_attention.linear_qkv.weight": "on_train_batch_start",
}


@torch.no_grad()
def change_row(trainer: Any, hook: str) -> None:
    """Set a row to a number that bfloat16 hasn't, of the embedding to 0, wherever it lies."""
    model = trainer.strategy.parallel_model
    for name, info in model.table.items():
        for ending, wanted in CHANGED_IN.items():
            if not name.endswith(ending) or wanted != hook:
                continue
            parameter = model.parameters[name]
            sharded = isinstance(parameter, DTensor)
            local, begins = shard_of(parameter) if sharded else (parameter, (0,))
            row = ROW - info.offsets[0] - begins[0]
            if 0 <= row < len(local):
                local[row] = 0.0 if "embedding" in name else 0.1


class Hooks(Recorder):
    """Changes rows before training; initial weights and masters are those of the first step."""

    def on_fit_start(self, trainer: L.Trainer, module: Any) -> None:
        change_row(trainer, "on_fit_start")

    def on_train_start(self, trainer: L.Trainer, module: Any) -> None:
        change_row(trainer, "on_train_start")

    def on_train_batch_start(self, trainer: L.Trainer, module: Any, batch: Any, index: int) -> None:
        if index == 0:
            change_row(trainer, "on_train_batch_start")
            self.initial = boxes(trainer, "value")

    def on_before_optimizer_step(self, trainer: L.Trainer, module: Any, optimizer: Any) -> None:
        if not self.norms:
            self.initial_masters = boxes(trainer, "master")
        super().on_before_optimizer_step(trainer, module, optimizer)


class RowsChanged(GPTModel):
    """As `Hooks`, where optimizers are made."""

    def configure_optimizers(self) -> Any:
        change_row(self.trainer, "configure_optimizers")
        return super().configure_optimizers()


def train_with_hooks(rank: int, world_size: int, run: Run) -> dict[str, Any]:
    with patch.multiple(layout_runs, GPTModel=RowsChanged, Recorder=Hooks):
        return train(rank, world_size, run)


HOOKED = replace(RUN, config=tiny_config(num_layers=2), steps=3, keep_gradients=(0,))
DATA_LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "dp2": (2, {}),
    "dp2_sharded_optimizer": (2, dict(data_parallel=SHARDED)),
    "dp2_fully_sharded": (2, dict(data_parallel=DataParallelConfig(sharding="fsdp"))),
    "tp2": (2, dict(tensor_parallel_size=2, sequence_parallel=True)),
}


def test_rows_that_hooks_change_before_training() -> None:
    """Each such weight's masters are the weight, all of it; the others' begin unrounded; and all
    layouts train alike.
    """
    (single,) = run_ranks_fresh(train_with_hooks, 1, HOOKED)
    weights, masters = assemble([single["initial"]]), assemble([single["masters"][0]])
    final = assemble([single["final"]])
    for name, weight in weights.items():
        changed = any(name.endswith(ending) for ending in CHANGED_IN)
        assert torch.equal(masters[name], weight) == (changed or weight.std() == 0), name
    embedding = next(name for name in weights if name.endswith("word_embeddings.weight"))
    for size, options in DATA_LAYOUTS.values():
        ranks = run_ranks_fresh(train_with_hooks, size, replace(HOOKED, layout=options))
        found = assemble([rank["masters"][0] for rank in ranks])
        differ = [name for name, value in masters.items() if not torch.equal(found[name], value)]
        assert not differ, options
        assert_same_training(ranks, single, torch.bfloat16)
    assert not weights[embedding][ROW].any()
    assert final[embedding][ROW].abs().max() < 0.01


class Built(GPTModel):
    """Has its values before it is cut, one row of them other than the initial ones."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.configure_model()
        with torch.no_grad():
            self.network.decoder.layers["0"].mlp.linear_fc2.weight[ROW] = 0.1


def train_built(rank: int, world_size: int, run: Run) -> dict[str, Any]:
    with patch.object(layout_runs, "GPTModel", Built):
        return train(rank, world_size, run)


@pytest.mark.parametrize("layout", ["dp2_fully_sharded", "tp2_dp2_fully_sharded"])
def test_a_network_that_is_built_before_the_fit(layout: str) -> None:
    """The masters of what its user left alone begin unrounded."""
    (single,) = run_ranks_fresh(train_built, 1, RUN)
    size, options = LAYOUTS["dp2_fully_sharded"]
    if layout != "dp2_fully_sharded":
        size, options = 4, {**options, "tensor_parallel_size": 2}
    ranks = run_ranks_fresh(train_built, size, replace(RUN, layout=options))
    masters = assemble([rank["masters"][0] for rank in ranks])
    weights = assemble([single["initial"]])
    for name, value in assemble([single["masters"][0]]).items():
        assert torch.equal(masters[name], value), name
        rounded = name.endswith("layers.0.mlp.linear_fc2.weight") or value.std() == 0
        assert torch.equal(value, weights[name]) == rounded, name
    assert_same_training(ranks, single, torch.bfloat16)


def test_small_steps_move_weights() -> None:
    """A step moves the share of the weights that its length is of the distance of two numbers."""
    (rank,) = run_ranks_fresh(train, 1, replace(RUN, learning_rate=3e-5))
    before, after = (assemble([rank[key]]) for key in ("initial", "final"))
    begun, ended = (assemble([values]) for values in rank["masters"])
    moved, expected = [], []
    for name, weight in before.items():
        if weight.std() == 0:
            continue
        up = torch.nextafter(weight.bfloat16(), torch.tensor(9.0, dtype=torch.bfloat16))
        moved.append((after[name] != weight).float().flatten())
        ratio = (ended[name] - begun[name]).abs() / (up.float() - weight).abs()
        expected.append(ratio.clamp(max=1.0).flatten())
    share, wanted = torch.cat(moved).mean(), torch.cat(expected).mean()
    assert 0.05 < wanted < 0.5
    assert share == pytest.approx(float(wanted), rel=0.1)
