"""Layers in FP8 as graphs in layouts of two ranks, with the stand-in of the unit tests for CUDA's;
torch has the products of `_scaled_mm` on the CPU too.
"""

from dataclasses import replace
from typing import Any

import pytest

from megatron_lightning.config import DataParallelConfig, QuantizationConfig, RuntimeConfig
from megatron_lightning.parallel.quantized import recipes
from megatron_lightning.runtime.layer_graphs import LayerGraphs
from megatron_lightning.strategies import precision_checks
from tests.graphs_on_cpu import StandIn, stand_in_for_graphs
from tests.harness import run_ranks_fresh
from tests.layout_runs import Run, tiny_config, train

pytestmark = pytest.mark.slow

SHARDED = DataParallelConfig(sharding="optimizer", bucket_size=20_000)
SEQUENCE: dict[str, Any] = dict(tensor_parallel_size=2, sequence_parallel=True)
CASES: dict[str, dict[str, Any]] = {
    "tp2": dict(layout=dict(tensor_parallel_size=2)),
    "tp2_sequence": dict(layout=SEQUENCE),
    "tp2_sequence_rowwise": dict(layout=SEQUENCE, low=dict(recipe="fp8_rowwise")),
    "tp2_sequence_delayed": dict(layout=SEQUENCE, low=dict(recipe="fp8_delayed")),
    "tp2_sequence_compiled": dict(layout=SEQUENCE, compiled=True),
    "zero1": dict(layout=dict(data_parallel=SHARDED)),
    "zero1_fp8_gather": dict(layout=dict(data_parallel=SHARDED), low=dict(fp8_gather=True)),
}


def train_fp8(rank: int, world_size: int, run: Run) -> dict[str, Any]:
    """Train as if the device were not refused; in a process of its own."""
    made: list[LayerGraphs] = []
    recipes.device_problem = lambda *_, **__: None  # type: ignore[attr-defined]
    precision_checks._quantization = lambda *_: iter(())
    stand_in_for_graphs(StandIn, made)
    found = train(rank, world_size, run)
    return found | {"replays": made[0].num_replays if made else 0}


@pytest.mark.parametrize("case", CASES)
def test_training_is_the_same(case: str) -> None:
    options = CASES[case]
    runtime = RuntimeConfig(
        overlap_tensor_parallel=False, compile_layers=options.get("compiled", False)
    )
    low = QuantizationConfig(keep_first=0, keep_last=0, **options.get("low", {}))
    layout = dict(options["layout"], micro_batch_size=2, quantization=low)

    def run(graphs: Any) -> Run:
        return Run(
            config=tiny_config(),
            layout={**layout, "runtime": replace(runtime, cuda_graphs=graphs)},
            steps=6,
            keep_gradients=(),
            trainer=dict(precision="bf16-mixed", accumulate_grad_batches=2),
        )

    wanted = run_ranks_fresh(train_fp8, 2, run("none"), timeout=280)
    found = run_ranks_fresh(train_fp8, 2, run("layers"), timeout=280)
    for got, want in zip(found, wanted, strict=True):
        assert got["replays"] > 0
        assert want["replays"] == 0
        assert got["losses"] == want["losses"]
        assert got["norms"] == want["norms"]
