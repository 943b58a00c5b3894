"""The same training with experts in every layout: router, expert and upstream gradients, losses and
weights against one process (C23).
"""

import functools
from typing import Any

import pytest

from megatron_lightning.config import DataParallelConfig, ExpertConfig, MoEConfig
from tests.harness import run_ranks_fresh
from tests.layout_runs import Run, assert_same_training, tiny_config, train
from tests.router_margins import assert_margins, smallest_margins

STEPS = 3
MODELS: dict[str, dict[str, Any]] = {
    "shared": dict(
        moe=MoEConfig(
            num_experts=4,
            ffn_hidden_size=64,
            shared_expert_ffn_hidden_size=32,
            shared_expert_gate=True,
            layer_pattern="ED",
        )
    ),
    "biases": dict(
        moe=MoEConfig(num_experts=4, ffn_hidden_size=64, first_dense_layers=1, router_bias=True),
        norm="layernorm",
        activation="gelu",
        gated_linear_unit=False,
        add_bias_linear=True,
    ),
}


def data(**options: Any) -> DataParallelConfig:
    return DataParallelConfig(**options)


LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "ep2": (2, dict(expert_parallel_size=2)),
    "ep4": (4, dict(expert_parallel_size=4)),
    "ep2_gather": (2, dict(expert_parallel_size=2, expert=ExpertConfig(dispatcher="all_gather"))),
    "tp2_ep2": (
        2,
        dict(tensor_parallel_size=2, expert_parallel_size=2, expert_tensor_parallel_size=1),
    ),
    "tp2_sp_ep2": (
        2,
        dict(
            tensor_parallel_size=2,
            expert_parallel_size=2,
            expert_tensor_parallel_size=1,
            sequence_parallel=True,
        ),
    ),
    "tp2_etp2": (2, dict(tensor_parallel_size=2)),
    "tp2_sp_ep2_etp2": (
        4,
        dict(tensor_parallel_size=2, expert_parallel_size=2, sequence_parallel=True),
    ),
    "pp2_cp2_ep4": (
        8,
        dict(
            pipeline_parallel_size=2,
            context_parallel_size=2,
            expert_parallel_size=4,
            micro_batch_size=2,
        ),
    ),
    "ep2_zero1": (4, dict(expert_parallel_size=2, data_parallel=data(sharding="optimizer"))),
    "ep4_fsdp": (4, dict(expert_parallel_size=4, data_parallel=data(sharding="fsdp"))),
    "ep2_hsdp": (
        4,
        dict(expert_parallel_size=2, data_parallel=data(sharding="fsdp", replicas=2)),
    ),
    "ep2_fsdp": (4, dict(expert_parallel_size=2, data_parallel=data(sharding="fsdp"))),
}


def train_with_margins(rank: int, world_size: int, run: Run) -> dict[str, Any]:
    """Train in one process, and note the margins of all routers in all steps."""
    with smallest_margins() as margins:
        return train(rank, world_size, run) | {"margins": margins}


def run_of(model: str, **options: Any) -> Run:
    config = tiny_config(**MODELS[model])
    return Run(config=config, steps=STEPS, keep_gradients=(0, 1, 2), **options)


@functools.cache
def single(model: str) -> dict[str, Any]:
    alone = run_ranks_fresh(train_with_margins, 1, run_of(model))[0]
    assert_margins(alone["margins"])
    return alone


FAST = {("shared", "ep2"), ("shared", "tp2_sp_ep2_etp2"), ("biases", "ep2_fsdp")}
SHARED_ALONE = ("ep4_fsdp", "ep2_hsdp", "ep2_gather", "tp2_ep2")
"""Layouts that are tried with one model."""


@pytest.mark.parametrize(
    ("model", "layout"),
    [
        pytest.param(model, layout, marks=[] if (model, layout) in FAST else pytest.mark.slow)
        for model in MODELS
        for layout in LAYOUTS
        if model == "shared" or layout not in SHARED_ALONE
    ],
)
def test_training_equals_one_process(model: str, layout: str) -> None:
    world_size, options = LAYOUTS[layout]
    run = run_of(model, layout=options)
    assert_same_training(run_ranks_fresh(train, world_size, run), single(model))
