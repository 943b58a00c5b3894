"""The fused column-split product: what it keeps, frozen parts, autocast, recompute."""

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from megatron_lightning.config.plan import ParallelPlan, column, follows
from megatron_lightning.layers.linear import Linear
from megatron_lightning.parallel.axes import MeshAxis
from megatron_lightning.parallel.column import ColumnInput
from megatron_lightning.parallel.materialise import materialise
from megatron_lightning.parallel.mesh import ParallelMesh
from megatron_lightning.parallel.random import Normal
from megatron_lightning.parallel.tensor import apply_tensor_parallel
from tests.harness import run_ranks

PLAN = ParallelPlan(splits={"weight": column(), "bias": follows()})


def _axis(size: int) -> MeshAxis:
    return ParallelMesh.build(device=torch.device("cpu"), tensor=size).tp


def _linear(axis: MeshAxis, sequence_parallel: bool) -> Linear:
    linear = Linear(6, 8, bias=True, initial=Normal(1.0), device="meta")
    table = apply_tensor_parallel(linear, PLAN, axis, sequence_parallel=sequence_parallel)
    materialise(linear, table, seed=0, device="cpu")
    return linear


def _input(rank: int, sequence_parallel: bool) -> Tensor:
    x = torch.randn(8, 3, 6, generator=torch.Generator().manual_seed(0))
    return (x.chunk(2)[rank] if sequence_parallel else x).clone().requires_grad_()


def _kept(rank: int, size: int) -> None:
    """Under sequence parallelism only the own part of the input is kept for the backward pass."""
    linear, x = _linear(_axis(size), True), _input(rank, True)
    kept: list[int] = []
    with torch.autograd.graph.saved_tensors_hooks(
        lambda t: kept.append(t.numel()) or t, lambda t: t
    ):
        linear(x)
    assert sorted(kept) == [linear.weight.numel(), x.numel()]


def test_only_the_own_part_of_the_sequence_is_kept() -> None:
    run_ranks(_kept, 2)


def _apart(rank: int, size: int, sequence_parallel: bool, frozen: tuple[str, ...]) -> None:
    """Fused equals border and product one after the other."""
    axis = _axis(size)
    linear, x = _linear(axis, sequence_parallel), _input(rank, sequence_parallel)
    tensors = {"x": x, "weight": linear.weight, "bias": linear.bias}
    for name in frozen:
        tensors[name].requires_grad_(False)
    wanted = [tensor for tensor in tensors.values() if tensor.requires_grad]
    assert isinstance(linear.before, ColumnInput)
    border = linear.before
    y = linear(x)
    got = torch.autograd.grad(y.square().sum(), wanted)
    linear.before = lambda t: border(t)  # not known as a border that can be fused
    plain = linear(x)
    assert torch.equal(y, plain)
    want = torch.autograd.grad(plain.square().sum(), wanted)
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("frozen", [(), ("x",), ("weight",), ("weight", "bias"), ("x", "bias")])
def test_fused_equals_border_then_product(sequence_parallel: bool, frozen: tuple[str, ...]) -> None:
    run_ranks(_apart, 2, sequence_parallel, frozen)


def _autocast_and_recompute(rank: int, size: int) -> None:
    linear, x = _linear(_axis(size), True), _input(rank, True)
    with torch.autocast("cpu", torch.bfloat16):
        y = linear(x)
    assert y.dtype == torch.bfloat16
    (half,) = torch.autograd.grad(y.float().sum(), x)
    (want,) = torch.autograd.grad(linear(x).sum(), x)
    torch.testing.assert_close(half, want, rtol=0.05, atol=0.05)
    (again,) = torch.autograd.grad(checkpoint(linear, x, use_reentrant=False).sum(), x)
    assert torch.equal(again, want)


def test_autocast_and_recompute() -> None:
    run_ranks(_autocast_and_recompute, 2)
