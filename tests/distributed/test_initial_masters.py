"""Masters begin as the initial values before rounding, in every layout."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_lightning.config import DataParallelConfig
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
