"""A process that ends alone, where several exchanges wait on one stream."""

import time

import pytest

from megatron_lightning.parallel.peers import exchange
from megatron_lightning.parallel.peers.exchange import abandon_exchanges


class Waiting:
    """In place of an exchange: the first of the stream's waits passes by a signal of its own."""

    def __init__(self, name: str, stream: list[str]) -> None:
        self.name, self.stream = name, stream

    def give_signals(self) -> None:
        if self.stream and self.stream[0] == self.name:
            del self.stream[0]

    def is_idle(self) -> bool:
        return not self.stream


def test_exchanges_that_share_a_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = ["tp", "cp", "tp", "cp", "cp", "tp"]
    monkeypatch.setattr(exchange, "holding", [Waiting("cp", stream), Waiting("tp", stream)])
    begin = time.monotonic()
    abandon_exchanges()
    assert stream == []
    assert time.monotonic() - begin < 5


def test_kernels_that_never_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Signals are given for as long as others abort, and a little longer."""
    monkeypatch.setattr(exchange, "_ABANDON_SECONDS", 0.1)
    monkeypatch.setattr(exchange, "holding", [Waiting("tp", ["another"])])
    abandon_exchanges()
    begin = time.monotonic()
    abandon_exchanges(lambda: time.monotonic() > begin + 0.3)
    assert 0.4 <= time.monotonic() - begin < 2
