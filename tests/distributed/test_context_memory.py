"""Heads exchanged through the peers' memory, where memory and signals are files that processes
share: numbers, and that nothing is written over before it has been read.
"""

import random
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_lightning.parallel.context import memory as context_memory
from megatron_lightning.parallel.context.attend import attend
from megatron_lightning.parallel.context.dense import CpuKernel
from megatron_lightning.parallel.context.exchange import announced, exchanged_attention
from megatron_lightning.parallel.context.slices import local_index
from megatron_lightning.parallel.mesh import ParallelMesh
from megatron_lightning.parallel.peers import symmetric
from tests.distributed.test_symmetric_turns import BYTES, _exchange
from tests.harness import run_ranks

LENGTH, SIZE, SCALE = 24, 8, 0.3


def _steps(rank: int, size: int, directory: str, writes: bool, batch: int) -> None:
    """Many layers one after the other, each rank now and then late."""
    axis = ParallelMesh.build(device=torch.device("cpu"), context=size).cp
    modules = symmetric, context_memory
    before = [dict(vars(module)) for module in modules]
    try:
        memory: Any = _exchange(axis, directory, writes, sums=False)
        memory.part_bytes = 4096
        vars(context_memory).update(torch=vars(symmetric)["torch"])
        ranks = announced(axis, memory)
        late = random.Random(rank)
        for number in range(12):
            generator = torch.Generator().manual_seed(number)
            heads = (2 * size, size, size, 2 * size)
            query, key, value, grad = (
                torch.randn(LENGTH, batch, n, SIZE, generator=generator) for n in heads
            )
            whole = [x.clone().requires_grad_() for x in (query, key, value)]
            rows: Any = [x.transpose(0, 1).flatten(0, 1) for x in whole]
            documents = (4, 20) if number % 2 else (LENGTH,)
            want = attend(*rows, documents * batch, kernel=CpuKernel(), scale=SCALE)
            want = want.unflatten(0, (batch, -1)).transpose(0, 1)
            want.backward(grad)
            own = local_index((LENGTH,), size, rank, contiguous=True)
            local: Any = [x[own].requires_grad_() for x in (query, key, value)]
            time.sleep(late.random() * 0.004)
            found = exchanged_attention(*local, ranks, 1, SCALE, 0, documents * batch)
            time.sleep(late.random() * 0.004)
            torch.testing.assert_close(found, want[own].flatten(2))
            found.backward(grad[own].flatten(2))
            for x, y in zip(local, whole, strict=True):
                assert y.grad is not None
                torch.testing.assert_close(x.grad, y.grad[own])
    finally:
        for module, names in zip(modules, before, strict=True):
            vars(module).update(names)


@pytest.mark.parametrize(
    ("size", "writes", "batch"), [(2, False, 1), (2, True, 2), (3, False, 1), (4, True, 1)]
)
def test_attention(size: int, writes: bool, batch: int, tmp_path: Path) -> None:
    for rank in range(size):
        (tmp_path / f"memory{rank}").write_bytes(bytes(BYTES))
        (tmp_path / f"pad{rank}").write_bytes(bytes(256))
    run_ranks(_steps, size, str(tmp_path), writes, batch)
