"""Layers as graphs in layouts of two ranks, with the stand-in of the unit tests for CUDA's."""

from typing import Any

import pytest

from megatron_lightning.config import DataParallelConfig, MoEConfig, RuntimeConfig
from megatron_lightning.runtime.layer_graphs import LayerGraphs
from tests.graphs_on_cpu import StandIn, stand_in_for_graphs
from tests.harness import run_ranks_fresh
from tests.layout_runs import Run, tiny_config, train

pytestmark = pytest.mark.slow


def train_graphed(rank: int, world_size: int, run: Run) -> dict[str, Any]:
    made: list[LayerGraphs] = []
    stand_in_for_graphs(StandIn, made)
    found = train(rank, world_size, run)
    names = [region.name for region in made[0]._regions]
    return found | {"replays": made[0].num_replays, "names": names}


SHARDED = DataParallelConfig(sharding="optimizer", bucket_size=20_000)
PADDED = MoEConfig(
    num_experts=4,
    router_topk=2,
    aux_loss_coeff=1e-1,
    capacity_factor=1.25,
    pad_to_capacity=True,
)
SEQUENCE: dict[str, Any] = dict(tensor_parallel_size=2, sequence_parallel=True)
LAYOUTS: dict[str, dict[str, Any]] = {
    "zero1": dict(data_parallel=SHARDED),
    "dp2": dict(data_parallel=DataParallelConfig(bucket_size=20_000)),
    "tp2_sequence": dict(SEQUENCE),
    "ep2": dict(expert_parallel_size=2, data_parallel=SHARDED),
    "ep2_tp2_sequence": dict(
        expert_parallel_size=2,
        expert_tensor_parallel_size=1,
        **SEQUENCE,
    ),
    "ep2_expert_tp2": dict(expert_tensor_parallel_size=2, **SEQUENCE),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_training_is_the_same(layout: str) -> None:
    experts = layout.startswith("ep2")
    tensor = "tp2" in layout  # dropout too: masks of split and of whole activations
    config = tiny_config(moe=PADDED if experts else None, hidden_dropout=0.1 if tensor else 0.0)

    def run(graphs: Any) -> Run:
        runtime = RuntimeConfig(cuda_graphs=graphs, overlap_tensor_parallel=False)
        return Run(
            config=config,
            layout={**LAYOUTS[layout], "runtime": runtime, "micro_batch_size": 2},
            steps=6,
            keep_gradients=(),
            trainer=dict(accumulate_grad_batches=2),
        )

    wanted = run_ranks_fresh(train, 2, run("none"))
    found = run_ranks_fresh(train_graphed, 2, run("layers"))
    for got, want in zip(found, wanted, strict=True):
        assert got["replays"] > 0
        assert got["names"] == [f"decoder.layers.{i}" for i in range(4)]
        assert got["losses"] == want["losses"]
        assert got["norms"] == want["norms"]
