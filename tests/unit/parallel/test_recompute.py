"""Regions: what they keep, how they nest, that copies keep them, and that they can be undone."""

import copy
import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from megatron_lightning.config import GPTConfig, ParallelPlan, RecomputeConfig
from megatron_lightning.layers.linear import Linear
from megatron_lightning.layers.mlp import MLP, Activation
from megatron_lightning.layers.staged import StagedNetwork
from megatron_lightning.layers.torch_backend import TorchBackend
from megatron_lightning.parallel.offload import Offloaded
from megatron_lightning.parallel.recompute import (
    add_region,
    clear_region,
    compile_inside,
)
from megatron_lightning.runtime.recompute import (
    apply_recompute,
    matching_modules,
    recompute_problems,
)

WIDTH, ROWS = 64, 32
PLAN = ParallelPlan(layers="layers")


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.act = nn.GELU()
        self.down = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.act(self.up(x)))


class Network(StagedNetwork):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(4))

    def begin(self, x: Tensor) -> Tensor:
        return x * 1.0

    def apply_layer(self, name: str, layer: nn.Module, carried: Any, x: Tensor) -> Tensor:
        return layer(carried)

    def finish(self, carried: Any, x: Tensor) -> Tensor:
        return carried.sum()


def kept_elements(function: Callable[[], Tensor]) -> int:
    """Elements of the distinct storages, weights aside, that the graph of `function` keeps."""
    kept: dict[int, tuple[int, Tensor]] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if not isinstance(tensor, nn.Parameter) and not isinstance(tensor._base, nn.Parameter):
            kept[storage.data_ptr()] = storage.nbytes() // tensor.element_size(), tensor
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        function()
    return sum(elements for elements, _ in kept.values())


def with_form(config: RecomputeConfig) -> tuple[Network, Tensor]:
    torch.manual_seed(0)
    network = Network()
    apply_recompute(network, PLAN, config, streams=None, device=torch.device("cpu"))
    return network, torch.randn(ROWS, WIDTH)


@pytest.mark.parametrize(
    ("config", "multiple"),
    [
        (RecomputeConfig(), 4 * 9),  # input, and twice the wide one, of each layer
        (RecomputeConfig(mode="full"), 4),
        (RecomputeConfig(mode="full", num_layers=2), 2),
        (RecomputeConfig(mode="full", num_layers=3), 2),
        (RecomputeConfig(mode="full", method="block", num_layers=3), 3 + 9),
        (RecomputeConfig(mode="selective", modules=["act"]), 4 * 9),  # down keeps the output
        (RecomputeConfig(mode="selective", modules=["layers.[01]"]), 2 + 2 * 9),
    ],
)
def test_what_is_kept(config: RecomputeConfig, multiple: int) -> None:
    network, x = with_form(config)
    assert kept_elements(lambda: network(x)) == multiple * ROWS * WIDTH


def gradients(network: nn.Module, x: Tensor) -> dict[str, Tensor]:
    network.zero_grad()
    network(x).backward()
    return {name: p.grad.clone() for name, p in network.named_parameters() if p.grad is not None}


@pytest.mark.parametrize(
    "config",
    [
        RecomputeConfig(mode="full", num_layers=3, offload=True, offload_min_bytes=0),
        RecomputeConfig(mode="selective", modules=["act", "down"], offload=True),
    ],
)
def test_a_copy_keeps_its_regions_and_its_own_weights(config: RecomputeConfig) -> None:
    network, x = with_form(config)
    other = copy.deepcopy(network)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(2.0)
    plain = Network()
    for one in (network, other):
        plain.load_state_dict(one.state_dict())
        expected, found = gradients(plain, x), gradients(one, x)
        assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert kept_elements(lambda: other(x)) == kept_elements(lambda: network(x))


def test_regions_are_undone() -> None:
    network, x = with_form(RecomputeConfig(mode="full"))
    assert isinstance(network.layers[0], Layer)
    apply_recompute(network, PLAN, RecomputeConfig(), streams=None, device=torch.device("cpu"))
    assert type(network.layers[0]) is Layer
    assert kept_elements(lambda: network(x)) == 4 * 9 * ROWS * WIDTH


def test_nothing_is_kept_without_gradients() -> None:
    network, x = with_form(RecomputeConfig(mode="full", offload=True))
    with torch.no_grad():
        assert not network(x).requires_grad


def test_modules_inside_a_match_belong_to_it() -> None:
    found = [name for name, _ in matching_modules(Network(), ["layers.1", "up", "layers.1.act"])]
    assert found == ["layers.0.up", "layers.1", "layers.2.up", "layers.3.up"]


def test_problems_name_what_is_there() -> None:
    plain = nn.Sequential(Layer(), Layer())
    groups = RecomputeConfig(mode="full", num_layers=2)
    [problem] = recompute_problems(plain, ParallelPlan(), groups)
    assert "StagedNetwork" in problem
    assert "num_layers=2" in problem
    [problem] = recompute_problems(Layer(), ParallelPlan(), RecomputeConfig(mode="full"))
    assert "plan.layers=None" in problem
    wrong = RecomputeConfig(mode="selective", modules=["act", "gelu"])
    [problem] = recompute_problems(plain, ParallelPlan(), wrong)
    assert "'gelu' matches no module" in problem
    assert "'act', 'down', 'up'" in problem


class Own(nn.Module):
    """A user's module around the zoo's activation."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.activation = Activation(config)

    def forward(self, x: Tensor) -> Tensor:
        return self.activation(self.up(x).unflatten(-1, (2, WIDTH)))


def test_activations_are_recomputed_by_the_layer_behind_or_left_or_in_a_region(
    caplog: pytest.LogCaptureFixture,
) -> None:
    config = GPTConfig(num_layers=2, hidden_size=WIDTH, num_attention_heads=4, vocab_size=32)
    network = nn.ModuleDict(
        {name: MLP(config, TorchBackend()) for name in ("plain", "low", "adapted", "hooked")}
    )
    network["gelu"] = MLP(dataclasses.replace(config, activation="gelu"), TorchBackend())
    network["own"] = Own(config)
    adapted = network.get_submodule("adapted.linear_fc2")
    assert isinstance(adapted, Linear)
    adapted.adapters = nn.Identity()
    network.get_submodule("hooked.activation").register_forward_pre_hook(lambda *_: None)
    form = RecomputeConfig(mode="selective", modules=["activation"])
    assert not recompute_problems(network, ParallelPlan(), form)
    apply_recompute(
        network,
        ParallelPlan(),
        form,
        streams=None,
        device=torch.device("cpu"),
        quantized={"low.linear_fc2"},
    )
    found = {
        name.partition(".")[0]: (module.recomputed, type(module) is not Activation)
        for name, module in network.named_modules()
        if isinstance(module, Activation)
    }
    assert found.pop("plain") == (True, False)
    assert found.pop("gelu") == (False, True)
    assert found == dict.fromkeys(["low", "adapted", "own", "hooked"], (False, False))
    reasons = ("low precision", "adapters", "none of gated SiLU", "Own has a forward", "has hooks")
    for words in reasons:
        assert words in caplog.text
    own, x = network["own"], torch.randn(ROWS, WIDTH, requires_grad=True)
    inner, kept = own.up(x).unflatten(-1, (2, WIDTH)), []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        own.activation(inner).sum().backward()
    assert [tensor.data_ptr() for tensor in kept] == [inner.data_ptr()]  # no region could do better
    assert x.grad is not None


def test_offload_copies_a_storage_once_and_leaves_weights() -> None:
    offloaded = Offloaded(torch.device("cpu"), min_bytes=0)
    linear = nn.Linear(WIDTH, WIDTH)
    seen: list[Any] = []

    def function(x: Tensor) -> Tensor:
        left, right = (x * 2.0).chunk(2, dim=-1)
        return (left * right + left.exp()).sum() + linear(x).sum()

    pack = Offloaded._pack

    def watching(self: Offloaded, tensor: Tensor, run: Any) -> Any:
        seen.append((tensor, run, pack(self, tensor, run)))
        return seen[-1][2]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Offloaded, "_pack", watching)
        result = offloaded(function, torch.randn(ROWS, WIDTH, requires_grad=True))
    run = seen[0][1]
    assert len(run.copies) == 3  # the doubled input, the exponential, the linear's input
    weights = [
        packed for tensor, _, packed in seen if tensor.data_ptr() == linear.weight.data_ptr()
    ]
    assert all(isinstance(packed, Tensor) for packed in weights)
    assert all(copy.source is None for copy in run.copies.values())
    result.backward()


def test_a_storage_changed_in_place_is_copied_at_each_version() -> None:
    offloaded = Offloaded(torch.device("cpu"), min_bytes=0)
    x = torch.ones(8, requires_grad=True)

    def function(x: Tensor) -> Tensor:
        scale = torch.full((8,), 2.0)
        y = x * scale
        scale.add_(1.0)
        return (y * scale).sum()

    offloaded(function, x).backward()
    assert x.grad is not None
    assert x.grad.tolist() == [6.0] * 8


def test_small_tensors_stay() -> None:
    offloaded = Offloaded(torch.device("cpu"), min_bytes=1 << 20)
    x = torch.ones(8, requires_grad=True)
    assert kept_elements(lambda: offloaded(lambda x: x.exp().sum(), x)) == 0  # own hooks saw it
    offloaded(lambda x: x.exp().sum(), x).backward()
    assert x.grad is not None


def test_region_around_region() -> None:
    order: list[str] = []

    def region(name: str) -> Callable[..., Any]:
        def run(function: Callable[..., Any], *args: Any) -> Any:
            order.append(name)
            return function(*args)

        return run

    layer = Layer()
    add_region(layer, region("inner"))
    add_region(layer, region("outer"))
    layer(torch.randn(2, WIDTH))
    assert order == ["outer", "inner"]
    clear_region(layer)
    layer(torch.randn(2, WIDTH))
    assert order == ["outer", "inner"]


def test_compiled_inside_gives_the_same_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    traced = functools.partial(torch.compile, backend="aot_eager")  # all but the code generation
    monkeypatch.setattr(torch, "compile", traced)
    network, x = with_form(RecomputeConfig(mode="full"))
    expected = gradients(network, x)
    for layer in network.layers:
        compile_inside(layer)
        assert isinstance(layer, Layer)
    found = gradients(network, x)
    for name, want in expected.items():
        torch.testing.assert_close(found[name], want)
    assert kept_elements(lambda: network(x)) == 4 * ROWS * WIDTH
    clear_region(network.layers[0])
    assert type(network.layers[0]) is Layer
