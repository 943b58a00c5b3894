"""FP8 products of `_scaled_mm`, which torch has on the CPU too, in compiled layers and outside."""

from dataclasses import replace
from typing import Any

import pytest

from megatron_lightning.config import (
    DataParallelConfig,
    PipelineConfig,
    QuantizationConfig,
    RuntimeConfig,
)
from megatron_lightning.parallel import recompute
from megatron_lightning.parallel.quantized import recipes
from megatron_lightning.strategies import precision_checks
from tests.distributed.test_moe_compiled import counted
from tests.harness import run_ranks_fresh
from tests.layout_runs import Run, tiny_config

LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "tensor": (2, dict(tensor_parallel_size=2, sequence_parallel=True)),
    "tensor_by_parts": (
        2,
        dict(
            tensor_parallel_size=2,
            sequence_parallel=True,
            runtime=RuntimeConfig(overlap_tensor_parallel=True),
        ),
    ),
    "tensor_whole": (2, dict(tensor_parallel_size=2)),
    "sharded": (2, dict(data_parallel=DataParallelConfig(sharding="optimizer"))),
    "zero_bubble": (
        2,
        dict(
            pipeline_parallel_size=2, pipeline=PipelineConfig(schedule="zb-h1"), micro_batch_size=4
        ),
    ),
}


def on_units(rank: int, size: int, run: Run) -> dict[str, Any]:
    """Train as if the device were not refused; in a process of its own."""
    recipes.device_problem = lambda *_, **__: None  # type: ignore[attr-defined]
    precision_checks._quantization = lambda *_: iter(())
    keeping: list[bool] = []
    options = recompute.compile_options

    def noting(*, keeps_buffers: bool) -> dict[str, Any]:
        keeping.append(keeps_buffers)
        return options(keeps_buffers=keeps_buffers)

    recompute.compile_options = noting
    return counted(rank, size, run) | {"keeping": keeping}


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_compiled_layers_train_as_others(layout: str) -> None:
    size, options = LAYOUTS[layout]
    losses = []
    for compiled in (True, False):
        run = Run(
            config=tiny_config(hidden_size=64, ffn_hidden_size=96, num_layers=4),
            layout={
                **options,
                "quantization": QuantizationConfig(keep_first=0, keep_last=0),
                "runtime": replace(
                    options.get("runtime", RuntimeConfig()), compile_layers=compiled
                ),
            },
            trainer=dict(precision="bf16-mixed"),
            steps=4,
        )
        result = run_ranks_fresh(on_units, size, run, timeout=280)[-1]
        losses.append(result["losses"])
        if compiled:
            of_training_and_evaluation = 2
            assert result["graphs"] == [of_training_and_evaluation] * run.steps
            # Gradients in FP8 are not put off: for those no buffer is kept.
            assert set(result["keeping"]) == {False}
    # Compiled regions round elsewhere: a value in some thousands is the neighbouring one of FP8.
    assert losses[0] == pytest.approx(losses[1], rel=1e-3)
