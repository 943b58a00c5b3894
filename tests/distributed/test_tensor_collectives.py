"""Each collective pair against the same function on one process, values and gradients."""

from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_lightning.parallel.axes import MeshAxis
from megatron_lightning.parallel.collectives import (
    all_reduce_,
    copy_to_axis,
    gather_dim,
    reduce_from_axis,
    reduce_scatter_dim,
    scatter_dim,
)
from megatron_lightning.parallel.mesh import ParallelMesh
from tests.harness import run_ranks

SHAPE = (4, 8, 12)


def _axis(size: int) -> MeshAxis:
    return ParallelMesh.build(device=torch.device("cpu"), tensor=size).tp


def _tensor(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def _part(x: Tensor, rank: int, size: int, dim: int) -> Tensor:
    return x.chunk(size, dim)[rank]


def _column_then_row(rank: int, size: int, dim: int, sequence: bool) -> None:
    """A column and a row split with the borders between: x W1^T -> tanh -> W2^T."""
    axis = _axis(size)
    whole = _tensor(0, *SHAPE).requires_grad_()
    w1, w2 = _tensor(1, 16, 12).requires_grad_(), _tensor(2, 12, 16).requires_grad_()
    weight = _tensor(3, *SHAPE)
    want = (whole @ w1.t()).tanh() @ w2.t()
    (want * weight).sum().backward()

    x = whole.detach()
    x = (_part(x, rank, size, dim) if sequence else x).clone().requires_grad_()
    a = _part(w1.detach(), rank, size, 0).clone().requires_grad_()
    b = _part(w2.detach(), rank, size, 1).clone().requires_grad_()
    inner = gather_dim(x, axis, dim) if sequence else copy_to_axis(x, axis)
    partial = (inner @ a.t()).tanh() @ b.t()
    got = reduce_scatter_dim(partial, axis, dim) if sequence else reduce_from_axis(partial, axis)
    (got * (_part(weight, rank, size, dim) if sequence else weight)).sum().backward()

    def own(t: Tensor) -> Tensor:
        return _part(t, rank, size, dim) if sequence else t

    torch.testing.assert_close(got, own(want), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(x.grad, own(whole.grad), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(a.grad, _part(w1.grad, rank, size, 0), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(b.grad, _part(w2.grad, rank, size, 1), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize(("dim", "sequence"), [(0, False), (0, True), (1, True), (-2, True)])
def test_column_then_row_equals_one_process(size: int, dim: int, sequence: bool) -> None:
    run_ranks(_column_then_row, size, dim, sequence)


def _scatter_then_gather(rank: int, size: int, dim: int) -> None:
    axis = _axis(size)
    x = _tensor(0, *SHAPE).requires_grad_()
    weight = _tensor(1, *SHAPE)
    part = scatter_dim(x, axis, dim)
    assert torch.equal(part, _part(x, rank, size, dim))
    whole = gather_dim(part * 2, axis, dim, backward="split")
    assert torch.equal(whole, x * 2)
    (whole * weight).sum().backward()
    assert torch.equal(x.grad, weight * 2)


@pytest.mark.parametrize("dim", [0, 1, 2, -1])
def test_scatter_then_gather_is_the_identity_with_its_gradient(dim: int) -> None:
    run_ranks(_scatter_then_gather, 2, dim)


def _bfloat16(rank: int, size: int) -> list[float]:
    axis = _axis(size)
    x = torch.full((4, 2), float(rank + 1), dtype=torch.bfloat16)
    summed = reduce_scatter_dim(x, axis, 0)
    assert summed.dtype == torch.bfloat16
    assert torch.equal(reduce_from_axis(x, axis), torch.full_like(x, 3.0))
    assert torch.equal(x, torch.full_like(x, float(rank + 1)))  # inputs are not written to
    largest = all_reduce_(torch.tensor([float(rank), -float(rank)]), axis, "max")
    return [*summed.flatten().tolist(), *largest.tolist()]


def test_bfloat16_sums_and_maximum() -> None:
    assert run_ranks(_bfloat16, 2) == [[3.0] * 4 + [1.0, 0.0]] * 2


def _indivisible(rank: int, size: int) -> str:
    with pytest.raises(ValueError, match="can't be split over tp=2") as raised:
        reduce_scatter_dim(torch.zeros(3, 2), _axis(size), 0)
    return str(raised.value)


def test_a_length_that_does_not_divide_is_explained() -> None:
    assert "multiple of 2" in run_ranks(_indivisible, 2)[0]


def _strided_gradient(rank: int, size: int) -> None:
    """Gradients may be expanded or transposed views; collectives need them contiguous."""
    axis = _axis(size)
    x = _tensor(rank, 4, 6).requires_grad_()
    gather_dim(x, axis, 1).sum().backward()  # an expanded gradient
    assert torch.equal(x.grad, torch.full_like(x, float(size)))
    x.grad = None
    copy_to_axis(x, axis).t().contiguous().t().sum().backward()
    assert torch.equal(x.grad, torch.full_like(x, float(size)))


def test_gradients_that_are_not_contiguous() -> None:
    run_ranks(_strided_gradient, 2)


def _in_a_region(rank: int, size: int) -> None:
    """Without a graph break, forwards and backwards."""
    axis = _axis(size)

    def through(x: Tensor) -> Tensor:
        """A part of the sequence, through each pair -> likewise."""
        y = reduce_scatter_dim(gather_dim(x.sin(), axis, 0) * (rank + 1), axis, 0)
        y = gather_dim(scatter_dim(y, axis, -1).cos(), axis, -1, backward="split")
        return reduce_from_axis(copy_to_axis(y * 3, axis).sin(), axis)

    torch._dynamo.reset()
    results: list[tuple[Any, Any]] = []
    for run in (through, torch.compile(through, fullgraph=True, backend="aot_eager")):
        x = _tensor(rank, *SHAPE).requires_grad_()
        y = run(x)
        y.square().sum().backward()
        results.append((y, x.grad))
    for want, got in zip(*results, strict=True):
        assert torch.equal(want, got)


def test_pairs_lie_in_one_compiled_graph() -> None:
    run_ranks(_in_a_region, 2, timeout=180)
