"""The sharded optimizer (ZeRO-1) trains as one process does, with each other dimension."""

import dataclasses
import functools
from typing import Any

import pytest
import torch

from megatron_lightning.config import DataParallelConfig, PipelineConfig
from tests.distributed.test_layouts import MODELS
from tests.harness import run_ranks_fresh
from tests.layout_runs import Run, assert_same_training, tiny_config, train

SHARDED = DataParallelConfig(sharding="optimizer", bucket_size=20_000)
PARTIAL = dataclasses.replace(SHARDED, replicas=2)
AT_ONCE = dataclasses.replace(SHARDED, overlap_param_gather=False, overlap_grad_reduce=False)

TENSOR = dict(tensor_parallel_size=2, sequence_parallel=True)
PIPELINE = dict(pipeline_parallel_size=2, micro_batch_size=1)
INTERLEAVED = PipelineConfig(virtual_pipeline_size=2)

FAST: dict[str, tuple[int, str, dict[str, Any], DataParallelConfig]] = {
    "dp4_partial_at_once": (4, "swiglu_rope", {}, dataclasses.replace(AT_ONCE, replicas=2)),
    "tp2_sp_pp2_dp2": (8, "gelu_learned_tied_biases_qknorm", {**TENSOR, **PIPELINE}, SHARDED),
}
SLOW: dict[str, tuple[int, str, dict[str, Any], DataParallelConfig]] = {
    "dp4": (4, "gelu_learned_tied_biases_qknorm", {}, SHARDED),
    "tp2_dp4_partial": (8, "gelu_learned_tied_biases_qknorm", TENSOR, PARTIAL),
    "pp2_dp2": (4, "gelu_learned_tied_biases_qknorm", PIPELINE, SHARDED),
    "pp2_dp4_partial": (8, "gelu_learned_tied_biases_qknorm", PIPELINE, PARTIAL),
    "pp2_interleaved_dp2": (4, "swiglu_rope", PIPELINE | {"pipeline": INTERLEAVED}, SHARDED),
    "cp2_dp2_partial": (4, "swiglu_rope", dict(context_parallel_size=2), PARTIAL),
    "zb_h1_dp2": (
        4,
        "gelu_learned_tied_biases_qknorm",
        PIPELINE | {"pipeline": PipelineConfig(schedule="zb-h1")},
        SHARDED,
    ),
    "zb_v_dp2": (
        4,
        "gelu_learned_tied_biases_qknorm",
        PIPELINE | {"pipeline": PipelineConfig(schedule="zb-v", virtual_pipeline_size=2)},
        SHARDED,
    ),
}


@functools.cache
def single(model: str, precision: str = "32-true") -> dict[str, Any]:
    run = Run(config=tiny_config(**MODELS[model]), trainer=dict(precision=precision))
    return run_ranks_fresh(train, 1, run)[0]


def check(
    case: tuple[int, str, dict[str, Any], DataParallelConfig], precision: str = "32-true"
) -> None:
    world_size, model, layout, data_parallel = case
    run = Run(
        config=tiny_config(**MODELS[model]),
        layout=layout | {"data_parallel": data_parallel},
        trainer=dict(precision=precision),
    )
    dtype = torch.bfloat16 if precision.startswith("bf16") else torch.float32
    assert_same_training(run_ranks_fresh(train, world_size, run), single(model, precision), dtype)


@pytest.mark.parametrize("case", FAST)
def test_training_equals_one_process(case: str) -> None:
    check(FAST[case])


@pytest.mark.slow
@pytest.mark.parametrize("case", SLOW)
def test_training_equals_one_process_elsewhere(case: str) -> None:
    check(SLOW[case])


def test_bfloat16_with_masters_equals_one_process() -> None:
    check((4, "swiglu_rope", {}, SHARDED), "bf16-mixed")


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true"])
def test_bfloat16_equals_one_process_elsewhere(precision: str) -> None:
    check(SLOW["pp2_interleaved_dp2"], precision)
    check((4, "swiglu_rope", TENSOR, PARTIAL), precision)
