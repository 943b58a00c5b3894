"""Gradient buckets summed through the peers' memory, by two ranks that share one GPU.

They take turns on it, so that this says nothing of speed; `test_hidden_collectives.py` and
`test_distributed_optimizer_nccl.py` run it on two.
"""

import os

import pytest
import torch
from torch import nn

from megatron_lightning.config.plan import ParameterInfo, replicated
from megatron_lightning.parallel.data import GradientBuckets
from megatron_lightning.parallel.exchange import release_exchanges
from megatron_lightning.parallel.mesh import MeshAxis, ParallelMesh
from megatron_lightning.parallel.peer_reduction import PeerReduction, peer_reduction
from tests.harness import run_ranks

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif("not torch.cuda.is_available()", reason="needs a CUDA device"),
]

SHAPES = {f"p{number}": (300 + number, 1000) for number in range(9)}
WINDOWS = 5


def gradient(name: str, window: int, rank: int) -> torch.Tensor:
    """Whole numbers, so that no order of summation matters."""
    generator = torch.Generator().manual_seed(1000 * window + 100 * rank + int(name[1:]))
    return torch.randint(-64, 65, SHAPES[name], generator=generator).float()


def windows(rank: int, world_size: int) -> int:
    """Compare all windows; returns the number of buckets."""
    os.environ["TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"] = "1"
    device = torch.device("cuda", 0)
    torch.cuda.set_device(device)
    mesh = ParallelMesh.build(device=device)

    def peers(axis: MeshAxis) -> PeerReduction:
        found = peer_reduction(axis, device, 60.0)
        assert found is not None, "memory could not be shared"
        return found

    named = {name: nn.Parameter(torch.zeros(s, device=device)) for name, s in SHAPES.items()}
    table = {
        name: ParameterInfo(name=name, global_shape=s, offsets=(0, 0), sizes=s, split=replicated())
        for name, s in SHAPES.items()
    }
    buckets = GradientBuckets(
        named,
        table,
        mesh,
        sequence_parallel=False,
        sharded=True,
        bucket_size=500_000,
        peers=peers,
    )
    for window in range(WINDOWS):
        buckets.reset()
        buckets.arm()
        for name in reversed(SHAPES):
            if (window + rank) % 2:
                torch.cuda._sleep(3_000_000)  # late
            buckets.add(name, gradient(name, window, rank).to(device))
            buckets.arrived(name)
        buckets.launch_rest()
        buckets.sum()
        for name, found in buckets.gradients().items():
            parts = [gradient(name, window, r) for r in range(world_size)]
            whole = torch.stack(parts).sum(0).flatten()
            start, stop = buckets.slots[name].own_range
            assert torch.equal(found.cpu(), whole[start:stop]), (name, window)
    torch.cuda.synchronize()
    release_exchanges()
    return len(buckets.buckets)


def test_sums_of_buckets() -> None:
    assert run_ranks(windows, 2, timeout=150)[0] > 3
