"""By what way context ranks exchange heads, and that shared memory is given back at the end."""

from dataclasses import replace
from typing import Any

import pytest

from megatron_lightning.config import ContextConfig
from megatron_lightning.parallel.axes import MeshAxis
from megatron_lightning.parallel.context import neighbours as context_neighbours
from megatron_lightning.parallel.context.neighbours import neighbours
from megatron_lightning.parallel.mesh import ParallelMesh
from megatron_lightning.parallel.peers import memory as peer_memory
from megatron_lightning.parallel.peers.exchange import holding, release_exchanges


class Memory:
    """In place of an exchange through symmetric memory."""

    def __init__(self, axis: MeshAxis, sums: bool) -> None:
        self.sums = sums
        self.axis = axis
        self.kind = "memory"
        self.released = 0
        holding.add(self)

    held_bytes = 0

    def release(self) -> None:
        self.released += 1


class Trials(list[str]):
    """Those that were made; `reason`: why they fail."""

    reason: str | None = None


@pytest.fixture
def tried(monkeypatch: pytest.MonkeyPatch) -> Trials:
    trials = Trials()

    def attempt(
        axis: MeshAxis, device: Any, seconds: float, sums: bool
    ) -> tuple[Memory | None, str | None]:
        trials.append(f"{axis.name} {seconds}")
        return (Memory(axis, sums) if trials.reason is None else None), trials.reason

    monkeypatch.setattr(peer_memory, "_why_not", lambda axis, device: None)
    monkeypatch.setattr(peer_memory, "_try", attempt)
    monkeypatch.setattr(peer_memory, "_agree", lambda axis, reason: reason)
    monkeypatch.setattr(peer_memory, "provide", lambda **settings: None)
    return trials


class Group:
    """In place of a process group."""

    def __init__(self, name: str) -> None:
        self.group_name = name


def place(device: str, group: str) -> ParallelMesh:
    single = ParallelMesh.single(device)
    cp = MeshAxis(name="cp", size=2, ranks=(0, 1), group=Group(group))
    return replace(single, axes={**single.axes, "cp": cp})


def test_one_memory_for_all_layers_is_released(tried: Trials) -> None:
    mesh, config = place("cuda:0", "one"), ContextConfig(form="all_to_all", peer_memory=True)
    first, second = (neighbours(mesh, config, 7.0) for _ in range(2))
    memory: Any = first.memory
    assert not memory.sums
    assert first is second
    assert tried == ["cp 7.0"]
    release_exchanges()
    assert memory.released == 1


@pytest.mark.parametrize(
    ("device", "changes"),
    [("cpu", {"peer_memory": True}), ("cuda:0", {}), ("cuda:0", {"head_groups": 2})],
)
def test_collectives(tried: Trials, device: str, changes: dict[str, Any]) -> None:
    config = ContextConfig(form="all_to_all", **changes)
    assert neighbours(place(device, "two"), config, 7.0).memory is None
    assert tried == []


def test_memory_that_cannot_be_shared(tried: Trials, monkeypatch: pytest.MonkeyPatch) -> None:
    warnings: list[str] = []
    monkeypatch.setattr(context_neighbours, "warn_once", warnings.append)
    tried.reason = "no way"
    mesh, config = place("cuda:0", "three"), ContextConfig(form="all_to_all", peer_memory=True)
    for _ in range(2):  # chunks of layers
        assert neighbours(mesh, config, 7.0).memory is None
        assert "memory (no way), so heads are exchanged by collectives" in warnings.pop()
    assert tried == ["cp 7.0"]


def test_groups_of_heads_that_may_be_one(tried: Trials, monkeypatch: pytest.MonkeyPatch) -> None:
    """How many there are is known in the layers, which use what fits."""
    said: list[str] = []
    monkeypatch.setattr(context_neighbours, "say_once", said.append)
    config = ContextConfig(form="all_to_all", peer_memory=True, head_groups=4)
    assert neighbours(place("cuda:0", "four"), config, 7.0).memory is not None
    assert "context.head_groups=4" in said[0]
