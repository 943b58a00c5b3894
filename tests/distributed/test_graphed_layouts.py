"""Layers as graphs in layouts of two ranks, with the stand-in of the unit tests for CUDA's."""

from typing import Any

import pytest

from megatron_lightning.config import DataParallelConfig, RuntimeConfig
from megatron_lightning.runtime.layer_graphs import LayerGraphs
from tests.graphs_on_cpu import Tape, stand_in_for_graphs
from tests.harness import run_ranks_fresh
from tests.layout_runs import Run, train

pytestmark = pytest.mark.slow


def train_graphed(rank: int, world_size: int, run: Run) -> dict[str, Any]:
    made: list[LayerGraphs] = []
    stand_in_for_graphs(Tape, made)  # in a process of its own
    found = train(rank, world_size, run)
    return found | {"replays": made[0].num_replays}


@pytest.mark.parametrize(
    "layout",
    [
        dict(data_parallel=DataParallelConfig(sharding="optimizer", bucket_size=20_000)),
        dict(data_parallel=DataParallelConfig(bucket_size=20_000)),
    ],
    ids=["zero1", "dp2"],
)
def test_training_is_the_same(layout: dict[str, Any]) -> None:
    def run(graphs: Any) -> Run:
        runtime = RuntimeConfig(cuda_graphs=graphs)
        return Run(
            layout={**layout, "runtime": runtime, "micro_batch_size": 2},
            steps=6,
            keep_gradients=(),
            trainer=dict(accumulate_grad_batches=2),
        )

    wanted = run_ranks_fresh(train, 2, run("none"))
    found = run_ranks_fresh(train_graphed, 2, run("layers"))
    for got, want in zip(found, wanted, strict=True):
        assert got["replays"] > 0
        assert got["losses"] == want["losses"]
        assert got["norms"] == want["norms"]
