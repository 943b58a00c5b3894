"""Gradient buckets on gloo ranks against the sum in one process."""

import pytest
import torch
from torch import Tensor, nn

from megatron_lightning.config.plan import (
    Gradient,
    ParameterInfo,
    Split,
    replicated,
    row,
)
from megatron_lightning.parallel.data import GradientBuckets
from megatron_lightning.parallel.mesh import ParallelMesh
from tests.harness import run_ranks

CPU = torch.device("cpu")
MICRO_BATCHES = 3


class Branches(nn.Module):
    """Two layers, a branch that only some samples take, and a parameter that nothing uses."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first = nn.Linear(6, 9)
        self.branch = nn.Linear(9, 9)
        self.last = nn.Linear(9, 4)
        self.unused = nn.Parameter(torch.ones(5))

    def forward(self, x: Tensor, *, branch: bool) -> Tensor:
        hidden = torch.tanh(self.first(x))
        return self.last(self.branch(hidden) if branch else hidden)


def _info(name: str, shape: tuple[int, ...], split: Split, **options) -> ParameterInfo:
    zeros = (0,) * len(shape)
    return ParameterInfo(
        name=name, global_shape=shape, offsets=zeros, sizes=shape, split=split, **options
    )


def _micro_batches(rank: int) -> list[tuple[Tensor, Tensor, bool]]:
    """Inputs, per-sample weights (unequal over ranks, some zero) and branch of each micro-batch."""
    generator = torch.Generator().manual_seed(100 + rank)
    found = []
    for index in range(MICRO_BATCHES):
        x = torch.randn(2 + rank, 6, generator=generator)
        weights = (torch.rand(2 + rank, generator=generator) > 0.3).float() * (rank + 1)
        found.append((x, weights, rank == 0 and index == 1))  # only rank 0 takes the branch
    return found


def _loss_sum(model: nn.Module, x: Tensor, weights: Tensor, branch: bool) -> Tensor:
    x = x.to(next(model.parameters()).dtype)
    return (model(x, branch=branch).float().square().sum(-1) * weights).sum()


def _rank_gradients(
    rank: int,
    world_size: int,
    overlap: bool,
    bucket_size: int,
    dtype: torch.dtype,
    device: str = "cpu",
) -> dict[str, Tensor | None]:
    mesh = ParallelMesh.build(device=torch.device(device))
    model = Branches().to(device=device, dtype=dtype)
    named = dict(model.named_parameters())
    table = {name: _info(name, tuple(p.shape), replicated()) for name, p in named.items()}
    buckets = GradientBuckets(
        named, table, mesh, sequence_parallel=False, bucket_size=bucket_size, overlap=overlap
    )
    batches = [(x.to(device), w.to(device), branch) for x, w, branch in _micro_batches(rank)]
    for _ in range(2):  # twice: a window leaves nothing behind
        buckets.reset()
        weight = torch.zeros((), device=device)
        for index, (x, weights, branch) in enumerate(batches):
            if index == len(batches) - 1:
                buckets.arm()
            _loss_sum(model, x, weights, branch).backward()
            weight += weights.sum()
        torch.distributed.all_reduce(weight)
        buckets.finish(weight)
        buckets.publish()
    return {name: None if p.grad is None else p.grad.cpu().clone() for name, p in named.items()}


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("bucket_size", [1, 64, 10_000])
def test_gradients_equal_the_sum_in_one_process(
    world_size: int, overlap: bool, bucket_size: int
) -> None:
    results = run_ranks(_rank_gradients, world_size, overlap, bucket_size, torch.float32)
    model = Branches()
    weight = torch.zeros(())
    for rank in range(world_size):
        for x, weights, branch in _micro_batches(rank):
            _loss_sum(model, x, weights, branch).backward()
            weight += weights.sum()
    for name, p in model.named_parameters():
        for rank, result in enumerate(results):
            if name == "unused":
                assert result[name] is None
                continue
            torch.testing.assert_close(result[name], p.grad / weight, rtol=1e-5, atol=1e-6)
            assert torch.equal(result[name], results[0][name]), (name, rank)


@pytest.mark.gpu
@pytest.mark.parametrize("overlap", [True, False])
def test_gradients_equal_one_process_under_nccl(overlap: bool) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs 2 GPUs")
    results = run_ranks(_rank_gradients, 2, overlap, 64, torch.float32, "cuda", backend="nccl")
    wanted = run_ranks(_rank_gradients, 2, overlap, 64, torch.float32)
    for name, gradient in wanted[0].items():
        for result in results:
            if gradient is None:
                assert result[name] is None
            else:
                torch.testing.assert_close(result[name], gradient, rtol=1e-5, atol=1e-6)


def test_bfloat16_parameters_are_reduced_in_float32() -> None:
    results = run_ranks(_rank_gradients, 2, True, 64, torch.bfloat16)
    model = Branches().bfloat16()
    sums = {name: torch.zeros(p.shape) for name, p in model.named_parameters()}
    weight = torch.zeros(())
    for rank in range(2):
        for x, weights, branch in _micro_batches(rank):
            model.zero_grad()
            _loss_sum(model, x, weights, branch).backward()
            for name, p in model.named_parameters():
                sums[name] += 0 if p.grad is None else p.grad.float()
            weight += weights.sum()
    for name, total in sums.items():
        if name != "unused":
            assert results[1][name].dtype is torch.float32
            torch.testing.assert_close(results[1][name], total / weight, rtol=1e-6, atol=1e-7)


def _launch_order(rank: int, world_size: int) -> list[int]:
    """Rank 1 gets its gradients in another order, and one of them never."""
    mesh = ParallelMesh.build(device=CPU)
    parameters = {name: nn.Parameter(torch.zeros(4)) for name in "abcd"}
    table = {name: _info(name, (4,), replicated()) for name in parameters}
    buckets = GradientBuckets(parameters, table, mesh, sequence_parallel=False, bucket_size=1)
    counts = []
    buckets.reset()
    buckets.arm()
    for name in "dcba" if rank == 0 else "abd":
        (parameters[name] * (rank + 1)).sum().backward()
        counts.append(buckets.num_launched)
    buckets.finish(1)
    for name in "abd":
        assert torch.equal(buckets.main_grad(name), torch.full((4,), 3.0)), name
    assert torch.equal(buckets.main_grad("c"), torch.ones(4))
    assert sorted(buckets.gradients()) == list("abcd")
    return counts


def test_buckets_are_reduced_in_one_order_on_all_ranks() -> None:
    assert run_ranks(_launch_order, 2) == [[1, 2, 3, 4], [0, 0, 1]]


def _tensor_parallel(rank: int, world_size: int, sequence_parallel: bool) -> dict[str, Tensor]:
    mesh = ParallelMesh.build(device=CPU, tensor=2)  # 4 ranks: tp 2 x dp 2
    splits = {
        "whole": replicated(),
        "sequence": replicated(Gradient.SEQUENCE),
        "partial": replicated(Gradient.PARTIAL),
        "split": row(),
    }
    parameters = {name: nn.Parameter(torch.zeros(2, 3)) for name in splits}
    table = {name: _info(name, (2, 3), split) for name, split in splits.items()}
    buckets = GradientBuckets(
        parameters, table, mesh, sequence_parallel=sequence_parallel, bucket_size=8
    )
    buckets.reset()
    buckets.arm()
    sum((p * 10.0**rank).sum() for p in parameters.values()).backward()
    buckets.finish(2)
    return {name: buckets.main_grad(name).clone() for name in parameters}


@pytest.mark.parametrize("sequence_parallel", [True, False])
def test_partial_gradients_are_summed_over_the_tensor_axis(sequence_parallel: bool) -> None:
    results = run_ranks(_tensor_parallel, 4, sequence_parallel)
    replicas = {0: 101.0, 1: 1010.0, 2: 101.0, 3: 1010.0}  # tp neighbours are (0, 1) and (2, 3)
    for rank, result in enumerate(results):
        sequence = 1111.0 if sequence_parallel else replicas[rank]
        wanted = {"whole": replicas[rank], "sequence": sequence, "split": replicas[rank]}
        for name, value in {**wanted, "partial": 1111.0}.items():
            assert torch.equal(result[name], torch.full((2, 3), value / 2)), (rank, name)


def _tied(rank: int, world_size: int, used: str) -> dict[str, Tensor | None]:
    """4 ranks: pp 2 x dp 2. The embedding of the first stage is also the head of the last."""
    mesh = ParallelMesh.build(device=CPU, pipeline=2)
    last = mesh.pp.is_last
    parameters = {
        "word_embeddings.weight": nn.Parameter(torch.zeros(3, 2)),
        f"layers.{mesh.pp.rank}.weight": nn.Parameter(torch.zeros(2)),
    }
    table = {name: _info(name, tuple(p.shape), replicated()) for name, p in parameters.items()}
    tied = "word_embeddings.weight"
    table[tied] = _info(tied, (3, 2), replicated(), tied_copy=last)
    buckets = GradientBuckets(parameters, table, mesh, sequence_parallel=False, tied=[tied])
    buckets.reset()
    buckets.arm()
    loss = parameters[f"layers.{mesh.pp.rank}.weight"].sum()
    if used == "both" or (used == "head" and last):
        loss = loss + (parameters[tied] * 10.0**rank).sum()
    loss.backward()
    buckets.finish(1)
    buckets.publish()
    return {name: p.grad for name, p in parameters.items()}


@pytest.mark.parametrize(("used", "value"), [("both", 1111.0), ("head", 1100.0), ("none", None)])
def test_tied_copies_hold_the_sum_of_both_stages(used: str, value: float | None) -> None:
    for rank, result in enumerate(run_ranks(_tied, 4, used)):
        grad = result.pop("word_embeddings.weight")
        if value is None:
            assert grad is None
        else:
            assert torch.equal(grad, torch.full((3, 2), value))
        assert torch.equal(result[f"layers.{rank // 2}.weight"], torch.full((2,), 2.0))


def _context_parallel(rank: int, world_size: int) -> tuple[int, float]:
    mesh = ParallelMesh.build(device=CPU, context=2)
    parameter = nn.Parameter(torch.zeros(1))
    table = {"w": _info("w", (1,), replicated())}
    assert mesh.cp.group is not mesh.dp_cp.group
    buckets = GradientBuckets({"w": parameter}, table, mesh, sequence_parallel=False)
    buckets.reset()
    buckets.arm()
    (parameter * (rank + 1)).sum().backward()
    during = buckets.num_launched
    buckets.finish(1)
    return during, buckets.main_grad("w").item()


def test_overlap_beside_context_parallel_attention() -> None:
    # Also with dp = 1, where they span the same ranks: attention has groups of its own.
    assert run_ranks(_context_parallel, 2) == [(1, 3.0)] * 2
    assert run_ranks(_context_parallel, 4) == [(1, 10.0)] * 4


def _experts(rank: int, world_size: int) -> tuple[float, float]:
    """Ep 2 x edp 2: expert parameters are summed over edp, dense ones over all ranks."""
    mesh = ParallelMesh.build(device=CPU, expert=2)
    parameters = {name: nn.Parameter(torch.zeros(1)) for name in ("dense", "expert")}
    table = {"dense": _info("dense", (1,), replicated())}
    table["expert"] = _info("expert", (1,), replicated(), expert=True)
    buckets = GradientBuckets(parameters, table, mesh, sequence_parallel=False)
    buckets.reset()
    sum((p * 10.0**rank).sum() for p in parameters.values()).backward()
    buckets.finish(1)
    return buckets.main_grad("dense").item(), buckets.main_grad("expert").item()


def test_expert_gradients_are_summed_over_their_replicas() -> None:
    assert run_ranks(_experts, 4) == [
        (1111.0, 101.0),
        (1111.0, 1010.0),
        (1111.0, 101.0),
        (1111.0, 1010.0),
    ]
