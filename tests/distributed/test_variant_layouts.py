"""The same training in every layout of networks with sinks, capped scores and logits, rotations of
their own in sliding layers, norms by 1 + weight and after branches, and clamped gates.
"""

import functools
from typing import Any

import pytest

from megatron_lightning.config import (
    AttentionConfig,
    ClampConfig,
    ContextConfig,
    DataParallelConfig,
    GPTConfig,
    RecomputeConfig,
    RotaryConfig,
    RuntimeConfig,
    StreamConfig,
)
from tests.harness import run_ranks_fresh
from tests.layout_runs import Run, assert_same_training, tiny_config, train

STEPS = 4
MODELS: dict[str, dict[str, Any]] = {
    "gemma": dict(
        activation="gelu_tanh",
        window_size=6,
        window_pattern="SSF",
        qk_layernorm=True,
        tie_word_embeddings=True,
        attention=AttentionConfig(
            scale_dim=8, score_cap=2.0, local_rotary=RotaryConfig(base=100.0)
        ),
        stream=StreamConfig(
            embedding_scale=8.0, zero_centered_norm=True, branch_norm=True, logit_cap=4.0
        ),
    ),
    "sinks": dict(
        window_size=6,
        window_pattern="SF",
        add_bias_linear=True,
        attention=AttentionConfig(sinks=True),
        clamp=ClampConfig(limit=0.2),
    ),
}
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "tp2_sp": (2, dict(tensor_parallel_size=2, sequence_parallel=True)),
    "pp2": (2, dict(pipeline_parallel_size=2)),
    "cp2": (2, dict(context_parallel_size=2)),
    "cp2_all_to_all": (
        2,
        dict(context_parallel_size=2, context=ContextConfig(form="all_to_all")),
    ),
    "zero1": (2, dict(data_parallel=DataParallelConfig(sharding="optimizer"))),
    "fsdp2": (2, dict(data_parallel=DataParallelConfig(sharding="fsdp"))),
    "recomputed": (1, dict(recompute=RecomputeConfig(mode="selective"))),
    "tp2_cp2": (4, dict(tensor_parallel_size=2, context_parallel_size=2)),
    "tp2_sp_pp2": (
        4,
        dict(tensor_parallel_size=2, pipeline_parallel_size=2, sequence_parallel=True),
    ),
}
FAST = ("tp2_sp", "cp2")
COMPILED = dict(runtime=RuntimeConfig(compile_layers=True))


def run_of(model: str, layout: dict[str, Any]) -> Run:
    return Run(config=config_of(model), layout=layout, steps=STEPS, keep_gradients=(0, STEPS - 1))


def config_of(model: str) -> GPTConfig:
    return tiny_config(**MODELS[model])


@functools.cache
def single(model: str) -> Any:
    return run_ranks_fresh(train, 1, run_of(model, {}))[0]


@pytest.mark.parametrize(
    "layout",
    [pytest.param(name, marks=[] if name in FAST else [pytest.mark.slow]) for name in LAYOUTS],
)
@pytest.mark.parametrize("model", MODELS)
def test_same_training(model: str, layout: str) -> None:
    world_size, options = LAYOUTS[layout]
    ranks = run_ranks_fresh(train, world_size, run_of(model, options), timeout=240)
    assert_same_training(ranks, single(model))


@pytest.mark.slow
def test_compiled_layers() -> None:
    ranks = run_ranks_fresh(train, 1, run_of("sinks", COMPILED), timeout=240)
    assert_same_training(ranks, single("sinks"))
