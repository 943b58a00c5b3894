"""Gradient buckets summed through the peers' memory, where memory and signals are files that
processes share and CUDA's streams do everything at once: see `test_symmetric_turns`.
"""

import contextlib
import random
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from megatron_lightning.config import DataParallelConfig
from megatron_lightning.config.data_parallel_rules import data_parallel_problems
from megatron_lightning.config.parallel import ParallelConfig
from megatron_lightning.config.plan import ParameterInfo, replicated
from megatron_lightning.parallel import peer_reduction, symmetric
from megatron_lightning.parallel.data import GradientBuckets
from megatron_lightning.parallel.mesh import MeshAxis, ParallelMesh
from megatron_lightning.parallel.peer_reduction import PeerReduction
from tests.distributed.test_symmetric_turns import BYTES, Stream, _exchange
from tests.harness import run_ranks

SHAPES = {"a": (40, 5), "b": (7,), "c": (30, 30), "d": (3, 4, 5), "e": (64, 3)}
WINDOWS = 6


def _stand_in() -> Any:
    cuda = SimpleNamespace(
        Stream=Stream,
        Event=Stream,
        current_stream=lambda device=None: Stream(),
        stream=lambda stream: contextlib.nullcontext(),
    )
    return SimpleNamespace(**{**vars(torch), "cuda": cuda})


def _buckets(mesh: ParallelMesh, peers: Any = None) -> GradientBuckets:
    named = {name: nn.Parameter(torch.zeros(shape)) for name, shape in SHAPES.items()}
    table = {
        name: ParameterInfo(
            name=name,
            global_shape=tuple(p.shape),
            offsets=(0,) * p.dim(),
            sizes=tuple(p.shape),
            split=replicated(),
        )
        for name, p in named.items()
    }
    return GradientBuckets(
        named, table, mesh, sequence_parallel=False, sharded=True, bucket_size=200, peers=peers
    )


def _windows(rank: int, size: int, directory: str) -> list[int]:
    mesh = ParallelMesh.build(device=torch.device("cpu"))
    modules: list[Any] = [vars(symmetric), vars(peer_reduction)]
    kept = [dict(module) for module in modules]
    asked: list[int] = []
    try:
        exchange = _exchange(mesh.axis("dp_shard"), directory, writes=False)
        exchange.part_bytes = 4096
        modules[1]["torch"] = _stand_in()

        def peers(axis: MeshAxis) -> PeerReduction:
            asked.append(axis.size)
            return PeerReduction(exchange)

        ours, plain = _buckets(mesh, peers), _buckets(mesh)
        assert len(ours.buckets) > 2
        late = random.Random(rank)
        for window in range(WINDOWS):
            generator = torch.Generator().manual_seed(10 * window + rank)
            for buckets in (ours, plain):
                buckets.reset()
                buckets.arm()
            for name in reversed(SHAPES):
                grad = torch.randn(SHAPES[name], generator=generator)
                if name == "b" and window == 2 and rank == 0:
                    continue  # nothing came here
                for buckets in (ours, plain):
                    if buckets is ours:
                        time.sleep(late.random() * 0.003)
                    buckets.add(name, grad)
                    buckets.arrived(name)
            for buckets in (ours, plain):
                buckets.launch_rest()
            for buckets in (ours, plain):
                buckets.sum()
            found, wanted = ours.gradients(), plain.gradients()
            assert found.keys() == wanted.keys()
            for name, grad in found.items():
                if size == 2:  # two numbers have one sum
                    assert torch.equal(grad, wanted[name])
                torch.testing.assert_close(grad, wanted[name])
    finally:
        for module, before in zip(modules, kept, strict=True):
            module.update(before)
    return asked


@pytest.mark.parametrize("size", [2, 3])
def test_sums_of_buckets(size: int, tmp_path: Path) -> None:
    for rank in range(size):
        (tmp_path / f"memory{rank}").write_bytes(bytes(BYTES))
        (tmp_path / f"pad{rank}").write_bytes(bytes(256))
    assert run_ranks(_windows, size, str(tmp_path)) == [[size]] * size


def test_without_gpus_there_are_collectives() -> None:
    axis = ParallelMesh.single().axis("dp_shard")
    assert peer_reduction.peer_reduction(axis, torch.device("cpu"), 10.0) is None


def test_needs_a_sharded_optimizer() -> None:
    config = ParallelConfig(data_parallel=DataParallelConfig(peer_memory=True))
    assert "data_parallel.peer_memory=True" in data_parallel_problems(config)[0]
    sharded = DataParallelConfig(peer_memory=True, sharding="optimizer")
    assert not data_parallel_problems(ParallelConfig(data_parallel=sharded))
