"""Networks cut into chunks: what a chunk holds and runs, and what can not be cut."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megatron_lightning.config import ParallelPlan, replicated
from megatron_lightning.config.plan import canonical_name
from megatron_lightning.layers import StagedNetwork
from megatron_lightning.parallel.pipeline import build_layout
from megatron_lightning.runtime.stages import (
    PipelinedNetwork,
    StageDone,
    cut_network,
    cut_problems,
    layer_names,
)


class Net(StagedNetwork):
    """Embedding parameter and module, three layers, a head that may be tied."""

    layers_path = "body.layers"

    def __init__(self, *, tied: bool = False) -> None:
        super().__init__()
        self.start = nn.Parameter(torch.ones(4))
        self.inner = nn.Module()
        self.inner.embed = nn.Linear(2, 4)
        self.body = nn.Module()
        self.body.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.head = nn.Linear(4, 2, bias=False)
        self.register_buffer("scale", torch.tensor(2.0))
        if tied:
            self.head.weight = nn.Parameter(self.inner.embed.weight.detach().t().contiguous())
            self.inner.embed.weight = self.head.weight

    def begin(self, x: Tensor) -> Tensor:
        return self.inner.embed(x) + self.start

    def apply_layer(self, name: str, layer: nn.Module, carried: Any, x: Tensor) -> Tensor:
        return torch.tanh(layer(carried)) * self.scale

    def finish(self, carried: Any, x: Tensor) -> Tensor:
        return self.head(carried)


def plan(**changes: Any) -> ParallelPlan:
    values: dict[str, Any] = dict(
        splits={"*": replicated()},
        layers="body.layers",
        first=("start", "inner.embed"),
        last=("head",),
    )
    return ParallelPlan(**{**values, **changes})


def chunks_of(network: nn.Module, plan: ParallelPlan, stages: int) -> list[PipelinedNetwork]:
    layout = build_layout(len(layer_names(network, plan)), stages)
    assert not cut_problems(network, plan, layout)
    return [cut_network(network, plan, layout.chunks(rank)) for rank in range(stages)]


def run(stages: list[PipelinedNetwork], step: Callable[[PipelinedNetwork], Any]) -> Any:
    """The step on every stage in turn, as the engine calls it."""
    carried = None
    for stage in stages:
        done, carried = stage.run_stage(0, carried, lambda stage=stage: step(stage))
        assert done is (stage is stages[-1])
    return carried


@pytest.mark.parametrize("stages", [2, 3, 4, 5])
def test_stages_compute_what_the_whole_does(stages: int) -> None:
    network, x = Net(), torch.randn(3, 2)
    parts = chunks_of(network, plan(), stages)
    assert torch.equal(run(parts, lambda net: net(x) * 2), network(x) * 2)
    names = [name for part in parts for name, _ in part.named_parameters()]
    assert len(names) == len(dict(network.named_parameters()))
    shared = {id(p) for part in parts for p in part.parameters()}
    assert shared == {id(p) for p in network.parameters()}  # nothing was copied
    assert all(part.chunks[0].scale is network.scale for part in parts)


def test_names_keep_the_number_of_the_layer() -> None:
    network = Net()
    last = chunks_of(network, plan(), 2)[1]
    names = [name for name, _ in last.named_parameters()]
    assert "body.layers.2.weight" in names
    assert "body.layers.0.weight" not in names
    saved = [canonical_name(f"network.{name}") for name in last.state_dict()]
    assert {f"network.{name}" for name in names} < set(saved)
    assert last.chunks[0].start is None
    assert last.chunks[0].inner.embed is None


def test_sequential_needs_no_plan_of_layers() -> None:
    network = nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 4), nn.Linear(4, 1))
    parts = chunks_of(network, plan(layers=None, first=(), last=()), 2)
    x = torch.randn(3, 2)
    assert torch.equal(run(parts, lambda net: net(x)), network(x))
    assert [name for name, _ in parts[1].named_parameters()][0] == "2.weight"


def test_a_cut_network_answers_as_the_whole_where_it_can() -> None:
    network = Net()
    network.width = 4
    holder = nn.Module()
    holder.net = chunks_of(network, plan(), 2)[0]
    assert holder.net.width == 4
    assert holder.net.layers_path == "body.layers"
    with pytest.raises(AttributeError, match="'head' of a network that is cut"):
        _ = holder.net.head
    assert not hasattr(holder.net, "missing")
    names = {name for name, _ in holder.named_parameters()}
    assert names <= {f"net.{name}" for name, _ in network.named_parameters()}
    assert {name for name, _ in holder.named_buffers()} == {"net.scale"}
    assert "net.body.layers.0" in dict(holder.named_modules())
    again = copy.deepcopy(holder)
    assert {name for name, _ in again.named_parameters()} == names
    assert again.net.width == 4


def test_the_step_is_left_in_the_middle() -> None:
    """No `except Exception` of the user's catches what unwinds it."""
    assert not issubclass(StageDone, Exception)
    network = Net()
    first, _ = chunks_of(network, plan(), 2)
    behind: list[int] = []

    def step() -> None:
        try:
            first(torch.zeros(1, 2))
        except Exception:
            behind.append(1)
        behind.append(2)

    done, carried = first.run_stage(0, None, step)
    assert not done
    assert carried.shape == (1, 4)
    assert not behind


@pytest.mark.parametrize("calls", [0, 2])
def test_the_network_is_called_once(calls: int) -> None:
    _, last = chunks_of(Net(), plan(), 2)

    def step() -> None:
        for _ in range(calls):
            last(torch.zeros(1, 2))

    with pytest.raises(RuntimeError, match=f"called the network {calls} times"):
        last.run_stage(0, torch.zeros(1, 4), step)
    with pytest.raises(RuntimeError, match="outside of a training, validation"):
        last(torch.zeros(1, 2))


def test_an_error_of_the_step_is_passed_on() -> None:
    _, last = chunks_of(Net(), plan(), 2)
    with pytest.raises(KeyError):
        last.run_stage(0, torch.zeros(1, 4), lambda: {}["missing"])


# ---------------------------------------------------------------- what can't be cut


def problems(network: nn.Module, plan: ParallelPlan, stages: int = 2) -> str:
    layout = build_layout(len(layer_names(network, plan)), stages)
    return " ".join(cut_problems(network, plan, layout))


def test_parameters_that_nothing_owns() -> None:
    assert "no pipeline stage owns ['start']" in problems(Net(), plan(first=("inner",)))


def test_ties_have_to_be_named() -> None:
    text = problems(Net(tied=True), plan())
    assert "inner.embed.weight and head.weight are one parameter" in text
    assert "plan.tied" in text
    tied = (("inner.embed.weight", "head.weight"),)
    assert not problems(Net(tied=True), plan(tied=tied))
    assert "head.weight must be in a plan.first module" in problems(
        Net(tied=True), plan(tied=(("head.weight", "inner.embed.weight"),))
    )


def test_layers_that_share_a_parameter() -> None:
    network = Net()
    network.body.layers[2].weight = network.body.layers[0].weight
    assert "body.layers.0.weight and body.layers.2.weight" in problems(network, plan())


def test_modules_that_share_within_a_stage_are_fine() -> None:
    network = Net()
    network.body.layers[1].other = network.body.layers[1].weight
    assert not problems(network, plan())


def test_a_rank_without_parameters() -> None:
    network = nn.Sequential(nn.Linear(2, 2), nn.Tanh(), nn.Tanh(), nn.Linear(2, 1))
    text = problems(network, plan(layers=None, first=(), last=()), 4)
    assert "rank 1 of the pipeline would hold no parameter" in text


def test_networks_in_another_form() -> None:
    with pytest.raises(ValueError, match=r"plan\.layers=None"):
        layer_names(Net(), plan(layers=None))

    class Plain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([nn.Linear(1, 1)])

    with pytest.raises(ValueError, match=r"Plain lacks \['begin', 'apply_layer', 'finish'\]"):
        layer_names(Plain(), plan(layers="layers"))
