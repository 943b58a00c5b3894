"""Zero-bubble schedules with compiled layers: one graph a layer, trained as in one process."""

import dataclasses
from typing import Any

import pytest

from megatron_lightning.config import PipelineConfig, RecomputeConfig, RuntimeConfig
from tests.distributed.test_moe_compiled import counted
from tests.harness import run_ranks_fresh
from tests.layout_runs import Run, assert_same_training, tiny_config, train

CASES: dict[str, tuple[int, dict[str, Any], dict[str, Any]]] = {
    "h1_tp2_sp": (
        4,
        dict(num_query_groups=4),
        dict(
            tensor_parallel_size=2,
            sequence_parallel=True,
            pipeline_parallel_size=2,
            micro_batch_size=2,
            pipeline=PipelineConfig(schedule="zb-h1"),
        ),
    ),
    "h1_tp2": (
        4,
        dict(num_query_groups=4),
        dict(
            tensor_parallel_size=2,
            pipeline_parallel_size=2,
            micro_batch_size=2,
            pipeline=PipelineConfig(schedule="zb-h1"),
        ),
    ),
    "v_recomputed": (
        2,
        dict(
            num_layers=6,
            norm="layernorm",
            activation="gelu",
            gated_linear_unit=False,
            add_bias_linear=True,
            position_embedding="learned",
            max_position_embeddings=32,
            tie_word_embeddings=True,
        ),
        dict(
            pipeline_parallel_size=2,
            micro_batch_size=2,
            pipeline=PipelineConfig(schedule="zb-v", virtual_pipeline_size=2),
            recompute=RecomputeConfig(mode="full"),
        ),
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_a_layer_is_one_graph_and_trains_as_one_process(case: str) -> None:
    world_size, model, layout = CASES[case]
    run = Run(config=tiny_config(**model), layout=layout, steps=3, keep_gradients=(0, 2))
    alone = run_ranks_fresh(train, 1, dataclasses.replace(run, layout={}))[0]
    layout = layout | {"runtime": RuntimeConfig(compile_layers=True)}
    ranks = run_ranks_fresh(
        counted, world_size, dataclasses.replace(run, layout=layout), timeout=280
    )
    assert_same_training(ranks, alone)
    of_training_and_evaluation = 2
    for rank in ranks:
        assert rank["graphs"] == [of_training_and_evaluation] * run.steps
