"""Sinks and capped scores on a GPU: the kernels in bfloat16 against float32, and what they cost."""

from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_lightning.layers import Dropout, FusedAttention, ReferenceAttention
from megatron_lightning.layers.norm import RMSNorm
from megatron_lightning.parallel.context.kernels import choose_kernel
from megatron_lightning.parallel.sequence import SequenceInfo
from megatron_lightning.parallel.streams import Layout

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif("not torch.cuda.is_available()", reason="needs a CUDA device"),
]
LENGTH, BATCH, HEADS, GROUPS = 1024, 2, 8, 2
PACKED = SequenceInfo(((300, 724), (1024,)))


def inputs(dim: int, dtype: torch.dtype, length: int = LENGTH) -> list[Tensor]:
    generator = torch.Generator("cuda").manual_seed(1)
    shapes = [(HEADS, dim), (GROUPS, dim), (GROUPS, dim)]
    found = [
        torch.randn(length, BATCH, *shape, generator=generator, device="cuda") for shape in shapes
    ]
    sinks = torch.linspace(-2, 4, HEADS, device="cuda")
    return [x.bfloat16().to(dtype).requires_grad_() for x in (*found, sinks)]


def made(kind: Any, dim: int, window: int, cap: float) -> Any:
    dropout = Dropout(0.0, Layout.HEADS)
    return kind(scale=dim**-0.5, window_size=window, dropout=dropout, score_cap=cap)


def error(got: Tensor, want: Tensor) -> float:
    got, want = got.detach().double(), want.detach().double()
    return float((got - want).norm() / want.norm())


@pytest.mark.parametrize("sequence", [None, PACKED], ids=["whole", "packed"])
@pytest.mark.parametrize(
    ("dim", "window", "cap", "with_sinks"),
    [
        (64, 0, 0.0, True),  # GPT-OSS
        (64, 128, 0.0, True),
        (128, 128, 0.0, True),
        (256, 0, 0.0, True),  # wider than what cuDNN takes
        (256, 512, 20.0, False),  # Gemma 2
        (128, 0, 20.0, True),
    ],
)
def test_near_float32(
    dim: int, window: int, cap: float, with_sinks: bool, sequence: SequenceInfo | None
) -> None:
    results = []
    for kind, dtype in ((FusedAttention, torch.bfloat16), (ReferenceAttention, torch.float32)):
        q, k, v, sinks = inputs(dim, dtype)
        given = sinks if with_sinks else None
        out = made(kind, dim, window, cap)(q, k, v, sequence, sinks=given)
        out.backward(torch.linspace(-1, 1, out.numel(), device="cuda").view_as(out).to(dtype))
        results.append([out, q.grad, k.grad, v.grad, *([sinks.grad] if with_sinks else [])])
    errors = [error(got, want) for got, want in zip(*results, strict=True)]
    q, _, v, _ = inputs(dim, torch.bfloat16, length=8)
    print(type(choose_kernel(q, v, score_cap=cap)).__name__, [f"{e:.1e}" for e in errors])
    assert max(errors) < 2e-2


def milliseconds(core: Any, tensors: list[Tensor], sinks: Tensor | None) -> float:
    def step() -> None:
        core(*tensors, sinks=sinks).sum().backward()

    for _ in range(3):
        step()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(5):
        step()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) / 5


@pytest.mark.alone
def test_cost() -> None:
    """Sinks cost little beside the kernel; capped scores are the slow way, and fit in memory."""
    q, k, v, sinks = inputs(128, torch.bfloat16, length=8192)
    plain = milliseconds(made(FusedAttention, 128, 0, 0.0), [q, k, v], None)
    with_sinks = milliseconds(made(FusedAttention, 128, 0, 0.0), [q, k, v], sinks)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    capped = milliseconds(made(FusedAttention, 128, 0, 20.0), [q, k, v], None)
    peak = torch.cuda.max_memory_allocated() - before
    print(
        f"plain {plain:.2f} ms, sinks {with_sinks:.2f} ms, capped {capped:.2f} ms, {peak >> 20} MiB"
    )
    assert with_sinks < 2 * plain
    assert peak < 2 << 30


def test_norm_by_one_plus_weight() -> None:
    norm = RMSNorm(2304, 1e-6, zero_centered=True, device="cuda")
    torch.nn.init.normal_(norm.weight, std=0.01)
    norm = norm.bfloat16()
    x = torch.randn(64, 2304, device="cuda", dtype=torch.bfloat16)
    exact = x.double() * (x.double().square().mean(-1, keepdim=True) + 1e-6).rsqrt()
    assert error(norm(x), exact * (1 + norm.weight.double())) < 4e-3
