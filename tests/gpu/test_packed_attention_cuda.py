"""Attention of packed documents on a GPU: values and gradients against float32 mathematics, one
plan for documents of many lengths, and a table of flash against cuDNN's own front end.

pytest -m gpu tests/gpu/test_packed_attention_cuda.py -rP
"""

import itertools
import math
import statistics
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_lightning.layers import TorchBackend
from megatron_lightning.models.gpt import GPTModel
from megatron_lightning.models.gpt_network import GPTNetwork
from megatron_lightning.parallel.context import ragged_plans, ragged_shapes
from megatron_lightning.parallel.context.attend import attend
from megatron_lightning.parallel.context.cudnn_attention import CudnnKernel
from megatron_lightning.parallel.context.flash import FlashKernel
from megatron_lightning.parallel.context.kernels import BlockKernel
from megatron_lightning.parallel.context.plan import CAUSAL, FULL, Band, Span
from tests.layout_runs import tiny_config

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]
needs_front_end = pytest.mark.skipif(
    not ragged_plans.front_end_installed(), reason="no nvidia-cudnn-frontend"
)
TOLERANCE = 1.2e-2
"""Of the largest difference by the largest value, bfloat16."""


def spans(lengths: list[int]) -> tuple[Span, ...]:
    ends = list(itertools.accumulate(lengths, initial=0))
    return tuple(itertools.pairwise(ends))


def mathematics(
    query: Tensor, key: Tensor, value: Tensor, scale: float, band: Band
) -> tuple[Tensor, Tensor]:
    """One sequence: (n, N, D), (m, G, D) twice -> (n, N, D) and (N, n)."""
    n, m = len(query), len(key)
    repeat = query.shape[1] // key.shape[1]
    key, value = (x.repeat_interleave(repeat, 1) for x in (key, value))
    scores = torch.einsum("qnd,knd->nqk", query, key) * scale
    distance = (torch.arange(m)[None] - torch.arange(n)[:, None] - (m - n)).to(query.device)
    hidden = torch.zeros_like(distance, dtype=torch.bool)
    if band.right is not None:
        hidden |= distance > band.right
    if band.left is not None:
        hidden |= distance < -band.left
    scores = scores.masked_fill(hidden, -torch.inf)
    return torch.einsum("nqk,knd->qnd", scores.softmax(-1), value), scores.logsumexp(-1)


def draw(rows: int, heads: int, size: int) -> Tensor:
    return torch.randn(rows, heads, size, device="cuda", dtype=torch.bfloat16)


def assert_close(found: Tensor, expected: Tensor, name: str) -> None:
    # Queries and keys of one-token documents have no gradient at all.
    error = (found.float() - expected).abs().max() / expected.abs().max().clamp(min=0.05)
    assert error < TOLERANCE, f"{name}: {float(error):.1e}"


def check(
    kernel: BlockKernel,
    n: list[int],
    m: list[int],
    band: Band,
    size: int,
    heads: tuple[int, int] = (8, 2),
) -> None:
    """Forward, log-sum-exp, and gradients of a call against the formula per sequence."""
    torch.manual_seed(len(n))
    query, grad = draw(sum(n), heads[0], size), draw(sum(n), heads[0], size)
    key, value = (draw(sum(m), heads[1], size) for _ in range(2))
    scale = 1 / math.sqrt(size)
    places: Any = dict(queries=spans(n), keys=spans(m), scale=scale, band=band)
    output, log_sum = kernel.forward(query, key, value, **places)
    gradients = kernel.backward(grad, query, key, value, output, log_sum, **places)
    exact = [x.float().requires_grad_() for x in (query, key, value)]
    parts = [
        mathematics(exact[0][slice(*q)], exact[1][slice(*k)], exact[2][slice(*k)], scale, band)
        for q, k in zip(spans(n), spans(m), strict=True)
    ]
    expected = torch.cat([part[0] for part in parts])
    expected.backward(grad.float())
    assert_close(output, expected.detach(), "output")
    sums = torch.cat([part[1] for part in parts], 1).detach()
    assert (log_sum.float() - sums).abs().max() < 0.02
    for name, found, x in zip("qkv", gradients, exact, strict=True):
        assert x.grad is not None
        assert_close(found, x.grad, f"gradient of {name}")


LENGTHS = [[300, 1, 77, 513, 128], [1, 1, 1], [1024, 40, 1000, 999, 5, 6, 7, 8, 9, 10], [129] * 3]


@needs_front_end
@pytest.mark.parametrize("size", [64, 128])
def test_front_end_agrees_with_mathematics(size: int) -> None:
    for lengths in LENGTHS:
        check(CudnnKernel(ragged=True), lengths, lengths, CAUSAL, size)
    check(CudnnKernel(ragged=True), LENGTHS[0], LENGTHS[0], CAUSAL, size, heads=(4, 4))
    check(CudnnKernel(ragged=True), LENGTHS[0], LENGTHS[0], FULL, size)


@needs_front_end
@pytest.mark.parametrize("size", [64, 128])
def test_front_end_with_windows(size: int) -> None:
    check(CudnnKernel(ragged=True), LENGTHS[0], LENGTHS[0], Band(63, 0), size)
    check(CudnnKernel(ragged=True), LENGTHS[2], LENGTHS[2], Band(200, 0), size)


@needs_front_end
def test_front_end_with_other_keys_than_queries() -> None:
    n, m = [100, 1, 200], [300, 70, 200]
    check(CudnnKernel(ragged=True), n, m, FULL, 128)
    check(CudnnKernel(ragged=True), n, m, CAUSAL, 128)
    check(CudnnKernel(ragged=True), n, m, Band(50, 0), 128)


@needs_front_end
def test_one_plan_serves_many_lengths() -> None:
    ragged_plans.find_plan.cache_clear()
    generator = torch.Generator().manual_seed(1)
    for _ in range(6):
        ends = torch.randperm(2047, generator=generator)[:8].add(1).sort().values.tolist()
        lengths = [b - a for a, b in itertools.pairwise([0, *ends, 2048])]
        lengths.sort(reverse=True)
        longest = 900  # of one bucket, 769 to 1024
        lengths[1] += lengths[0] - longest
        lengths[0] = longest
        if max(lengths) > 1024 or min(lengths) < 1:
            continue
        check(CudnnKernel(ragged=True), lengths, lengths, CAUSAL, 64)
    assert ragged_plans.find_plan.cache_info().currsize == 2  # forward and backward


@pytest.mark.parametrize("size", [64, 128])
def test_flash_agrees_with_mathematics(size: int) -> None:
    for lengths in LENGTHS:
        check(FlashKernel(), lengths, lengths, CAUSAL, size)
    check(FlashKernel(), LENGTHS[0], LENGTHS[0], Band(63, 0), size)


def documents(tokens: int, mean: int, seed: int) -> list[int]:
    """Lengths as in text: log-normal, at least 16 but the last."""
    generator = torch.Generator().manual_seed(seed)
    lengths: list[int] = []
    while tokens:
        drawn = mean * math.exp(torch.randn((), generator=generator).item() * 0.9 - 0.4)
        lengths.append(int(min(tokens, max(16, drawn))))
        tokens -= lengths[-1]
    return lengths


def milliseconds(call: Callable[[], object], count: int = 12) -> float:
    times = []
    for _ in range(count):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        call()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end))
    return statistics.median(times[3:])


def speeds(kernel: BlockKernel, lengths: list[int], size: int) -> tuple[float, float]:
    """TFLOP/s of forward, and of forward and backward."""
    tokens = sum(lengths)
    query, key, value = draw(tokens, 32, size), draw(tokens, 8, size), draw(tokens, 8, size)
    grad = draw(tokens, 32, size)
    places: Any = dict(queries=spans(lengths), keys=spans(lengths), scale=size**-0.5, band=CAUSAL)
    output, log_sum = kernel.forward(query, key, value, **places)
    forward = milliseconds(lambda: kernel.forward(query, key, value, **places))
    backward = milliseconds(
        lambda: kernel.backward(grad, query, key, value, output, log_sum, **places)
    )
    operations = sum(2 * 32 * size * n * n for n in lengths) / 1e9
    return operations / forward, 3.5 * operations / (forward + backward)


@pytest.mark.alone
def test_table_of_speeds() -> None:
    """TFLOP/s of forward, and forward and backward, of each kernel; nothing is asserted."""
    kernels: dict[str, BlockKernel] = {"flash": FlashKernel()}
    if ragged_plans.front_end_installed():
        kernels["front end"] = CudnnKernel(ragged=True)
    print(f"\n{'documents':>34} {'size':>4}  " + "  ".join(f"{k:>16}" for k in kernels))
    rows = [(16384, mean, 64) for mean in (128, 300, 1024, 3000)]
    rows += [(16384, mean, 128) for mean in (128, 300, 1024, 3000)] + [(32768, 6000, 128)]
    for tokens, mean, size in rows:
        lengths = documents(tokens, mean, 5)
        found = [speeds(kernel, lengths, size) for kernel in kernels.values()]
        about = f"{len(lengths)} of {tokens // len(lengths)}, max {max(lengths)}"
        cells = (f"{forward:7.0f} /{both:7.0f}" for forward, both in found)
        print(f"{about:>34} {size:>4}  " + "  ".join(f"{cell:>16}" for cell in cells))


@needs_front_end
def test_what_rounding_up_costs(monkeypatch: pytest.MonkeyPatch) -> None:
    """TFLOP/s when plans are for longer and more documents than there are; nothing is asserted."""
    rounded_up = ragged_shapes.rounded_up
    for size, mean in ((64, 1024), (128, 300)):
        lengths = documents(16384, mean, 5)
        for factor in (1, 2, 4):

            def more(count: int, smallest: int = 1, factor: int = factor) -> int:
                return factor * rounded_up(count, smallest)

            monkeypatch.setattr(ragged_shapes, "rounded_up", more)
            ragged_shapes._sizes.cache_clear()
            forward, both = speeds(CudnnKernel(ragged=True), lengths, size)
            print(
                f"{len(lengths)} documents, {size}, bounds x {factor}: {forward:.0f} / {both:.0f}"
            )
    monkeypatch.undo()
    ragged_shapes._sizes.cache_clear()


@pytest.mark.alone
def test_time_of_a_plan() -> None:
    """Milliseconds to build a plan and of the host a call; nothing is asserted."""
    if not ragged_plans.front_end_installed():
        pytest.skip("no nvidia-cudnn-frontend")
    ragged_plans.find_plan.cache_clear()
    kernel = CudnnKernel(ragged=True)
    query, key, value = draw(4096, 32, 128), draw(4096, 8, 128), draw(4096, 8, 128)
    for part, lengths in [("first", [1000, 3000, 96]), ("other", [1001, 2999, 96])]:
        start = time.perf_counter()
        attended = attend(query.requires_grad_(), key, value, lengths, kernel=kernel, scale=0.1)
        attended.sum().backward()
        print(f"{part}: {1e3 * (time.perf_counter() - start):.1f} ms of the host")
    print("cuDNN", torch.backends.cudnn.version(), "torch", torch.__version__)


@pytest.mark.parametrize("compiled", [False, True])
def test_host_does_not_wait_for_lengths(compiled: bool) -> None:
    """Nor is anything compiled anew for other lengths."""
    model = GPTModel(tiny_config(hidden_size=256, num_attention_heads=4, num_query_groups=2))
    network = GPTNetwork(model.config, TorchBackend()).to("cuda", torch.bfloat16)
    for parameter in network.parameters():
        torch.nn.init.normal_(parameter, std=0.02)
    for layer in network.decoder.layers.values():
        if compiled:
            layer.compile()
    tokens = torch.arange(2048).remainder(48).view(2, 1024)
    for step in range(3):
        lengths = [[300 + step, 1, 723 - step], [129, 895 - step, step]]
        rows = [[0, *itertools.accumulate(row)] for row in lengths]
        batch = {"tokens": tokens, "cu_seqlens": torch.tensor(rows)}
        moved = model.transfer_batch_to_device(batch, torch.device("cuda", 0), 0)
        assert moved["cu_seqlens"].device.type == "cpu"
        if step:
            torch.cuda.set_sync_debug_mode("error")
        try:
            with torch._dynamo.config.patch(error_on_recompile=step > 0):
                losses = network(moved["tokens"], None, moved["tokens"], moved["cu_seqlens"])
                losses.float().mean().backward()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    gradient = next(iter(network.decoder.layers["0"].parameters())).grad
    assert gradient is not None
    assert gradient.isfinite().all()
