"""Sharded optimizer and fully sharded parameters under NCCL on two GPUs, against one GPU."""

import functools
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_lightning.config import DataParallelConfig, RuntimeConfig
from tests.distributed.test_distributed_optimizer import MAKERS, Setup, whole_parameters
from tests.distributed.test_distributed_optimizer_lightning import train_late
from tests.distributed.test_resume import fit
from tests.harness import run_ranks, run_ranks_fresh
from tests.layout_runs import Run, assert_same_training, tiny_config, train

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif("torch.cuda.device_count() < 2", reason="needs two CUDA devices"),
]

SHARDED = DataParallelConfig(sharding="optimizer", bucket_size=20_000)
CASES: dict[str, DataParallelConfig] = {
    "optimizer": SHARDED,
    "optimizer_at_once": DataParallelConfig(
        sharding="optimizer", overlap_param_gather=False, overlap_grad_reduce=False
    ),
    "optimizer_copies": DataParallelConfig(sharding="optimizer", replicas=2),
    "optimizer_offload": DataParallelConfig(
        sharding="optimizer", bucket_size=20_000, offload_optimizer=True
    ),
    "fsdp": DataParallelConfig(sharding="fsdp"),
    "fsdp_kept": DataParallelConfig(sharding="fsdp", reshard_after_forward=False),
    "fsdp_each": DataParallelConfig(sharding="fsdp", reduce_each_micro_batch=True),
}
DTYPES = {"32-true": torch.float32, "bf16-mixed": torch.bfloat16}


def on_gpu(precision: str, **layout: Any) -> Run:
    config = tiny_config(tie_word_embeddings=True)
    return Run(config=config, layout=layout, trainer=dict(accelerator="gpu", precision=precision))


@functools.cache
def single(precision: str) -> dict[str, Any]:
    return run_ranks_fresh(train, 1, on_gpu(precision))[0]


@pytest.mark.parametrize("precision", DTYPES)
@pytest.mark.parametrize("case", CASES)
def test_training_equals_one_gpu(case: str, precision: str) -> None:
    run = on_gpu(precision, data_parallel=CASES[case], micro_batch_size=2)
    ranks = run_ranks_fresh(train, 2, run, timeout=200)
    assert_same_training(ranks, single(precision), DTYPES[precision])


@pytest.mark.parametrize("case", ["optimizer", "fsdp"])
def test_compiled_layers_train_alike(case: str) -> None:
    runtime = RuntimeConfig(compile_layers=True)
    run = on_gpu("32-true", data_parallel=CASES[case], runtime=runtime)
    assert_same_training(run_ranks_fresh(train, 2, run, timeout=280), single("32-true"))


def test_every_reader_waits_for_the_gather() -> None:
    run = on_gpu("bf16-mixed", data_parallel=SHARDED)
    found = run_ranks_fresh(train_late, 2, run, timeout=200)
    plain = run_ranks_fresh(train, 2, on_gpu("bf16-mixed", data_parallel=SHARDED), timeout=200)
    for (got, waits), want in zip(found, plain, strict=True):
        assert waits > 10
        assert got["losses"] == want["losses"]


@pytest.mark.parametrize("case", ["optimizer", "fsdp"])
def test_resume_continues_bitwise(case: str, tmp_path: Path) -> None:
    run = on_gpu("bf16-mixed", data_parallel=CASES[case])
    run = Run(**{**vars(run), "steps": 6})
    whole = run_ranks_fresh(fit, 2, run, str(tmp_path / "whole"), 6, None, timeout=200)
    run_ranks_fresh(fit, 2, run, str(tmp_path / "half"), 3, None, timeout=200)
    last = str(tmp_path / "half" / "last.ckpt")
    rest = run_ranks_fresh(fit, 2, run, str(tmp_path / "half"), 6, last, timeout=200)
    for one, other in zip(whole, rest, strict=True):
        assert other["losses"] == one["losses"][3:]
        for name, state in one["moments"].items():
            for key, value in state.items():
                assert torch.equal(other["moments"][name][key], value), (name, key)


def _steps(rank: int, world_size: int, maker: str, options: dict[str, Any]) -> dict[str, Any]:
    setup = Setup(maker, device=torch.device("cuda"), **options)
    for step in range(4):
        setup.step(step)
    fused = [group.get("fused") for group in setup.optimizer.param_groups if group["params"]]
    return {"values": setup.values(), "fused": fused}


@pytest.mark.parametrize("maker", MAKERS)
def test_any_elementwise_optimizer_gives_nearly_the_same(maker: str) -> None:
    """Kernels of the GPU round in their own way; AdamW is swapped for the fused one."""
    wanted = whole_parameters(maker)
    for found in run_ranks(_steps, 2, maker, {}, backend="nccl"):
        assert all(found["fused"]) == (maker == "adamw")
        for name, value in wanted.items():
            torch.testing.assert_close(found["values"][name], value, rtol=1e-5, atol=1e-5)


def test_partial_sharding_and_low_precision_moments() -> None:
    wanted = whole_parameters("adamw")
    for found in run_ranks(_steps, 2, "adamw", dict(replicas=2), backend="nccl"):
        for name, value in wanted.items():
            torch.testing.assert_close(found["values"][name], value, rtol=1e-5, atol=1e-5)
    moments = dict(moments=torch.bfloat16)
    first, second = run_ranks(_steps, 2, "adamw", moments, backend="nccl")
    for name, value in wanted.items():
        torch.testing.assert_close(first["values"][name], value, rtol=0.02, atol=0.02)
        assert torch.equal(first["values"][name], second["values"][name])
