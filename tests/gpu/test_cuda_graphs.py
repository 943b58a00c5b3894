"""Layers as CUDA graphs: the same training, fewer launches, less time where the host is the limit.

pytest tests/gpu/test_cuda_graphs.py -m gpu -s
"""

import functools
import json
import os
import socket
import statistics
import time
from collections import Counter
from dataclasses import replace
from typing import Any

import lightning as L
import pytest
import torch
import torch.distributed as dist
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from megatron_lightning.config import (
    DataParallelConfig,
    GPTConfig,
    MoEConfig,
    QuantizationConfig,
    RuntimeConfig,
)
from megatron_lightning.config.training import OptimizerConfig, SchedulerConfig
from megatron_lightning.models import GPTModel
from megatron_lightning.precision.fp8 import device_problem
from megatron_lightning.runtime.graph_recorder import CudaRecorder
from megatron_lightning.strategies import MegatronStrategy
from tests.harness import run_ranks_fresh
from tests.layout_runs import Batches, Run, assert_same_training, tiny_config, train

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif("not torch.cuda.is_available()", reason="needs a CUDA device"),
]

MOE = MoEConfig(num_experts=4, router_topk=2, ffn_hidden_size=64, capacity_factor=1.5)
DROPLESS = replace(MOE, capacity_factor=None, aux_loss_coeff=1e-2)
PADDED = replace(
    MOE,
    pad_to_capacity=True,
    aux_loss_coeff=1e-2,
    z_loss_coeff=1e-3,
    router_score_function="sigmoid",
    expert_bias=True,
    shared_expert_ffn_hidden_size=64,
)
WIDE = dict(hidden_size=128, ffn_hidden_size=256)
"""Blocks of 128 divide them."""
CASES: dict[str, dict[str, Any]] = {
    "dense": {},
    "experts": dict(config=dict(moe=MOE)),
    "experts_dropless": dict(config=dict(moe=DROPLESS), accumulate=2),
    "experts_padded": dict(config=dict(moe=PADDED), accumulate=2),
    "experts_padded_float32": dict(config=dict(moe=PADDED), precision="32-true"),
    "accumulate": dict(accumulate=2),
    "dropout": dict(config=dict(hidden_dropout=0.1, attention_dropout=0.1)),
    "compiled": dict(compile=True),
    "compiled_experts": dict(config=dict(moe=PADDED), compile=True),
    "zero1": dict(layout=dict(data_parallel=DataParallelConfig(sharding="optimizer")), ranks=2),
    "tp2": dict(layout=dict(tensor_parallel_size=2), ranks=2),
    "tp2_sequence": dict(
        layout=dict(tensor_parallel_size=2, sequence_parallel=True),
        config=dict(hidden_dropout=0.1, attention_dropout=0.1),
        accumulate=2,
        ranks=2,
    ),
    "tp2_sequence_compiled": dict(
        layout=dict(tensor_parallel_size=2, sequence_parallel=True), compile=True, ranks=2
    ),
    "ep2": dict(layout=dict(expert_parallel_size=2), config=dict(moe=PADDED), ranks=2),
    "ep2_compiled": dict(
        layout=dict(expert_parallel_size=2), config=dict(moe=PADDED), compile=True, ranks=2
    ),
    "expert_tp2": dict(
        layout=dict(tensor_parallel_size=2, sequence_parallel=True, expert_tensor_parallel_size=2),
        config=dict(moe=PADDED),
        ranks=2,
    ),
    "fp8": dict(low={}),
    "fp8_accumulate": dict(low={}, accumulate=2),
    "fp8_float32": dict(low={}, precision="32-true"),
    "fp8_rowwise": dict(low=dict(recipe="fp8_rowwise"), accumulate=2),
    "fp8_blockwise": dict(low=dict(recipe="fp8_blockwise"), config=WIDE, accumulate=2),
    "fp8_delayed": dict(low=dict(recipe="fp8_delayed"), accumulate=2),
    "fp8_simulated": dict(low=dict(simulate=True)),
    "mxfp8_simulated": dict(low=dict(recipe="mxfp8", simulate=True)),
    "fp8_experts_padded": dict(low={}, config=dict(moe=PADDED)),
    "fp8_compiled": dict(low={}, compile=True),
    "fp8_compiled_accumulate": dict(low={}, compile=True, accumulate=2),
    "fp8_rowwise_compiled": dict(low=dict(recipe="fp8_rowwise"), compile=True, accumulate=2),
    "fp8_blockwise_compiled": dict(low=dict(recipe="fp8_blockwise"), config=WIDE, compile=True),
    "fp8_delayed_compiled": dict(low=dict(recipe="fp8_delayed"), compile=True, accumulate=2),
    "fp8_zero1": dict(
        low=dict(fp8_gather=True),
        layout=dict(data_parallel=DataParallelConfig(sharding="optimizer")),
        ranks=2,
    ),
    "fp8_tp2": dict(low={}, layout=dict(tensor_parallel_size=2), ranks=2),
    "fp8_tp2_sequence": dict(
        low={}, layout=dict(tensor_parallel_size=2, sequence_parallel=True), accumulate=2, ranks=2
    ),
    "fp8_tp2_sequence_compiled": dict(
        low={},
        layout=dict(tensor_parallel_size=2, sequence_parallel=True),
        compile=True,
        accumulate=2,
        ranks=2,
    ),
}


def run_of(case: str, graphs: str) -> Run:
    wanted = CASES[case]
    precision = wanted.get("precision", "bf16-mixed")
    trainer = dict(accelerator="gpu", precision=precision, limit_val_batches=0)
    runtime = RuntimeConfig(
        cuda_graphs=graphs,  # type: ignore[arg-type]
        compile_layers=wanted.get("compile", False),
        overlap_tensor_parallel=False,
    )
    layout = dict(micro_batch_size=2, runtime=runtime, **wanted.get("layout", {}))
    if "low" in wanted:
        low = QuantizationConfig(keep_first=0, keep_last=0, **wanted["low"])
        layout["quantization"] = low
    return Run(
        config=tiny_config(tie_word_embeddings=True, **wanted.get("config", {})),
        layout=layout,
        trainer=trainer | dict(accumulate_grad_batches=wanted.get("accumulate", 1)),
        keep_gradients=(0, 3, 9),
    )


def skip_without(case: str) -> None:
    """Skip where there are too few GPUs, or none with the recipe's products."""
    ranks, low = CASES[case].get("ranks", 1), CASES[case].get("low")
    if torch.cuda.device_count() < ranks:
        pytest.skip(f"needs {ranks} CUDA devices")
    if low is not None and not low.get("simulate"):
        blocks = low.get("recipe") == "fp8_blockwise"
        if problem := device_problem(torch.device("cuda"), blocks=blocks):
            pytest.skip(problem)


@pytest.mark.parametrize("case", CASES)
def test_training_is_that_without_graphs(case: str) -> None:
    skip_without(case)
    ranks = CASES[case].get("ranks", 1)
    wanted = run_ranks_fresh(train, ranks, run_of(case, "none"), timeout=280)
    found = run_ranks_fresh(train, ranks, run_of(case, "layers"), timeout=280)
    same = found[0]["losses"] == wanted[0]["losses"]
    print(f"{case}: losses {'bitwise equal' if same else 'differ'}", found[0]["losses"][-1])
    for one in (*found, *wanted):
        one["metrics"] = {}
    if ranks == 1:
        assert same
        float32 = CASES[case].get("precision") == "32-true"
        assert_same_training(found, wanted[0], torch.float32 if float32 else torch.bfloat16)
        return
    again = run_ranks_fresh(train, ranks, run_of(case, "none"), timeout=280)
    if again[0]["losses"] == wanted[0]["losses"]:  # nothing but graphs could make a difference
        assert same
    for got, want in zip(found, wanted, strict=True):
        torch.testing.assert_close(got["losses"], want["losses"], rtol=2e-3, atol=0)
        torch.testing.assert_close(got["norms"], want["norms"], rtol=2e-2, atol=0)


class Clock(L.Callback):
    """Times steps, and counts the launches of one."""

    reads_gradients = reads_parameters = False

    def __init__(self, warm: int) -> None:
        self.warm = warm
        self.seconds: list[float] = []
        self.launches: dict[str, int] = {}
        self.kernels_ms = 0.0
        self.profiler = profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA])

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, index: int) -> None:
        torch.cuda.synchronize()
        if index == self.warm - 1:
            self.profiler.start()
        self.begin = time.perf_counter()

    def on_train_batch_end(self, trainer: Any, module: Any, *args: Any) -> None:
        torch.cuda.synchronize()
        index = args[-1]
        if index >= self.warm:
            self.seconds.append(time.perf_counter() - self.begin)
        if index == self.warm - 1:
            self.profiler.stop()
            events = list(self.profiler.events() or ())
            names = Counter(event.name for event in events)
            on_device = [event for event in events if event.device_type == DeviceType.CUDA]
            self.kernels_ms = sum(event.time_range.elapsed_us() for event in on_device) / 1e3
            self.launches = {
                kind: sum(count for name, count in names.items() if name.startswith(kind))
                for kind in ("cudaGraphLaunch", "cudaLaunchKernel", "cuLaunchKernel")
            }


WARM, STEPS = 8, 15


EXPERTS = MoEConfig(
    num_experts=16,
    router_topk=2,
    ffn_hidden_size=1024,
    aux_loss_coeff=1e-2,
    capacity_factor=1.25,
    pad_to_capacity=True,
)


def timed(
    rank: int,
    world_size: int,
    graphs: str,
    compiled: bool,
    hidden: int,
    moe: MoEConfig | None,
    fp8: bool,
) -> dict[str, Any]:
    config = GPTConfig(
        vocab_size=8192,
        num_layers=8,
        hidden_size=hidden,
        ffn_hidden_size=4 * hidden,
        num_attention_heads=hidden // 64,
        num_query_groups=hidden // 256,
        max_position_embeddings=1024,
        moe=moe,
    )
    batch = {
        "tokens": torch.randint(0, 8192, (1, 1024)),
        "labels": torch.randint(0, 8192, (1, 1024)),
        "loss_mask": torch.ones(1, 1024),
    }
    run = Run(config=config, steps=WARM + STEPS, make_batch=lambda run, index: batch)
    clock = Clock(WARM)
    runtime = RuntimeConfig(cuda_graphs=graphs, compile_layers=compiled)  # type: ignore[arg-type]
    low = QuantizationConfig(keep_first=0, keep_last=0) if fp8 else None
    trainer = L.Trainer(
        strategy=MegatronStrategy(micro_batch_size=1, runtime=runtime, quantization=low),
        accelerator="gpu",
        devices=1,
        precision="bf16-mixed",
        max_steps=WARM + STEPS,
        gradient_clip_val=1.0,
        limit_val_batches=0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[clock],
    )
    torch.cuda.reset_peak_memory_stats()
    trainer.fit(
        GPTModel(config, OptimizerConfig(lr=1e-4), SchedulerConfig(lr_decay_style="constant")),
        Batches(run),
    )
    return {
        "ms": round(1e3 * statistics.median(clock.seconds), 2),
        "peak_gib": round(torch.cuda.max_memory_allocated() / 2**30, 2),
        "reserved_gib": round(torch.cuda.max_memory_reserved() / 2**30, 2),
        "kernels_ms": round(clock.kernels_ms, 2),
        **clock.launches,
    }


@functools.cache
def of(
    graphs: str, compiled: bool, hidden: int, moe: MoEConfig | None = None, fp8: bool = False
) -> dict[str, Any]:
    result = run_ranks_fresh(timed, 1, graphs, compiled, hidden, moe, fp8, timeout=280)[0]
    chosen = {"graphs": graphs, "compiled": compiled, "hidden": hidden, "fp8": fp8}
    chosen["experts"] = "none" if moe is None else "padded" if moe.pad_to_capacity else "dropless"
    print(json.dumps({**chosen, **result}), flush=True)
    return result


@pytest.mark.alone
@pytest.mark.parametrize("hidden", [1024, 2048])
def test_short_micro_batches_take_less_time(hidden: int) -> None:
    """8 layers, one sample of 1024 tokens a step. Whole steps: the head, the optimizer and
    Lightning run as ever.
    """
    eager, compiled = of("none", False, hidden), of("none", True, hidden)
    graphed, both = of("layers", False, hidden), of("layers", True, hidden)
    assert graphed["cudaGraphLaunch"] == both["cudaGraphLaunch"] == 16
    assert both["cudaLaunchKernel"] < compiled["cudaLaunchKernel"]
    assert graphed["cudaLaunchKernel"] < 0.5 * eager["cudaLaunchKernel"]
    if hidden == 1024:
        assert both["ms"] < eager["ms"] / 2
        assert both["ms"] < compiled["ms"] / 1.3


@pytest.mark.alone
@pytest.mark.parametrize("hidden", [1024, 2048])
def test_short_micro_batches_in_fp8_take_less_time(hidden: int) -> None:
    """The same in FP8, where the host has several launches for each product."""
    if problem := device_problem(torch.device("cuda")):
        pytest.skip(problem)
    compiled, both = of("none", True, hidden, fp8=True), of("layers", True, hidden, fp8=True)
    graphed = of("layers", False, hidden, fp8=True)
    assert graphed["cudaGraphLaunch"] == both["cudaGraphLaunch"] == 16
    launches = ("cudaLaunchKernel", "cuLaunchKernel")
    assert sum(both[kind] for kind in launches) < 0.5 * sum(compiled[kind] for kind in launches)
    assert max(both["ms"], graphed["ms"]) < compiled["ms"] / 2


@pytest.mark.alone
@pytest.mark.parametrize("experts", ["padded", "dropless"])
def test_layers_with_experts_take_less_time(experts: str) -> None:
    """The same with 16 experts, of which each token sees two."""
    dropless = replace(EXPERTS, capacity_factor=None, pad_to_capacity=False)
    moe = EXPERTS if experts == "padded" else dropless
    eager, compiled = of("none", False, 1024, moe), of("none", True, 1024, moe)
    graphed, both = of("layers", False, 1024, moe), of("layers", True, 1024, moe)
    assert graphed["cudaGraphLaunch"] == both["cudaGraphLaunch"] == 16
    assert graphed["cudaLaunchKernel"] < 0.3 * eager["cudaLaunchKernel"]
    assert graphed["ms"] < eager["ms"] / 2
    assert both["ms"] < compiled["ms"] / 2


def captured(rank: int, world_size: int) -> None:
    """Collectives as layers call them: started on NCCL's stream, and waited for."""
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    x = torch.ones(8, 4, device=device)

    def function() -> torch.Tensor:
        whole = torch.empty(8 * world_size, 4, device=device)
        gathering: Any = dist.all_gather_into_tensor(whole, x, async_op=True)
        beside = x * 2
        gathering.wait()
        own = torch.empty_like(x)
        reducing: Any = dist.reduce_scatter_tensor(own, whole * 3, async_op=True)
        reducing.wait()
        moved = torch.empty_like(own)
        dist.all_to_all_single(moved, own + beside)
        dist.all_reduce(moved)
        return moved

    wanted = function()  # communicators are made
    recorder = CudaRecorder(device)
    recorder.begin()
    replay, found = recorder.record(function, ())
    for factor in (1.0, 2.0, 5.0):
        x.fill_(factor)
        replay()
        torch.testing.assert_close(found, wanted * factor)
    recorder.close()
    dist.destroy_process_group()


@pytest.mark.parametrize("ranks", [1, 2])
def test_collectives_are_recorded(ranks: int) -> None:
    if torch.cuda.device_count() < ranks:
        pytest.skip(f"needs {ranks} CUDA devices")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    torch.multiprocessing.spawn(_captured, (ranks, port), nprocs=ranks)


def _captured(rank: int, world_size: int, port: int) -> None:
    place = dict(MASTER_ADDR="127.0.0.1", MASTER_PORT=port, RANK=rank, WORLD_SIZE=world_size)
    os.environ.update({key: str(value) for key, value in place.items()})
    os.environ["NCCL_GRAPH_REGISTER"] = "0"  # as the strategy does
    captured(rank, world_size)
