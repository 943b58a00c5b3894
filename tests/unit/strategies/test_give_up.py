"""A process that ends alone: groups are aborted while exchanges are given signals."""

import threading
import time
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest

from megatron_lightning.parallel.peers import exchange
from megatron_lightning.strategies import process_group


class Device:
    """Kernels of one stream, in order: each waits for a signal, or for the peers of a group."""

    type = "cuda"

    def __init__(self, *kernels: str) -> None:
        self.kernels = list(kernels)
        self.aborted: list[str] = []

    def pass_by(self, kernel: str) -> None:
        while self.kernels and self.kernels[0] == kernel:
            del self.kernels[0]


class Waiting:
    """In place of an exchange."""

    def __init__(self, device: Device) -> None:
        self.device = device

    def give_signals(self) -> None:
        self.device.pass_by("signal")

    def is_idle(self) -> bool:
        return not self.device.kernels


class Broken(Waiting):
    """After a kernel that failed."""

    def is_idle(self) -> bool:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")


class Group:
    """Its abort returns when its kernel has gone."""

    def __init__(self, name: str, device: Device) -> None:
        self.name, self.device = name, device

    def _get_backend(self, device: Any) -> Any:
        return SimpleNamespace(abort=self._abort)

    def _abort(self) -> None:
        until = time.monotonic() + 3
        while self.name in self.device.kernels and time.monotonic() < until:
            self.device.pass_by(self.name)
            time.sleep(0.001)
        self.device.aborted.append(self.name)


def give_up(device: Device, waiting: Waiting, patch: pytest.MonkeyPatch) -> None:
    entered: list[Any] = []
    patch.setattr(exchange, "holding", [waiting])
    patch.setattr(process_group.torch.cuda, "device", lambda of: nullcontext(entered.append(of)))
    mesh: Any = SimpleNamespace(
        device=device, groups=[Group(name, device) for name in ("dp", "tp")]
    )
    before = threading.active_count()
    process_group.abort_groups(mesh)
    assert threading.active_count() == before
    assert device.aborted == ["dp", "tp"]
    assert entered == [device], "a new thread stands on GPU 0"


@pytest.mark.parametrize(
    "kernels", [("signal", "dp", "signal", "tp", "signal"), ("dp", "signal", "tp"), ()]
)
def test_waits_in_any_order(kernels: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    device = Device(*kernels)
    begin = time.monotonic()
    give_up(device, Waiting(device), monkeypatch)
    assert device.kernels == []
    assert time.monotonic() - begin < 2


def test_groups_are_aborted_after_an_error_of_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr(process_group, "warn_once", lambda message, **options: said.append(message))
    device = Device("dp")
    give_up(device, Broken(device), monkeypatch)
    assert "illegal memory access" in said[0]
