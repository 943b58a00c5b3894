"""Triton kernels against torch: in triton's interpreter where there is no GPU, and on one."""

import pytest
import torch
import torch.nn.functional as F

from megatron_lightning.layers import kernels, loss
from megatron_lightning.layers.gated_silu import gated_silu, weighted_gated_silu
from megatron_lightning.layers.loss import vocabulary_cross_entropy
from megatron_lightning.layers.moe.permute import permute, sort_by_expert, unpermute
from megatron_lightning.layers.moe.routing import Routing
from megatron_lightning.parallel.axes import MeshAxis
from tests.interpreter import run_interpreted

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
LIMITS = {torch.float32: 1e-6, torch.bfloat16: 4e-3, torch.float64: 1e-14}


def skip_without(device: str) -> None:
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")


def error(got: torch.Tensor, want: torch.Tensor) -> float:
    got, want = got.detach(), want.detach()
    return float((got.double() - want.double()).norm() / want.double().norm())


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", LIMITS)
@pytest.mark.parametrize("shape", [(3, 2, 2, 300), (1, 2, 2048), (5, 2, 1)])
def test_gated_silu(device: str, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    skip_without(device)
    generator = torch.Generator().manual_seed(0)
    wide = torch.randn(shape, generator=generator, dtype=torch.float64)
    grad = torch.randn((*shape[:-2], shape[-1]), generator=generator, dtype=torch.float64)
    inner, oracle = (x.to(device, dtype).requires_grad_() for x in (wide, wide))
    gate, up = oracle.double().unbind(-2)
    want = F.silu(gate) * up
    want.backward(grad.to(device, dtype).double())
    got = gated_silu(inner)
    got.backward(grad.to(device, dtype))
    assert got.dtype is dtype
    assert error(got, want) < LIMITS[dtype]
    assert error(inner.grad, oracle.grad) < LIMITS[dtype]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", LIMITS)
@pytest.mark.parametrize("shape", [(7, 2, 300), (3, 2, 2048), (5, 2, 1), (0, 2, 8)])
def test_weighted_gated_silu(device: str, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    skip_without(device)
    generator = torch.Generator().manual_seed(0)
    wide = torch.randn(shape, generator=generator, dtype=torch.float64)
    grad = torch.randn((shape[0], shape[-1]), generator=generator, dtype=torch.float64)
    weights = torch.rand(shape[0], generator=generator, dtype=torch.float64)
    in_float = torch.promote_types(dtype, torch.float32)  # as a router's probabilities
    inner, oracle = (x.to(device, dtype).requires_grad_() for x in (wide, wide))
    given, own = (x.to(device, in_float).requires_grad_() for x in (weights, weights))
    gate, up = oracle.double().unbind(-2)
    want = own.double().unsqueeze(1) * (F.silu(gate) * up)
    want.backward(grad.to(device, dtype).double())
    got = weighted_gated_silu(inner, given)
    got.backward(grad.to(device, dtype))
    assert got.dtype is dtype
    assert given.grad.dtype is in_float
    if shape[0]:
        assert error(got, want) < LIMITS[dtype]
        assert error(inner.grad, oracle.grad) < LIMITS[dtype]
        assert error(given.grad, own.grad) < LIMITS[in_float]  # summed in the wider dtype


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("with_dropped", [False, True])
def test_rows_of_tokens(device: str, dtype: torch.dtype, with_dropped: bool) -> None:
    """Permute and unpermute are each other's transposes, and sums skip what was dropped."""
    skip_without(device)
    generator = torch.Generator().manual_seed(0)
    experts = torch.rand(40, 6, generator=generator).argsort(1)[:, :3].to(device)
    dropped = torch.rand(40, 3, generator=generator).lt(0.3).to(device) if with_dropped else None
    routing = Routing(probs=torch.ones(40, 3, device=device), experts=experts, dropped=dropped)
    order = sort_by_expert(routing, 6)
    hidden = torch.randn(40, 1030, generator=generator).to(device, dtype)
    rows = permute(hidden, order).contiguous()
    if order.empty is not None:
        rows = rows.masked_fill(order.empty.unsqueeze(1), float("nan"))  # must not be read
    kept = torch.full((40,), 3, device=device) if dropped is None else (~dropped).sum(1)
    want = hidden.double() * kept.unsqueeze(1)
    assert error(unpermute(rows, order), want) < LIMITS[dtype]
    assert torch.equal(unpermute(rows, order), unpermute(rows, order))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("in_place", [False, True])
def test_gated_silu_gives_its_product_again(
    device: str, dtype: torch.dtype, in_place: bool
) -> None:
    """Beside the gradient, bit for bit, over the product's gradient too."""
    skip_without(device)
    inner = torch.randn(5, 3, 2, 2100, device=device, dtype=dtype)
    grad = torch.randn(5, 3, 2100, device=device, dtype=dtype)
    if not kernels.can_run(inner):
        pytest.skip("needs triton's kernel")
    from megatron_lightning.layers.kernels import gated_silu as kernel

    want = kernel.backward(grad, inner)
    product = grad.clone() if in_place else torch.full_like(grad, torch.nan)
    got = kernel.backward(product if in_place else grad, inner, product=product)
    assert torch.equal(got, want)
    assert torch.equal(product, kernel.forward(inner))


def test_gated_silu_keeps_only_its_input() -> None:
    inner = torch.randn(4, 2, 8, requires_grad=True)
    kept: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x):
        gated_silu(inner)
    assert [x.data_ptr() for x in kept] == [inner.data_ptr()]


def test_gated_silu_in_a_compiled_region() -> None:
    inner = torch.randn(4, 2, 8, requires_grad=True)
    compiled = torch.compile(lambda x: gated_silu(x * 2).sin(), fullgraph=True, backend="aot_eager")
    compiled(inner).sum().backward()
    got, inner.grad = inner.grad, None
    gated_silu(inner * 2).sin().sum().backward()
    assert torch.equal(got, inner.grad)


@pytest.mark.gpu
@pytest.mark.skipif("not torch.cuda.is_available()", reason="needs a CUDA device")
@pytest.mark.parametrize(("smoothing", "cap"), [(0.0, 0.0), (0.1, 0.0), (0.1, 5.0)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("columns", "vocabulary"), [(32768, 32768), (50304, 50257), (64, 50)])
def test_cross_entropy_on_cuda(
    columns: int, vocabulary: int, dtype: torch.dtype, smoothing: float, cap: float, monkeypatch
) -> None:
    generator = torch.Generator("cuda").manual_seed(0)
    logits = torch.randn(97, columns, device="cuda", generator=generator).mul_(4).to(dtype)
    targets = torch.randint(0, vocabulary, (97,), device="cuda", generator=generator)
    targets[3], targets[5] = -100, vocabulary - 1
    grad = torch.rand(97, device="cuda", generator=generator)
    found = []
    for in_kernel in (True, False):
        if not in_kernel:
            monkeypatch.setattr(loss.kernels, "can_run", lambda _: False)
        assert kernels.can_run(logits) is in_kernel
        x = logits.clone().requires_grad_()
        losses = vocabulary_cross_entropy(
            x,
            targets,
            axis=MeshAxis(name="tp"),
            vocab_size=vocabulary,
            label_smoothing=smoothing,
            logit_cap=cap,
        )
        losses.backward(grad)
        found.append((losses.detach(), x.grad))
    (losses, gradient), (wanted_losses, wanted) = found
    torch.testing.assert_close(losses, wanted_losses, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(
        gradient, wanted, rtol=1e-2 if dtype != torch.float32 else 1e-5, atol=1e-6
    )
    assert not gradient[:, vocabulary:].any()


INTERPRETED = """
import torch
from megatron_lightning.layers import loss
from megatron_lightning.layers.kernels import cross_entropy, gated_silu, row_sums, weighted_silu

torch.manual_seed(0)
logits = torch.randn(7, 5000) * 3
logits[2, :4500] = -torch.inf
for valid in (5000, 4990, 4600):
    rows = logits[:, :valid]
    highest, exponentials, total = cross_entropy.row_sums(logits, valid, with_total=True)
    assert torch.equal(highest, rows.amax(1))
    wanted = (rows - rows.amax(1, keepdim=True)).exp().sum(1)
    torch.testing.assert_close(exponentials, wanted)
    torch.testing.assert_close(total, rows.sum(1), rtol=1e-4, atol=1e-3)
    options = dict(valid=valid, spread=0.1 / valid)
    arguments = (logits, rows.logsumexp(1), torch.arange(7) * 600, torch.rand(7), torch.randn(7))
    got = cross_entropy.row_gradients(*arguments, **options)
    torch.testing.assert_close(got, loss._sliced_gradients(*arguments, **options))
    over = (arguments[0].clone(), *arguments[1:])
    assert cross_entropy.row_gradients(*over, **options, out=over[0]) is over[0]
    assert torch.equal(over[0], got)
    capped = 2.0 * torch.tanh(rows / 2.0)
    highest, exponentials, total = cross_entropy.row_sums(logits, valid, with_total=True, cap=2.0)
    torch.testing.assert_close(highest, capped.amax(1))
    wanted = (capped - highest[:, None]).exp().sum(1)
    torch.testing.assert_close(exponentials, wanted)
    torch.testing.assert_close(total, capped.sum(1), rtol=1e-4, atol=1e-2)
    arguments = (logits, capped.logsumexp(1), *arguments[2:])
    got = cross_entropy.row_gradients(*arguments, **options, cap=2.0)
    torch.testing.assert_close(got, loss._sliced_gradients(*arguments, **options, cap=2.0))
inner = torch.randn(3, 2, 1500, requires_grad=True)
grad = torch.randn(3, 1500)
wanted = torch.nn.functional.silu(inner[:, 0]) * inner[:, 1]
wanted.backward(grad)
torch.testing.assert_close(gated_silu.forward(inner.detach()), wanted.detach())
torch.testing.assert_close(gated_silu.backward(grad, inner.detach()), inner.grad)
weights = torch.rand(3, requires_grad=True)
inner.grad = None
wanted = weights[:, None] * torch.nn.functional.silu(inner[:, 0]) * inner[:, 1]
wanted.backward(grad)
got = weighted_silu.forward(inner.detach(), weights.detach())
torch.testing.assert_close(got, wanted.detach())
got = weighted_silu.backward(grad, inner.detach(), weights.detach())
torch.testing.assert_close(got, (inner.grad, weights.grad), rtol=1e-4, atol=1e-4)
rows, places = torch.randn(8, 1500), torch.randint(0, 8, (5, 3))
torch.testing.assert_close(row_sums.sum_rows(rows, places, None), rows[places].sum(1))
dropped = torch.rand(5, 3) < 0.4
wanted = (rows[places] * ~dropped[..., None]).sum(1)
torch.testing.assert_close(row_sums.sum_rows(rows, places, dropped), wanted)
"""


@pytest.mark.skipif("torch.cuda.is_available()", reason="the tests on CUDA show the same")
def test_kernels_in_the_interpreter() -> None:
    run_interpreted(INTERPRETED)
