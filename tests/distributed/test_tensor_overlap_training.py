"""Training with products that hide the collectives of a split sequence, against one process."""

import functools
from typing import Any

import pytest

from megatron_lightning.config import (
    DataParallelConfig,
    MoEConfig,
    PipelineConfig,
    RecomputeConfig,
    RuntimeConfig,
)
from megatron_lightning.config.parallel import ParallelConfig
from megatron_lightning.config.validate import check_layout
from tests.harness import run_ranks_fresh
from tests.layout_runs import Run, assert_same_training, tiny_config, train

OVERLAP = RuntimeConfig(overlap_tensor_parallel=True)
TP2: dict[str, Any] = dict(tensor_parallel_size=2, sequence_parallel=True, runtime=OVERLAP)
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "tp2": (2, TP2),
    "tp4": (4, TP2 | dict(tensor_parallel_size=4)),
    "tp2_recomputed": (2, TP2 | dict(recompute=RecomputeConfig(mode="full"))),
    "tp2_without_sums": (
        2,
        TP2 | dict(data_parallel=DataParallelConfig(fuse_weight_gradients=False)),
    ),
}
SLOW: dict[str, tuple[int, dict[str, Any]]] = {
    "tp2_pp2_zero_bubble": (
        4,
        TP2
        | dict(
            pipeline_parallel_size=2,
            micro_batch_size=2,
            pipeline=PipelineConfig(schedule="zb-h1"),
        ),
    ),
    "tp2_pp2_dp2": (8, TP2 | dict(pipeline_parallel_size=2, micro_batch_size=1)),
    "tp2_fsdp": (4, TP2 | dict(data_parallel=DataParallelConfig(sharding="fsdp"))),
    "tp2_compiled": (
        2,
        TP2 | dict(runtime=RuntimeConfig(overlap_tensor_parallel=True, compile_layers=True)),
    ),
}
MODELS: dict[str, dict[str, Any]] = {
    "dense": dict(num_query_groups=4),
    "biases_tied": dict(
        num_query_groups=4,
        norm="layernorm",
        activation="gelu",
        gated_linear_unit=False,
        add_bias_linear=True,
        position_embedding="learned",
        max_position_embeddings=32,
        tie_word_embeddings=True,
    ),
    "shared_expert": dict(
        moe=MoEConfig(
            num_experts=4, router_topk=2, ffn_hidden_size=32, shared_expert_ffn_hidden_size=64
        )
    ),
}


def run_of(model: str, layout: dict[str, Any]) -> Run:
    return Run(config=tiny_config(**MODELS[model]), layout=layout, steps=4, keep_gradients=(0, 3))


@functools.cache
def single(model: str) -> dict[str, Any]:
    return run_ranks_fresh(train, 1, run_of(model, {}))[0]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_training_equals_one_process(layout: str) -> None:
    world_size, options = LAYOUTS[layout]
    ranks = run_ranks_fresh(train, world_size, run_of("dense", options))
    assert_same_training(ranks, single("dense"))


@pytest.mark.parametrize("model", ["biases_tied", "shared_expert"])
def test_other_layers(model: str) -> None:
    assert_same_training(run_ranks_fresh(train, 2, run_of(model, TP2)), single(model))


@pytest.mark.slow
@pytest.mark.parametrize("layout", SLOW)
def test_with_other_parts(layout: str) -> None:
    world_size, options = SLOW[layout]
    ranks = run_ranks_fresh(train, world_size, run_of("dense", options), timeout=280)
    assert_same_training(ranks, single("dense"))


def test_nothing_to_overlap_is_refused() -> None:
    (problem,) = check_layout(ParallelConfig(tensor_parallel_size=2, runtime=OVERLAP))
    assert "set sequence_parallel=True, or None" in problem
    fits = ParallelConfig(tensor_parallel_size=2, sequence_parallel=True, runtime=OVERLAP)
    assert check_layout(fits) == []
