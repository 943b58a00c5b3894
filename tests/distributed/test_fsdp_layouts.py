"""Fully sharded parameters (FSDP2) train as one process does, with each other dimension."""

from typing import Any

import lightning as L
import pytest

from megatron_lightning.config import DataParallelConfig
from tests.distributed.test_distributed_optimizer_layouts import (
    INTERLEAVED,
    PIPELINE,
    TENSOR,
    check,
)
from tests.harness import run_ranks_fresh
from tests.layout_runs import Batches, GPTModel, Run
from tests.user_runs import quiet_trainer

FULL = DataParallelConfig(sharding="fsdp")
KEPT = DataParallelConfig(sharding="fsdp", reshard_after_forward=False)
EACH = DataParallelConfig(sharding="fsdp", reduce_each_micro_batch=True)
HYBRID = DataParallelConfig(sharding="fsdp", replicas=2)

FAST: dict[str, tuple[int, str, dict[str, Any], DataParallelConfig]] = {
    "dp4": (4, "swiglu_rope", dict(micro_batch_size=1), FULL),
}
SLOW: dict[str, tuple[int, str, dict[str, Any], DataParallelConfig]] = {
    "tp2_sp_pp2_dp2": (8, "gelu_learned_tied_biases_qknorm", {**TENSOR, **PIPELINE}, FULL),
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


@pytest.mark.slow
def test_bfloat16_with_float32_shards_equals_one_process() -> None:
    check(FAST["dp4"], "bf16-mixed")


class Measures(L.Callback):
    """Bytes of parameters, gradients and optimizer state on this rank, before the step."""

    found = 0

    def on_before_zero_grad(self, trainer: Any, module: Any, optimizer: Any) -> None:
        """After the first step, and before the next one's gradients go."""
        if trainer.global_step == 0:
            return
        parameters = trainer.strategy.parallel_model.parameters.values()
        tensors = [p.to_local() for p in parameters]
        tensors += [v for state in optimizer.state.values() for v in state.values()]
        storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
        self.found = sum(storages.values())


def measure(rank: int, world_size: int, run: Run) -> tuple[int, int]:
    model = GPTModel(run.config)
    callback = Measures()
    trainer = quiet_trainer(run, world_size, [callback])
    trainer.fit(model, Batches(run))
    return callback.found, sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize("data_parallel", [FULL, HYBRID], ids=["full", "hybrid"])
def test_parameters_and_optimizer_state_are_shared_out(data_parallel: DataParallelConfig) -> None:
    """12 bytes a parameter over the shards: float32 weights and two moments."""
    run = Run(
        layout=dict(data_parallel=data_parallel),
        trainer=dict(precision="bf16-mixed", limit_val_batches=0),
        steps=2,
    )
    shards = 4 // data_parallel.replicas
    for found, count in run_ranks_fresh(measure, 4, run):
        assert found == pytest.approx(12 * count / shards, rel=0.02)
