"""Block kernels against autograd, and partial attentions merged over the ranks of a ring that is
played in one process.
"""

import pytest
import torch
from torch import Tensor

from megatron_lightning.parallel.context.attend import (
    Merged,
    attend,
    backward_calls,
    forward_calls,
    zeros_like,
)
from megatron_lightning.parallel.context.cudnn_attention import is_regular
from megatron_lightning.parallel.context.dense import CpuKernel, MathKernel, band_mask
from megatron_lightning.parallel.context.kernels import BlockKernel, choose_kernel
from megatron_lightning.parallel.context.plan import CAUSAL, FULL, Band, Span, ring_calls
from megatron_lightning.parallel.context.slices import local_index

KERNELS = {"math": MathKernel, "cpu": CpuKernel}
HEADS = {"multi_head": (4, 4), "grouped": (4, 2), "multi_query": (4, 1)}
SCALE = 0.3


def tensors(
    num_queries: int,
    num_keys: int,
    heads: int,
    groups: int,
    dim: int,
    v_dim: int,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(7)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

    return (
        normal(num_queries, heads, dim),
        normal(num_keys, groups, dim),
        normal(num_keys, groups, v_dim),
        normal(num_queries, heads, v_dim),
    )


def oracle(query: Tensor, key: Tensor, value: Tensor, grad: Tensor, seen: Tensor) -> list[Tensor]:
    """Output, log-sum-exp and gradients by autograd, in float64, from a mask of all pairs."""
    q, k, v = (x.detach().double().requires_grad_() for x in (query, key, value))
    repeats = query.shape[1] // key.shape[1]
    keys, values = k.repeat_interleave(repeats, 1), v.repeat_interleave(repeats, 1)
    scores = torch.einsum("qnd,knd->nqk", q, keys) * SCALE
    scores = scores.masked_fill(~seen, -torch.inf)
    output = torch.einsum("nqk,knd->qnd", scores.softmax(-1), values)
    output.backward(grad.double())
    return [output.detach(), scores.logsumexp(-1).detach(), q.grad, k.grad, v.grad]


def assert_close(got: Tensor, want: Tensor, dtype: torch.dtype) -> None:
    limit = 2e-5 if dtype == torch.float32 else 5e-2
    error = (got.double() - want).norm() / want.norm()
    assert error < limit, float(error)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("v_dim", [16, 8, 24])
@pytest.mark.parametrize(
    ("lengths", "band"),
    [
        ([(12, 12)], CAUSAL),
        ([(12, 12), (12, 12)], CAUSAL),
        ([(8, 20)], FULL),
        ([(8, 20)], CAUSAL),
        ([(8, 20), (12, 12), (4, 9)], CAUSAL),
        ([(8, 20), (6, 7)], Band(3, 0)),
        ([(6, 10)], Band(2, None)),
    ],
)
def test_kernel(
    kernel: str,
    heads: str,
    dtype: torch.dtype,
    v_dim: int,
    lengths: list[tuple[int, int]],
    band: Band,
) -> None:
    queries, keys = _spans([q for q, _ in lengths]), _spans([k for _, k in lengths])
    q, k, v, grad = tensors(queries[-1][1], keys[-1][1], *HEADS[heads], 16, v_dim, dtype)
    seen = torch.zeros(len(q), len(k), dtype=torch.bool)
    for a, b in zip(queries, keys, strict=True):
        seen[slice(*a), slice(*b)] = band_mask(a[1] - a[0], b[1] - b[0], band, q.device)
    made: BlockKernel = KERNELS[kernel]()
    options = dict(queries=queries, keys=keys, scale=SCALE, band=band)
    output, log_sum = made.forward(q, k, v, **options)
    assert output.dtype == dtype
    assert log_sum.dtype == torch.float32
    gradients = made.backward(grad, q, k, v, output, log_sum, **options)
    for got, want in zip((output, log_sum, *gradients), oracle(q, k, v, grad, seen), strict=True):
        assert got.shape == want.shape
        assert_close(got, want, dtype)


def _spans(lengths: list[int]) -> tuple[Span, ...]:
    ends = torch.tensor(lengths).cumsum(0).tolist()
    return tuple((end - length, end) for end, length in zip(ends, lengths, strict=True))


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("lengths", [(32,), (8, 16, 24)])
@pytest.mark.parametrize(("causal", "window"), [(True, 0), (True, 5), (False, 0)])
def test_ring_played_in_one_process(
    size: int, lengths: tuple[int, ...], causal: bool, window: int
) -> None:
    """Forward and backward of all ranks, one source of keys after the other."""
    total = sum(lengths)
    q, k, v, grad = tensors(total, total, 4, 2, 16, 16, torch.float32)
    document = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    distance = torch.arange(total)[:, None] - torch.arange(total)[None, :]
    seen = document[:, None] == document[None, :]
    if causal:
        seen &= distance >= 0
    if window:
        seen &= distance < window
    want = oracle(q, k, v, grad, seen)
    kernel = CpuKernel()
    d_keys, d_values = zeros_like(k, v)
    for rank in range(size):
        own = local_index(lengths, size, rank)
        merged = Merged(q[own], v)
        sources = [(rank - step) % size for step in range(size)]
        for source in sources:
            rows = local_index(lengths, size, source)
            calls = ring_calls(lengths, size, rank, source, causal, window)
            forward_calls(merged, calls, q[own], k[rows], v[rows], kernel=kernel, scale=SCALE)
        output, log_sum = merged.result(q.dtype)
        assert_close(output, want[0][own], q.dtype)
        assert_close(log_sum, want[1][:, own], q.dtype)
        (d_query,) = zeros_like(q[own])
        for source in sources:
            rows = local_index(lengths, size, source)
            calls = ring_calls(lengths, size, rank, source, causal, window)
            d_key, d_value = zeros_like(k[rows], v[rows])
            backward_calls(
                (d_query, d_key, d_value),
                calls,
                grad[own],
                q[own],
                k[rows],
                v[rows],
                output,
                log_sum,
                kernel=kernel,
                scale=SCALE,
            )
            d_keys[rows] += d_key
            d_values[rows] += d_value
        assert_close(d_query, want[2][own], q.dtype)
    assert_close(d_keys, want[3], q.dtype)
    assert_close(d_values, want[4], q.dtype)


def test_packed_documents_on_one_rank() -> None:
    lengths = (5, 1, 10)
    q, k, v, grad = tensors(16, 16, 4, 2, 16, 16, torch.float32)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    out = attend(*leaves, lengths, kernel=choose_kernel(q, v), scale=SCALE, window=4)
    out.backward(grad)
    document = torch.repeat_interleave(torch.arange(3), torch.tensor(lengths))
    distance = torch.arange(16)[:, None] - torch.arange(16)[None, :]
    seen = (document[:, None] == document[None, :]) & (distance >= 0) & (distance < 4)
    want = oracle(q, k, v, grad, seen)
    for got, expected in zip((out, *(x.grad for x in leaves)), (want[0], *want[2:]), strict=True):
        assert_close(got.detach(), expected, q.dtype)


def test_math_kernel_works_in_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v, grad = tensors(24, 24, 4, 2, 16, 16, torch.float32)
    options = dict(queries=((0, 24),), keys=((0, 24),), scale=SCALE, band=CAUSAL)
    whole = MathKernel().forward(q, k, v, **options)
    gradients = MathKernel().backward(grad, q, k, v, *whole, **options)
    monkeypatch.setattr("megatron_lightning.parallel.context.dense._SLICE_ELEMENTS", 4 * 24 * 5)
    sliced = MathKernel().forward(q, k, v, **options)
    again = MathKernel().backward(grad, q, k, v, *whole, **options)
    for one, other in zip((*whole, *gradients), (*sliced, *again), strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize(
    ("queries", "keys", "band", "regular"),
    [
        (((0, 128), (128, 256)), ((0, 128), (128, 256)), CAUSAL, True),
        (((0, 128),), ((0, 384),), FULL, True),
        (((128, 256),), ((0, 256),), CAUSAL, False),
        (((0, 128), (128, 300)), ((0, 128), (128, 300)), CAUSAL, False),
        (((0, 128),), ((0, 128),), Band(3, 0), False),
        (((0, 1),), ((0, 1),), FULL, False),
    ],
)
def test_calls_of_equal_sequences_are_regular(queries, keys, band, regular) -> None:
    assert is_regular(queries, keys, band) is regular
