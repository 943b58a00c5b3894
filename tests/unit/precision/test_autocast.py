"""A module that keeps autocast out of its forward, whatever happens there."""

import copy
import inspect
import pickle
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from megatron_lightning.precision.autocast import keep_autocast_out
from megatron_lightning.precision.operands import Recipe, product
from megatron_lightning.precision.simulated import NVFP4Recipe, TensorRecipe

OFF = {"enabled": False, "cache": True, "product": torch.float32}
ON = {"enabled": True, "cache": False, "product": torch.bfloat16}


def state() -> dict[str, Any]:
    return {
        "enabled": torch.is_autocast_enabled("cpu"),
        "cache": torch.is_autocast_cache_enabled(),
        "product": (torch.ones(2, 2) @ torch.ones(2, 2)).dtype,
    }


def nesting() -> int:
    """How many contexts of autocast are open."""
    torch.autocast_increment_nesting()
    return torch.autocast_decrement_nesting()


def step(dtype: torch.dtype = torch.bfloat16) -> torch.autocast:
    """What Lightning's plugin puts around a step."""
    return torch.autocast("cpu", dtype=dtype, cache_enabled=False)


class Probe(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.seen: list[dict[str, Any]] = []

    def forward(self, x: Tensor, *, error: BaseException | None = None) -> Tensor:
        self.seen.append(state())
        if error is not None:
            raise error
        return self.linear(x)


@pytest.fixture
def probe() -> Iterator[Probe]:
    module = Probe()
    keep_autocast_out(module, "cpu")
    yield module
    assert state() == OFF
    assert nesting() == 0


def test_it_is_on_around_the_module_and_off_inside(probe: Probe) -> None:
    x = torch.ones(2, 4)
    with step():
        assert state() == ON
        assert probe(x).dtype is torch.float32
        assert state() == ON
        assert probe.linear(x).dtype is torch.bfloat16  # a part that is called by itself
    assert probe(x).dtype is torch.float32
    assert probe.seen == [OFF, OFF]


@pytest.mark.parametrize("error", [ValueError("wrong"), KeyboardInterrupt()])
def test_whatever_is_raised_inside(probe: Probe, error: BaseException) -> None:
    with step():
        depth = nesting()
        with pytest.raises(type(error)):
            probe(torch.ones(2, 4), error=error)
        assert state() == ON
        assert nesting() == depth
        assert probe(torch.ones(2, 4)).dtype is torch.float32


@pytest.mark.parametrize(
    "copied", [copy.deepcopy, lambda module: pickle.loads(pickle.dumps(module))]
)
def test_a_copy_calls_its_own_forward(probe: Probe, copied: Any) -> None:
    twin = copied(probe)
    nn.init.zeros_(twin.linear.weight)
    nn.init.zeros_(twin.linear.bias)
    with step():
        assert torch.equal(twin(torch.ones(1, 4)), torch.zeros(1, 4))
        assert probe(torch.ones(1, 4)).count_nonzero() > 0
    assert len(twin.seen) == len(probe.seen) == 1


def test_it_is_done_once_and_the_signature_stays(probe: Probe) -> None:
    before = vars(probe)["forward"]
    keep_autocast_out(probe, "cpu")
    assert vars(probe)["forward"] is before
    assert list(inspect.signature(probe.forward).parameters) == ["x", "error"]
    assert list(probe.state_dict()) == ["linear.weight", "linear.bias"]


@pytest.mark.parametrize("backward_in_step", [False, True])
def test_recomputation(backward_in_step: bool) -> None:
    layer = Probe()

    class Network(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(layer, x, use_reentrant=False)

    network = Network()
    keep_autocast_out(network, "cpu")
    with step():
        loss = network(torch.ones(2, 4)).sum()
        if backward_in_step:
            loss.backward()
    if not backward_in_step:
        loss.backward()
    assert layer.seen == [OFF, OFF]
    assert layer.linear.weight.grad is not None


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Sequential(nn.Linear(4, 4), nn.Tanh())

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) + 1


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("part", ["layer", "whole"])
def test_nothing_is_compiled_anew(part: str, dtype: torch.dtype) -> None:
    """The first call is in a step, the second outside: compiled layers can't tell them apart."""
    torch._dynamo.reset()
    network, x = Stack(), torch.ones(2, 4)
    want = network(x)
    keep_autocast_out(network, "cpu")
    (network.layer if part == "layer" else network).compile(backend="eager")
    with step(dtype):
        assert torch.equal(network(x), want)
    if part == "whole":  # Lightning's context is around the compiled code itself, as ever
        return
    with torch._dynamo.config.patch(error_on_recompile=True):
        assert torch.equal(network(x), want)
        with step(dtype):
            assert torch.equal(network(x), want)


@pytest.mark.parametrize(
    "recipe", [TensorRecipe("e5m2"), NVFP4Recipe(stochastic=False, signs=torch.ones(16))]
)
def test_simulated_products_are_exact_in_a_part_that_a_step_calls(recipe: Recipe) -> None:
    """Scaled to the format's largest values, they would not even be finite in float16."""
    x, y = (torch.randn(32, 32, generator=torch.Generator().manual_seed(i)) for i in (1, 2))

    def compute() -> Tensor:
        a, b = (recipe.pair(each, "gradient").transposed for each in (x, y))
        assert a is not None
        assert b is not None
        return product(a, b, torch.float32)

    want = compute()
    with step(torch.float16):
        assert torch.equal(compute(), want)
