"""A gated MLP in FP8 in a compiled region: the numbers of its layers one by one."""

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_lightning.config import GPTConfig
from megatron_lightning.layers import MLP, TorchBackend, quantized_gate
from megatron_lightning.layers.gated_silu import gated_silu_backward
from megatron_lightning.parallel.axes import MeshAxis
from megatron_lightning.parallel.mesh import ParallelMesh
from megatron_lightning.parallel.quantized.products import QuantizedProducts
from megatron_lightning.parallel.quantized.quantization import Quantization
from megatron_lightning.parallel.quantized.region import (
    announce,
    quantized_gradients,
    quantized_linear,
)
from megatron_lightning.precision.delayed import DelayedScaling
from megatron_lightning.precision.fp8 import FP8RowRecipe, FP8TensorRecipe
from megatron_lightning.precision.fp8_casts import Cast, cast_both
from megatron_lightning.precision.operands import Recipe
from tests.interpreter import run_interpreted

NAMES = ("linear_fc1", "linear_fc2")


def made(kind: str, **changes: Any) -> tuple[MLP, Quantization]:
    config = GPTConfig(
        vocab_size=8,
        num_layers=2,
        hidden_size=32,
        num_attention_heads=2,
        ffn_hidden_size=48,
        **changes,
    )
    torch.manual_seed(0)
    mlp = MLP(config, TorchBackend()).bfloat16()
    for parameter in mlp.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    delayed = None
    if kind == "delayed":
        delayed = DelayedScaling(
            NAMES, gradient="e5m2", length=4, margin=0, device=torch.device("cpu")
        )
    quantization = Quantization(ParallelMesh.single(), delayed)
    for name in NAMES:
        recipe: Recipe = FP8RowRecipe("e5m2")
        if kind != "rowwise":
            recipe = FP8TensorRecipe("e5m2", None if delayed is None else delayed.recipe(name))
        module: Any = mlp.get_submodule(name)
        module.quantized = QuantizedProducts(
            recipe=recipe,
            split="none",
            tensor_axis=MeshAxis(name="tp"),
            context_axis=MeshAxis(name="cp"),
            splits_sequence=False,
            clock=quantization.clock,
            in_regions=True,
        )
        quantization.add(module.quantized, module)
    return mlp, quantization


def run(
    mlp: MLP, quantization: Quantization, *, compiled: bool, needs_x: bool = True
) -> tuple[list[Tensor | None], str]:
    """Outputs and gradients of three windows of one pass, and what was compiled."""
    graphs: list[str] = []

    def backend(graph: Any, inputs: Any) -> Any:
        from torch._dynamo.backends.debugging import aot_eager

        graphs.append(graph.print_readable(print_output=False))
        return aot_eager(graph, inputs)

    call: Any = mlp
    if compiled:
        torch._dynamo.reset()
        call = torch.compile(mlp, backend=backend, fullgraph=True)
    results: list[Tensor | None] = []
    for step in range(3):
        torch.manual_seed(step)
        quantization.begin_run(training=True)
        x = torch.randn(5, 3, 32).bfloat16().requires_grad_(needs_x)
        y = call(x)
        y.float().square().sum().backward()
        results += [y.detach(), x.grad, *(p.grad for p in mlp.parameters())]
        mlp.zero_grad()
        quantization.finish_window()
    quantization.begin_run(training=False)
    with torch.no_grad():
        results.append(call(torch.ones(2, 1, 32).bfloat16()))
    return results, "\n".join(graphs)


def assert_same(got: list[Tensor | None], want: list[Tensor | None]) -> None:
    for one, two in zip(got, want, strict=True):
        assert (one is None) == (two is None)
        if one is not None and two is not None:
            assert torch.equal(one, two)


def as_it_is_computed(grad: Tensor, inner: Tensor) -> tuple[Tensor, Tensor, Cast]:
    """What a kernel would give: of the gradient its largest values, and what casts it."""
    rows = gated_silu_backward(grad, inner).flatten(-2).flatten(0, -2)
    return torch.full_like(inner, torch.nan), rows.abs().amax(dim=-1), partial(cast_both, rows)


@pytest.fixture(params=[False, True], ids=["written", "cast"])
def casts(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether the gradient of what enters the unit is cast as it is computed."""
    if request.param:
        monkeypatch.setattr(quantized_gate, "_gradient_of", as_it_is_computed)


@pytest.mark.parametrize("kind", ["tensorwise", "delayed", "rowwise"])
@pytest.mark.usefixtures("casts")
def test_the_same_as_layers_one_by_one(kind: str) -> None:
    want, _ = run(*made(kind), compiled=False)
    got, graph = run(*made(kind), compiled=True)
    assert_same(got, want)
    for name in ("gated_silu_largest", "gated_quantized_gradients"):
        assert (name in graph) == (kind != "rowwise")


@pytest.mark.parametrize("frozen", [NAMES, NAMES[:1], NAMES[1:]])
@pytest.mark.parametrize("needs_x", [True, False])
@pytest.mark.usefixtures("casts")
def test_what_is_frozen_gets_no_gradient(frozen: tuple[str, ...], needs_x: bool) -> None:
    if not needs_x and len(frozen) == 2:
        pytest.skip("nothing to differentiate")
    results = []
    for compiled in (False, True):
        mlp, quantization = made("tensorwise")
        for name in frozen:
            mlp.get_submodule(name).requires_grad_(False)
        results.append(run(mlp, quantization, compiled=compiled, needs_x=needs_x)[0])
    assert_same(*results)


def doubled(module: Any, arguments: Any, output: Tensor) -> Tensor:
    return 2 * output


@pytest.mark.parametrize("case", ["bias", "hook", "hook of the unit", "gelu"])
def test_what_stands_between_is_respected(case: str) -> None:
    results = []
    for compiled in (False, True):
        changes = {"bias": {"add_bias_linear": True}, "gelu": {"activation": "gelu"}}.get(case, {})
        mlp, quantization = made("tensorwise", **changes)
        if case == "hook":
            mlp.linear_fc1.register_forward_hook(doubled)
        if case == "hook of the unit":
            mlp.activation.register_forward_hook(doubled)
        results.append(run(mlp, quantization, compiled=compiled))
    assert_same(results[0][0], results[1][0])
    assert "gated_silu_largest" not in results[1][1]


def test_parts_hold_the_largest() -> None:
    torch.manual_seed(0)
    inner = torch.randn(3, 4, 2, 10)
    y, parts = quantized_gate.gated_silu_largest(inner)
    assert parts.max() == y.abs().max()
    _, parts = quantized_gate.gated_silu_largest(inner[:0])
    assert parts.max() == 0


def check_product(device: str, dtype: torch.dtype) -> None:
    """Bit for bit what the kernel gives that finds no largest values."""
    from megatron_lightning.layers.kernels import gated_silu, gated_silu_fp8

    torch.manual_seed(0)
    for shape in ((3, 2, 1500), (2, 5, 2, 48)):
        inner = torch.randn(shape).mul(3).to(device, dtype)
        y, parts = gated_silu_fp8.largest_product(inner, 7)
        assert torch.equal(y, gated_silu.forward(inner))
        assert parts.max() == y.abs().max()
        inner.view(-1)[3] = torch.nan
        assert gated_silu_fp8.largest_product(inner, 7)[1].max() == torch.inf


def check_operation(device: str) -> None:
    """Bit for bit what comes of a gradient that was written, where kernels run; however what it is
    computed from lies in memory.
    """
    mlp, quantization = made("tensorwise")
    layer: Any = mlp.to(device).linear_fc1
    quantization.begin_run(training=True)
    weight = layer.weight.detach().view(-1, 32)
    announce(layer.quantized, weight)
    x, grad = (torch.randn(5, 3, width).bfloat16().to(device) for width in (32, 48))
    inner = torch.randn(5, 3, 2, 48).bfloat16().to(device)
    turned = grad.mT.contiguous().mT, inner.mT.contiguous().mT
    _, *kept = quantized_linear(x, weight, True, "tensor", None)
    given = (*kept, weight, torch.empty(0, device=device), True, True, False)
    assert quantized_gate._gradient_of(grad, inner)[2] is not None
    got = quantized_gate.gated_quantized_gradients(grad, *given, inner)
    want = quantized_gradients(gated_silu_backward(grad, inner).flatten(-2), *given, None)
    assert_same(got, want)
    assert all(each.any() for each in got)
    assert_same(quantized_gate.gated_quantized_gradients(turned[0], *given, turned[1]), got)


INTERPRETED = """
from megatron_lightning.layers import kernels
from megatron_lightning.precision import fp8_casts
from tests.unit.layers.test_quantized_gate import check_operation, check_product, torch

for dtype in (torch.bfloat16, torch.float32):
    check_product("cpu", dtype)
kernels.can_run = fp8_casts._by_kernel = lambda x: True
check_operation("cpu")
"""


@pytest.mark.skipif("torch.cuda.is_available()", reason="the test on CUDA shows the same")
def test_kernels_in_the_interpreter() -> None:
    run_interpreted(INTERPRETED)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_kernels_on_cuda() -> None:
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        check_product("cuda", dtype)
    check_operation("cuda")
