"""What passes between pipeline ranks: tuples of any dtype and shape, how long they are held, and
shapes that change where they may not.
"""

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from megatron_lightning.parallel.schedules.build import build_schedule
from megatron_lightning.runtime.pipeline_engine import PipelineEngine
from megatron_lightning.runtime.stage_messages import StageMessages
from tests.harness import RankError, run_ranks
from tests.pipeline_stages import Runner, Stage, axis_of, engine_run, here


class MixedRunner:
    """Sends many tensors of odd dtypes and shapes, and checks them at the other end."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.weight = nn.Parameter(torch.full((3,), 2.0, dtype=torch.bfloat16, device=here()))

    def tensors(self) -> tuple[Tensor, ...]:
        tensors = (
            torch.arange(6).view(2, 3).t(),  # not contiguous
            torch.tensor([True, False, True]),
            torch.tensor(3.5, dtype=torch.float64),  # no dims
            torch.empty(0, 4),
            torch.arange(5, dtype=torch.int16),
            torch.tensor([1 + 2j, 3 - 1j]),
            torch.linspace(-2, 2, 7).to(torch.float8_e4m3fn),
            *(torch.full((1,) * i, float(i)) for i in range(1, 6)),
        )
        return tuple(tensor.to(here()) for tensor in tensors)

    def forward(self, micro_batch, chunk, received):
        if self.rank == 0:
            x = self.weight * (micro_batch + 1)
            return (*self.tensors(), x, x.float().sum(), x)
        *plain, x, total, again = received
        for got, want in zip(plain, self.tensors(), strict=True):
            assert got.dtype is want.dtype
            assert got.shape == want.shape
            assert torch.equal(
                got.view(-1).to(torch.complex64), want.reshape(-1).to(torch.complex64)
            )
            assert not got.requires_grad
        assert x.requires_grad
        assert total.requires_grad
        return (x.float() * again.float()).sum()  # total is not used: its gradient is zero


def check_mixed(rank, world_size):
    engine = PipelineEngine(axis_of(rank, world_size), 1, here())
    runner = MixedRunner(rank)
    actions = build_schedule("1f1b", pipeline_size=2, num_microbatches=3)[rank]
    for _ in range(2):
        engine.run(actions, runner, signatures=["same"] * 3, backward=True)
    if rank == 0:  # d/dw of sum over m of (w (m+1))^2 = 2 w 14, two runs
        assert torch.equal(runner.weight.grad, torch.full_like(runner.weight, 2 * 4.0 * 14))


def test_tuples_of_any_dtype_and_shape():
    run_ranks(check_mixed, 2)


@pytest.mark.gpu
def test_tuples_of_any_dtype_and_shape_over_nccl():
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    run_ranks(check_mixed, 2, backend="nccl")


class MemoryRunner:
    """Counts how many outputs have memory. The stage ends in an add, which saves nothing."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.bias = nn.Parameter(torch.zeros(16))
        self.storages: list[StorageWeakRef] = []
        self.peak = 0

    def forward(self, micro_batch, chunk, received):
        self.peak = max(self.peak, sum(not storage.expired() for storage in self.storages))
        x = torch.ones(16) if received is None else received[0]
        output = x + self.bias
        if self.rank == 1:
            return output.sum()
        self.storages.append(StorageWeakRef(output.untyped_storage()))
        return output


def check_memory(rank, world_size):
    """All forwards come first, yet few outputs stay: only those that may not have left."""
    engine = PipelineEngine(axis_of(rank, world_size), 1, here())
    runner = MemoryRunner(rank)
    actions = build_schedule("gpipe", pipeline_size=2, num_microbatches=32)[rank]
    engine.run(actions, runner, signatures=[0] * 32, backward=True)
    assert torch.equal(runner.bias.grad, torch.full((16,), 32.0))
    return runner.peak


def test_sent_outputs_are_freed():
    assert 1 <= run_ranks(check_memory, 2)[0] <= StageMessages.max_sends_under_way + 1


def check_changed_output(rank, world_size):
    engine = PipelineEngine(axis_of(rank, world_size), 1, here())
    engine_run(rank, world_size, engine, "1f1b", 1, [4])
    runner = Runner({rank: Stage(rank)}, engine.placement, rank, [5])
    actions = build_schedule("1f1b", pipeline_size=2, num_microbatches=1)[rank]
    engine.run(actions, runner, signatures=[4], backward=True)


def test_another_shape_for_the_same_signature_is_an_error():
    with pytest.raises(RankError, match="earlier one of the same signature 4"):
        run_ranks(check_changed_output, 2, timeout=20)
