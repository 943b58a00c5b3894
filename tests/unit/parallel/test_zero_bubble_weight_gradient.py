"""Weight gradients put off and computed later are bitwise those of an ordinary backward pass."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megatron_lightning.layers.block import TransformerLayer
from megatron_lightning.layers.linear import Linear
from megatron_lightning.layers.torch_backend import TorchBackend
from megatron_lightning.parallel.kept_buffers import can_keep_buffers
from megatron_lightning.parallel.random import Normal
from megatron_lightning.parallel.recompute import compile_inside
from megatron_lightning.parallel.weight_gradient import WeightGradients, apply_weight_sinks
from tests.layout_runs import tiny_config
from tests.unit.parallel.test_data_buckets import buckets_of

KEY = (3, 1)


class Sums:
    """Main gradients in float32, as the gradient buckets hold them."""

    def __init__(self, module: nn.Module) -> None:
        self.main = {
            name: torch.zeros_like(p, dtype=torch.float32) for name, p in module.named_parameters()
        }
        self.order: list[str] = []

    def add_product(self, name: str, grad: Tensor, x: Tensor) -> None:
        product = grad.flatten(0, -2).t() @ x.flatten(0, -2)
        self.main[name] += product.view_as(self.main[name])

    def arrived(self, name: str) -> None:
        self.order.append(name)


def deferring(module: nn.Module) -> tuple[WeightGradients, Sums]:
    gradients, sums = WeightGradients(), Sums(module)
    gradients.target = sums
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    apply_weight_sinks(module, gradients, names)
    return gradients, sums


def linear(shape=6, *, bias=True, dtype=torch.float32) -> Linear:
    layer = Linear(4, shape, bias=bias, initial=Normal(0.02))
    generator = torch.Generator().manual_seed(0)
    for parameter in layer.parameters():
        parameter.data = torch.randn(parameter.shape, generator=generator).to(dtype)
    return layer


def backward(module: nn.Module, x: Tensor) -> Tensor:
    """Gradient of the input; those of the parameters lie in them."""
    x = x.clone().requires_grad_()
    y = module(x)
    y = y.flatten(x.dim() - 1) * torch.linspace(-1, 1, y[0, 0].numel(), dtype=y.dtype)
    y.sin().sum().backward()
    assert x.grad is not None
    return x.grad


@pytest.mark.parametrize("shape", [6, (2, 3)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_put_off_equals_at_once(shape, dtype):
    x = torch.randn(5, 2, 4, generator=torch.Generator().manual_seed(1)).to(dtype)
    plain, split = linear(shape, dtype=dtype), linear(shape, dtype=dtype)
    gradients, sums = deferring(split)
    input_grad = backward(plain, x)
    with gradients.collect(KEY):
        torch.testing.assert_close(backward(split, x), input_grad, rtol=0, atol=0)
    assert split.weight.grad is None
    torch.testing.assert_close(split.bias.grad, plain.bias.grad, rtol=0, atol=0)
    assert gradients.names(KEY) == {"weight"}
    assert not sums.order
    gradients.compute(KEY)
    assert gradients.is_empty
    assert sums.order == ["weight"]
    torch.testing.assert_close(sums.main["weight"], plain.weight.grad.float(), rtol=0, atol=0)


def test_sums_over_micro_batches_in_float32():
    layer = linear(bias=False, dtype=torch.bfloat16)
    gradients, sums = deferring(layer)
    expected = torch.zeros(6, 4)
    for m in range(3):
        x = torch.randn(5, 2, 4, generator=torch.Generator().manual_seed(m)).bfloat16()
        plain = linear(bias=False, dtype=torch.bfloat16)
        backward(plain, x)
        expected += plain.weight.grad.float()
        with gradients.collect((m, 0)):
            backward(layer, x)
    for m in range(3):
        gradients.compute((m, 0))
    torch.testing.assert_close(sums.main["weight"], expected, rtol=0, atol=0)


def test_outside_of_a_collected_pass_autograd_does_it():
    plain, split = linear(), linear()
    gradients, _ = deferring(split)
    x = torch.randn(5, 2, 4)
    backward(plain, x)
    backward(split, x)
    assert gradients.is_empty
    torch.testing.assert_close(split.weight.grad, plain.weight.grad, rtol=0, atol=0)


def test_a_frozen_weight_is_not_kept():
    layer = linear()
    layer.weight.requires_grad_(False)
    gradients, sums = deferring(layer)
    with gradients.collect(KEY):
        backward(layer, torch.randn(5, 2, 4))
    assert not gradients.names(KEY)
    gradients.compute(KEY)
    assert not sums.order
    assert layer.bias.grad is not None


def test_a_weight_used_twice_arrives_once_and_whole():
    """Torch's own linear becomes one that can put off; both uses are summed."""

    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(4, 4, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(self.inner(x).tanh())

    torch.manual_seed(0)
    plain = Twice()
    split = copy.deepcopy(plain)
    gradients, sums = deferring(split)
    x = torch.randn(5, 2, 4)
    backward(plain, x)
    with gradients.collect(KEY):
        backward(split, x)
    gradients.compute(KEY)
    assert sums.order == ["inner.weight"]
    torch.testing.assert_close(sums.main["inner.weight"], plain.inner.weight.grad)


def test_copies_share_the_queue():
    layer = linear()
    gradients, _ = deferring(layer)
    assert copy.deepcopy(layer).weight_sink is layer.weight_sink
    assert copy.deepcopy(gradients) is gradients


def transformer_layer() -> TransformerLayer:
    layer = TransformerLayer(tiny_config(), 0, TorchBackend())
    generator = torch.Generator().manual_seed(0)
    for parameter in layer.parameters():
        parameter.data = torch.randn(parameter.shape, generator=generator) * 0.1
    return layer


class CountingBackend:
    """`aot_eager`, which differentiates compiled regions as inductor does, and how often."""

    def __init__(self) -> None:
        self.graphs = 0

    def __call__(self, module, example_inputs):
        self.graphs += 1
        return torch._dynamo.lookup_backend("aot_eager")(module, example_inputs)


@pytest.mark.parametrize("deferred", [False, True])
def test_compiled_layer_gives_the_eager_gradients(deferred):
    """Compiled around its four linears, which stay outside where a region can't put their weights'
    gradients off: four graph breaks, five regions instead of one.
    """
    torch._dynamo.reset()
    eager, compiled = transformer_layer(), transformer_layer()
    x = torch.randn(8, 2, 64, generator=torch.Generator().manual_seed(1))
    input_grad = backward(eager, x)
    gradients, sums = deferring(compiled) if deferred else (WeightGradients(), Sums(compiled))
    torch._dynamo.utils.counters.clear()
    backend = CountingBackend()
    compiled.compile(backend=backend)
    with gradients.collect(KEY):
        torch.testing.assert_close(backward(compiled, x), input_grad)
    assert bool(torch._dynamo.utils.counters["graph_break"]) is deferred
    print(f"weight gradients apart: {deferred}, compiled regions: {backend.graphs}")
    gradients.compute(KEY)
    assert len(sums.order) == (4 if deferred else 0)
    for name, want in eager.named_parameters():
        got = compiled.get_parameter(name).grad
        got = sums.main[name] if got is None else got
        torch.testing.assert_close(got, want.grad)
    assert backend.graphs == (5 if deferred else 1)
    torch._dynamo.reset()


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(transformer_layer() for _ in range(2)))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


def assert_put_off_in_regions(recomputed: bool, compile_layer: Callable[[nn.Module], None]) -> None:
    """One region for both layers, two micro-batches of which both wait, and the gradients of eager
    layers.
    """
    torch._dynamo.reset()
    plain, network = Layers(), Layers()
    layers: list[Any] = [*plain.layers, *network.layers]
    for layer in layers:
        layer.mlp.activation.recomputed = recomputed
    inputs = [torch.randn(8, 2, 64, generator=torch.Generator().manual_seed(m)) for m in range(2)]
    input_grads = [backward(plain, x) for x in inputs]
    gradients, buckets = WeightGradients(), buckets_of(network)
    gradients.target = buckets
    names = {id(parameter): name for name, parameter in network.named_parameters()}
    apply_weight_sinks(network, gradients, names, compiled="layers")
    buckets.serve(m for m in network.modules() if hasattr(m, "sums_weight_gradient"))
    for layer in network.layers:
        compile_layer(layer)
    counters = torch._dynamo.utils.counters
    counters.clear()
    for window in range(2):
        buckets.reset()
        for m, x in enumerate(inputs):
            with gradients.collect((m, 0)):
                torch.testing.assert_close(backward(network, x), input_grads[m])
        for m in range(2):
            assert len(gradients.names((m, 0))) == 8
            gradients.compute((m, 0))
        buckets.finish(1.0)
        found = buckets.gradients()
        for name, parameter in plain.named_parameters():
            torch.testing.assert_close(found[name], parameter.grad)
        assert counters["stats"]["unique_graphs"] == 1, f"in window {window}"
    with torch.no_grad():  # nothing is put off
        torch.testing.assert_close(network(inputs[0]), plain(inputs[0]))
    buckets.reset()  # a pass that is not collected adds at once
    plain.zero_grad()
    backward(plain, inputs[0])
    backward(network, inputs[0])
    buckets.finish(1.0)
    assert gradients.is_empty
    found = buckets.gradients()
    for name, parameter in plain.named_parameters():
        torch.testing.assert_close(found[name], parameter.grad)
    assert not counters["graph_break"]
    buckets.release()
    torch._dynamo.reset()


@pytest.mark.parametrize("recomputed", [False, True])
def test_one_region_puts_its_weight_gradients_off(recomputed):
    assert_put_off_in_regions(recomputed, lambda layer: layer.compile(backend="aot_eager"))


@pytest.mark.slow
@pytest.mark.parametrize("recomputed", [False, True])
def test_compiled_code_keeps_the_factors_of_what_is_put_off(recomputed):
    """Otherwise it overwrites what nobody is to read again, and gradients are wrong by far."""
    assert can_keep_buffers(), "this torch has other switches: the layers stay outside of regions"
    assert_put_off_in_regions(recomputed, lambda layer: compile_inside(layer, keeps_buffers=True))


def test_modules_that_are_to_compute_at_once_are_left_alone():
    network = nn.ModuleDict({"a": linear(), "b": nn.Sequential(linear()), "bc": nn.Linear(4, 6)})
    names = {id(parameter): name for name, parameter in network.named_parameters()}
    apply_weight_sinks(network, WeightGradients(), names, at_once=("b",))
    assert network["b"][0].weight_sink is None
    assert [network[name].weight_sink.name for name in ("a", "bc")] == ["a.weight", "bc.weight"]
