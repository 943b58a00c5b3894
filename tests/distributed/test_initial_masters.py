"""Masters begin as the initial values before rounding, in every layout."""

from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from megatron_lightning.config import DataParallelConfig, MoEConfig
from megatron_lightning.models.gpt import GPTModel
from tests import layout_runs
from tests.harness import run_ranks_fresh
from tests.layout_runs import Run, assemble, tiny_config, train

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
