"""Casts to FP8 that write a matrix and its transpose, bit for bit what plain torch gives: every
form of the kernels, in triton's interpreter and on a GPU. (The interpreter cuts off, so that there
matrices hold what FP8 does.)
"""

from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_lightning.precision import fp8_casts
from megatron_lightning.precision.formats import FP8_DTYPES, FP8_MAX
from megatron_lightning.precision.operands import BOTH
from tests.interpreter import run_interpreted

Casts = tuple[Tensor | None, Tensor | None]
KINDS = [
    ((True, True), True),
    ((True, True), False),
    ((True, False), True),
    ((False, True), False),
]
"""What is wanted, and whether no value exceeds the format: each is compiled on a GPU."""


def assert_same_casts(got: Casts, want: Casts) -> None:
    for one, two in zip(got, want, strict=True):
        assert (one is None) == (two is None)
        if one is not None and two is not None:
            assert one.dtype is two.dtype
            assert torch.equal(one.cpu().view(torch.uint8), two.cpu().view(torch.uint8))


def sample(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Numbers of every magnitude, finite in float16."""
    torch.manual_seed(0)
    x = torch.randn(shape) * torch.randn(shape).mul(4).exp2()
    return x.clamp(-3e4, 3e4).to(dtype)


def check_casts(device: str, dtype: torch.dtype) -> None:
    from megatron_lightning.precision.kernels import fp8, fp8_tiles
    from megatron_lightning.precision.kernels.choices import Tiles

    for shape, name in (((37, 48), "e4m3"), ((1, 80), "e5m2")):
        x = sample(shape, dtype)
        if device == "cpu":
            x = x.clamp(-2, 2).to(FP8_DTYPES[name]).to(dtype)
        _, scale, _ = fp8.largest(x.to(device), FP8_MAX[name])
        forms = [(16, 64, *kind) for kind in KINDS] + [(64, 32, *KINDS[0])]
        for height, width, wanted, bounded in forms:
            tiles = Tiles(height=height, width=width, warps=4)
            factor = scale if bounded else scale * 64  # which saturates
            got = fp8_tiles.cast_both(
                x.to(device), factor, name, wanted, bounded=bounded, tiles=tiles
            )
            assert_same_casts(got, fp8_casts.cast_both(x, factor.cpu(), name, wanted))


def check_gates(device: str, dtype: torch.dtype) -> None:
    from megatron_lightning.layers.kernels import gated_silu, gated_silu_fp8
    from megatron_lightning.precision.kernels import fp8, fp8_tiles
    from megatron_lightning.precision.kernels.choices import Spans, Tiles

    for shape, name in (((37, 2, 48), "e5m2"), ((2, 3, 2, 80), "e4m3")):
        inner = sample(shape, dtype).mul(0.01).to(device)
        grad = sample((*shape[:-2], shape[-1]), dtype).to(device)
        rows = gated_silu.backward(grad, inner).view(-1, 2 * shape[-1])
        for block, programs in ((16, 3), (64, 1000)):
            spans = Spans(block=block, warps=4, programs=programs)
            found = gated_silu_fp8.largest_gradient(grad, inner, spans)
            assert found.max() == rows.abs().max()
        _, scale, _ = fp8.join(found, FP8_MAX[name])
        tiles = Tiles(height=32, width=64, warps=4)
        for wanted, bounded in KINDS:
            factor = scale if bounded else scale * 64
            options: dict[str, Any] = {"name": name, "wanted": wanted, "bounded": bounded}
            got = gated_silu_fp8.cast_gradient(grad, inner, factor, tiles=tiles, **options)
            assert_same_casts(got, fp8_tiles.cast_both(rows, factor, **options))
        got = gated_silu_fp8.cast_gradient(grad, inner, scale, name, BOTH, bounded=True)
        assert_same_casts(got, fp8_tiles.cast_both(rows, scale, name, BOTH, bounded=False))
        grad.view(-1)[3] = torch.nan
        assert gated_silu_fp8.largest_gradient(grad, inner).max() == torch.inf
        _, scale, _ = fp8.join(gated_silu_fp8.largest_gradient(grad, inner), FP8_MAX[name])
        assert scale.isnan()
    assert gated_silu_fp8.largest_gradient(grad[:0], inner[:0]).tolist() == [0]


@pytest.mark.slow
@pytest.mark.skipif("torch.cuda.is_available()", reason="the test on CUDA shows the same")
def test_casts_in_the_interpreter() -> None:
    program = "from tests.unit.precision.test_cast_tiles import *\n"
    program += "check_casts('cpu', torch.bfloat16); check_gates('cpu', torch.bfloat16)"
    run_interpreted(program)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_casts_on_cuda(dtype: torch.dtype) -> None:
    check_casts("cuda", dtype)
    check_gates("cuda", dtype)
