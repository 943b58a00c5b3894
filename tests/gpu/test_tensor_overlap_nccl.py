"""Tensor parallelism whose products hide its collectives, on two GPUs: the same training, and what
it saves at the sizes of shape (a).

`pytest -m gpu -s tests/gpu/test_tensor_overlap_nccl.py` prints milliseconds of an MLP's two layers.
"""

import functools
import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatron_lightning.config import QuantizationConfig, RuntimeConfig
from megatron_lightning.config.plan import ParallelPlan, column, row
from megatron_lightning.layers.linear import Linear
from megatron_lightning.parallel.axes import MeshAxis
from megatron_lightning.parallel.materialise import materialise
from megatron_lightning.parallel.mesh import ParallelMesh
from megatron_lightning.parallel.overlap import choice as overlap_choice
from megatron_lightning.parallel.overlap.choice import choose_overlap
from megatron_lightning.parallel.overlap.layers import Overlap
from megatron_lightning.parallel.peers.exchange import (
    MessageExchange,
    abandon_exchanges,
    release_exchanges,
)
from megatron_lightning.parallel.peers.symmetric import SymmetricExchange
from megatron_lightning.parallel.random import Normal
from megatron_lightning.parallel.tensor import apply_tensor_parallel
from tests.harness import run_ranks, run_ranks_fresh
from tests.layout_runs import Run, assert_same_training, tiny_config, train

pytestmark = pytest.mark.gpu
two_gpus = pytest.mark.skipif("torch.cuda.device_count() < 2", reason="needs two CUDA devices")

TOKENS, HIDDEN, WIDTH = 16_384, 2048, 16_384
PLAN = ParallelPlan(splits={"first.weight": column(), "second.weight": row()})


def run_of(overlap: bool | None, compiled: bool = False) -> Run:
    runtime = RuntimeConfig(overlap_tensor_parallel=overlap, compile_layers=compiled)
    layout: dict[str, Any] = dict(tensor_parallel_size=2, sequence_parallel=True, runtime=runtime)
    trainer = dict(accelerator="gpu", precision="bf16-mixed")
    return Run(config=tiny_config(), layout=layout, trainer=trainer)


@functools.cache
def single() -> dict[str, Any]:
    trainer = dict(accelerator="gpu", precision="bf16-mixed")
    return run_ranks_fresh(train, 1, Run(config=tiny_config(), trainer=trainer))[0]


def trained(rank: int, world_size: int, run: Run) -> Any:
    """`train` with the smallest parts moved in this way too."""
    overlap_choice.LEAST_BYTES_ON_GPU = 0
    turns, begin = [0], SymmetricExchange.begin

    def counted(exchange: SymmetricExchange, *args: Any) -> Any:
        turns[0] += 1
        return begin(exchange, *args)

    SymmetricExchange.begin = counted  # type: ignore[method-assign]
    found = train(rank, world_size, run)
    return found | {"by memory": turns[0] > 1}  # one turn is the trial


@two_gpus
@pytest.mark.parametrize(
    ("overlap", "compiled"), [(True, False), (True, True), (False, False), (False, True)]
)
def test_training_equals_one_gpu(overlap: bool, compiled: bool) -> None:
    ranks = run_ranks_fresh(trained, 2, run_of(overlap, compiled), timeout=240)
    assert all(rank["by memory"] is overlap for rank in ranks)
    assert_same_training(ranks, single(), torch.bfloat16)


@two_gpus
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize(
    ("recipe", "kernels"),
    [
        ("fp8_tensorwise", "torch"),
        ("fp8_rowwise", "torch"),
        ("fp8_tensorwise", "transformer_engine"),
    ],
)
def test_fp8_trains_the_same_by_parts(recipe: str, kernels: str, compiled: bool) -> None:
    """Through the peers' memory, parts of inputs in eight bits, and by collectives."""
    if torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("no FP8 products")
    if kernels == "transformer_engine":
        pytest.importorskip("transformer_engine")
    losses = []
    for overlap in (True, False):
        run = run_of(overlap, compiled)
        quantization = QuantizationConfig(
            recipe=recipe,  # type: ignore[arg-type]
            kernels=kernels,  # type: ignore[arg-type]
            keep_first=0,
            keep_last=0,
        )
        config = tiny_config(hidden_size=64, ffn_hidden_size=96)
        layout = {**run.layout, "quantization": quantization}
        run = replace(run, config=config, layout=layout, steps=4)
        ranks = run_ranks_fresh(trained, 2, run, timeout=240)
        assert all(rank["by memory"] is overlap for rank in ranks)
        losses.append(ranks[0]["losses"])
    assert losses[0] == pytest.approx(losses[1], rel=1e-3)


SCRIPT = """
import faulthandler

from tests.gpu.test_tensor_overlap_nccl import run_of
from tests.layout_runs import train

if __name__ == "__main__":
    train(0, 2, run_of(None))
    print("trained", flush=True)
    faulthandler.dump_traceback_later(30, exit=True)
"""


@two_gpus
def test_ranks_end_by_themselves(tmp_path: Path) -> None:
    """Memory that the ranks share is given back before they go."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, str(script)],
        cwd=root,
        env=os.environ | {"PYTHONPATH": str(root)},
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
    )
    said = done.stdout + done.stderr
    assert done.returncode == 0, said
    assert "Timeout" not in said, said
    assert said.count("trained") == 2, said


class Pair(nn.Module):
    """The two linear layers of an MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.first = Linear(HIDDEN, WIDTH, bias=False, initial=Normal(0.02), device="meta")
        self.second = Linear(WIDTH, HIDDEN, bias=False, initial=Normal(0.02), device="meta")

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x))


def timed(rank: int, world_size: int) -> dict[str, Any]:
    """Milliseconds of forward and backward by each form, and how far each is from the plain one."""
    device = torch.device("cuda", rank)
    axis = ParallelMesh.build(device=device, tensor=world_size).tp
    chosen = choose_overlap(axis, device, wanted=None, timeout_seconds=60)
    forms: dict[str, Overlap | None] = {"plain": None}
    if chosen is not None:
        assert isinstance(chosen.exchange, SymmetricExchange)
        forms["peer memory"] = chosen
    times, results = {}, {}
    messages = MessageExchange(axis)
    for name in (*forms, "messages"):
        overlap = Overlap.of(messages) if name == "messages" else forms[name]
        pair = Pair()
        table = apply_tensor_parallel(pair, PLAN, axis, sequence_parallel=True, overlap=overlap)
        materialise(pair, table, seed=0, device=device, dtype=torch.bfloat16)
        generator = torch.Generator(device).manual_seed(rank)
        shape = (TOKENS // 4 // world_size, 4, HIDDEN)
        x = torch.randn(shape, device=device, dtype=torch.bfloat16, generator=generator)
        x.requires_grad_()
        parameters = list(pair.parameters())
        rounds = []
        for _ in range(20):
            dist.barrier()
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            y = pair(x)
            found = torch.autograd.grad(y, [x, *parameters], y.detach())
            end.record()
            torch.cuda.synchronize()
            rounds.append(begin.elapsed_time(end))
        times[name] = median(rounds[5:])
        results[name] = [y.detach(), *found]
    far = {
        name: max(
            float((a.float() - b.float()).norm() / b.float().norm())
            for a, b in zip(values, results["plain"], strict=True)
        )
        for name, values in results.items()
    }
    return {"times": times, "far": far, "chosen": chosen is not None}


@pytest.mark.alone
@two_gpus
def test_time_of_two_layers() -> None:
    found = run_ranks(timed, 2, timeout=200, backend="nccl")[0]
    print(f"\nMLP of {TOKENS} tokens, {HIDDEN} to {WIDTH}, two GPUs, forward and backward:")
    for name, taken in found["times"].items():
        print(f"  {name:12} {taken:6.2f} ms, {found['far'][name]:.1e} from plain")
    assert max(found["far"].values()) < 5e-3  # sums of two numbers rounded to bfloat16
    if not found["chosen"]:
        pytest.skip("GPUs that can't write to each other's memory: nothing is overlapped")
    assert found["times"]["peer memory"] < found["times"]["plain"]


def abandoned(rank: int, world_size: int) -> float:
    """Seconds that this device waits for a signal that nobody gives, once it is told not to."""
    torch.cuda.set_device(0)
    store = dist.HashStore()
    device = torch.device("cuda", 0)
    dist.init_process_group("nccl", store=store, rank=0, world_size=1, device_id=device)
    axis = MeshAxis(name="tp", group=dist.group.WORLD)
    exchange = SymmetricExchange(axis, device, timeout_seconds=60)
    exchange.begin(8, 8, torch.float32).end()
    torch.cuda.synchronize()
    for channel in (0, 0, 1, 3):
        exchange.handle.wait_signal(0, channel, 60_000)
    time.sleep(0.2)
    assert not torch.cuda.current_stream().query()
    begin = time.perf_counter()
    abandon_exchanges()
    torch.cuda.synchronize()
    taken = time.perf_counter() - begin
    release_exchanges()
    dist.destroy_process_group()
    return taken


@pytest.mark.skipif("not torch.cuda.is_available()", reason="needs a CUDA device")
def test_a_rank_that_ends_alone_waits_for_no_signal() -> None:
    (taken,) = run_ranks_fresh(abandoned, 1)
    assert taken < 5
