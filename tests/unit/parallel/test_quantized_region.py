"""Low-precision layers in compiled regions: one graph, and the numbers of eager ones."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megatron_lightning.layers.gated_silu import gated_silu
from megatron_lightning.layers.linear import Linear
from megatron_lightning.parallel.axes import MeshAxis
from megatron_lightning.parallel.mesh import ParallelMesh
from megatron_lightning.parallel.quantized.products import QuantizedProducts
from megatron_lightning.parallel.quantized.quantization import Quantization
from megatron_lightning.parallel.random import Normal
from megatron_lightning.precision import fp8
from megatron_lightning.precision.delayed import DelayedScaling
from megatron_lightning.precision.fp8 import FP8RowRecipe, FP8TensorRecipe
from megatron_lightning.precision.operands import Recipe

NAMES = ("fc1", "fc2")


class Layer(nn.Module):
    """Two linear layers and what stands between."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1 = Linear(32, (2, 48), bias=True, initial=Normal(1.0))
        self.fc2 = Linear(48, 32, bias=False, initial=Normal(1.0))
        for parameter in self.parameters():
            nn.init.normal_(parameter, std=0.1)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.fc2(gated_silu(self.fc1(x * 2)))


def quantize(layers: Sequence[Any], kind: str) -> Quantization:
    """As `apply_quantization` does it, on a device that it would refuse."""
    names = [f"{i}.{name}" for i in range(len(layers)) for name in NAMES]
    delayed = None
    if kind == "delayed":
        delayed = DelayedScaling(
            names, gradient="e5m2", length=4, margin=0, device=torch.device("cpu")
        )
    quantization = Quantization(ParallelMesh.single(), delayed)
    for name in names:
        index, part = name.split(".")
        module = layers[int(index)].get_submodule(part)
        recipe: Recipe = FP8RowRecipe("e5m2")
        if kind != "rowwise":
            recipe = FP8TensorRecipe("e5m2", None if delayed is None else delayed.recipe(name))
        products = QuantizedProducts(
            recipe=recipe,
            split="none",
            tensor_axis=MeshAxis(name="tp"),
            context_axis=MeshAxis(name="cp"),
            splits_sequence=False,
            clock=quantization.clock,
            in_regions=True,
        )
        module.quantized = products  # type: ignore[assignment]
        quantization.add(products, module)
    return quantization


def train(kind: str, compiled: bool) -> list[Tensor]:
    torch.manual_seed(0)
    layers = [Layer().bfloat16() for _ in range(2)]
    quantization = quantize(layers, kind)
    graphs: list[Any] = []

    def backend(graph: Any, inputs: Any) -> Any:
        from torch._dynamo.backends.debugging import aot_eager

        graphs.append(graph)
        return aot_eager(graph, inputs)

    if compiled:
        torch._dynamo.reset()
        for layer in layers:
            layer.compile(backend=backend)
    results = []
    for step in range(3):
        quantization.begin_run(training=True)
        for micro in range(2):
            torch.manual_seed(step * 2 + micro)
            x = torch.randn(7, 3, 32).bfloat16().requires_grad_()
            y = x
            for layer in layers:
                y = layer(y)
            y.float().square().sum().backward()
            assert x.grad is not None
            results += [y.detach(), x.grad]
        quantization.finish_window()
        with torch.no_grad():
            for layer in layers:
                for parameter in layer.parameters():
                    assert parameter.grad is not None
                    results.append(parameter.grad.clone())
                    parameter -= parameter.grad.sign() * 1e-2
                    parameter.grad = None
    quantization.begin_run(training=False)
    with torch.no_grad():
        results.append(layers[1](layers[0](torch.ones(5, 1, 32).bfloat16())))
    if compiled:
        shapes = 2  # of training and evaluation
        assert len(graphs) == shapes, "a graph breaks, or is compiled for each layer"
    return results


@pytest.mark.parametrize("kind", ["tensorwise", "delayed", "rowwise"])
def test_compiled_layers_are_one_graph_and_train_the_same(kind: str) -> None:
    for got, want in zip(train(kind, True), train(kind, False), strict=True):
        assert torch.equal(got, want)


@pytest.mark.parametrize("foreign", [(True, False), (False, True)])
@pytest.mark.parametrize("kind", ["tensorwise", "rowwise"])
def test_operations_search_what_regions_do_not_write(
    kind: str, foreign: tuple[bool, bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Linear, "foreign", foreign)
    searched = []
    search = fp8.largest_and_scales_of

    def counted(x: Tensor, name: str) -> tuple[Tensor, Tensor, Tensor]:
        searched.append(name)
        return search(x, name)

    want = train(kind, False)
    monkeypatch.setattr(fp8, "largest_and_scales_of", counted)
    for got, one in zip(train(kind, True), want, strict=True):
        assert torch.equal(got, one)
    training, evaluation, weights = 3 * 2 * 4, 4, 4 * 4
    if kind == "tensorwise":
        assert len(searched) == training + weights + (evaluation if foreign[0] else 0)


@pytest.mark.parametrize("layers", [2, 3])
def test_layers_that_share_a_weight_stay_outside_of_regions(layers: int) -> None:
    """Delayed scaling by name: in a compiled layer one would take the other's scales."""
    networks: list[Any] = [Layer().bfloat16() for _ in range(layers)]
    for network in networks[1:]:
        network.fc2.weight = networks[0].fc2.weight
    quantization = quantize(networks, "delayed")
    assert all(network.fc1.quantized.in_regions for network in networks)
    assert not any(network.fc2.quantized.in_regions for network in networks)
    assert quantization.delayed is not None
    quantization.begin_run(training=True)
    x = torch.ones(4, 1, 32).bfloat16()
    for network in networks:
        x = 4 * network(x)
    quantization.finish_window()
    largest = [quantization.delayed.tensors()[f"{i}.fc2"][0, 0] for i in range(layers)]
    assert len({float(one) for one in largest}) == layers
