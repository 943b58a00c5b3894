"""Fully sharded parameters (FSDP2) train as one process does, with each other dimension."""

from typing import Any

import pytest

from megatron_lightning.config import DataParallelConfig
from tests.distributed.test_distributed_optimizer_layouts import (
    INTERLEAVED,
    PIPELINE,
    TENSOR,
    check,
)

FULL = DataParallelConfig(sharding="fsdp")
KEPT = DataParallelConfig(sharding="fsdp", reshard_after_forward=False)
EACH = DataParallelConfig(sharding="fsdp", reduce_each_micro_batch=True)
HYBRID = DataParallelConfig(sharding="fsdp", replicas=2)

FAST: dict[str, tuple[int, str, dict[str, Any], DataParallelConfig]] = {
    "dp4": (4, "swiglu_rope", {}, FULL),
    "tp2_sp_pp2_dp2": (8, "gelu_learned_tied_biases_qknorm", {**TENSOR, **PIPELINE}, FULL),
}
SLOW: dict[str, tuple[int, str, dict[str, Any], DataParallelConfig]] = {
    "dp2_kept_micro_batches": (
        2,
        "gelu_learned_tied_biases_qknorm",
        dict(micro_batch_size=1),
        KEPT,
    ),
    "dp4_hybrid": (4, "gelu_learned_tied_biases_qknorm", dict(micro_batch_size=1), HYBRID),
    "tp2_sp_dp2": (4, "gelu_learned_tied_biases_qknorm", TENSOR, FULL),
    "tp2_dp4_hybrid": (8, "swiglu_rope", TENSOR, HYBRID),
    "pp2_dp2_each": (4, "gelu_learned_tied_biases_qknorm", PIPELINE, EACH),
    "pp2_dp2_kept": (4, "gelu_learned_tied_biases_qknorm", PIPELINE, KEPT),
    "pp2_interleaved_dp2": (4, "swiglu_rope", PIPELINE | {"pipeline": INTERLEAVED}, FULL),
    "cp2_dp2": (4, "swiglu_rope", dict(context_parallel_size=2), FULL),
}


@pytest.mark.parametrize("case", FAST)
def test_training_equals_one_process(case: str) -> None:
    check(FAST[case])


@pytest.mark.slow
@pytest.mark.parametrize("case", SLOW)
def test_training_equals_one_process_elsewhere(case: str) -> None:
    check(SLOW[case])


def test_bfloat16_with_float32_shards_equals_one_process() -> None:
    check(FAST["dp4"], "bf16-mixed")
