"""Connections between ranks, as threads of one process."""

import os
import socket
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from megatron_lightning.strategies import lifeline
from megatron_lightning.strategies.lifeline import Lifeline, Report


class Group:
    """Broadcast of rank 0's object among threads."""

    def __init__(self) -> None:
        self._ready, self._value = threading.Event(), None

    def broadcast(self, value: Any) -> Any:
        if value is not None:
            self._value = value
            self._ready.set()
        assert self._ready.wait(10)
        return self._value


@pytest.fixture
def ended(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Takes down who would have ended its process."""
    left: list[int] = []
    monkeypatch.setattr(lifeline, "leave_at_once", lambda status=1: left.append(status))
    monkeypatch.setattr(lifeline, "GRACE_SECONDS", 0.2)
    monkeypatch.setattr(lifeline, "BUSY_SECONDS", 0.2)
    return left


@pytest.fixture
def lines(ended: list[int]) -> Iterator[list[Lifeline]]:
    """Three connected ranks."""
    group, made = Group(), {}

    def connect(rank: int) -> None:
        made[rank] = Lifeline.open(rank, 3, "127.0.0.1", group.broadcast)

    threads = [threading.Thread(target=connect, args=(rank,)) for rank in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    yield [made[rank] for rank in range(3)]
    for line in made.values():
        line.close()


@pytest.mark.parametrize("failing", [0, 1])
def test_all_ranks_hear_of_the_first_failure(
    lines: list[Lifeline], ended: list[int], failing: int
) -> None:
    first = Report(rank=failing, reason="ValueError: boom", kind="ValueError", step=3)
    lines[failing].report(first)
    for rank, line in enumerate(lines):
        assert line.news(5) == (None if rank == failing else first)
    lines[2].report(Report(rank=2, reason="KeyError: later", kind="KeyError", step=3))
    assert lines[2].news(0) == first
    assert not lines[0].all_alike(0.3)


def test_ranks_that_do_not_end_are_ended(lines: list[Lifeline], ended: list[int]) -> None:
    lines[1].report(Report(rank=1, reason="ValueError: boom", kind="ValueError"))
    for line in (lines[0], lines[2]):
        assert line.news(5) is not None
    threading.Event().wait(1.0)
    assert ended == [1, 1]  # ranks 0 and 2; rank 1 is left to itself


def test_ranks_that_end_by_themselves_are_left_alone(
    lines: list[Lifeline], ended: list[int]
) -> None:
    lines[1].report(Report(rank=1, reason="ValueError: boom", kind="ValueError"))
    for line in (lines[0], lines[2]):
        assert line.news(5) is not None
        line.close()
    threading.Event().wait(0.6)
    assert ended == []


@pytest.mark.parametrize("gone", [0, 2])
def test_a_process_that_is_gone(lines: list[Lifeline], ended: list[int], gone: int) -> None:
    lines[gone]._over.set()  # a killed process passes nothing on
    for connection in lines[gone]._peers.values():
        connection.shutdown(socket.SHUT_RDWR)  # what the kernel does for it
    (other, *_) = [rank for rank in (1, 0) if rank != gone]
    news = lines[other].news(5)
    assert news is not None
    assert news.rank == gone
    assert "without a word" in news.reason


def test_leaving_in_peace_is_no_failure(lines: list[Lifeline], ended: list[int]) -> None:
    lines[2].close()
    lines[0].close()
    assert lines[1].news(1.5) is None
    assert ended == []


def test_all_ranks_fail_alike(lines: list[Lifeline], ended: list[int]) -> None:
    for rank, line in enumerate(lines):
        line.report(Report(rank=rank, reason=f"ValueError: {rank}", kind="ValueError", step=5))
    assert all(line.all_alike(5) for line in lines)


@pytest.mark.parametrize("odd", [dict(kind=""), dict(step=4)])
def test_another_kind_or_step_is_not_alike(
    lines: list[Lifeline], ended: list[int], odd: dict[str, Any]
) -> None:
    for rank, line in enumerate(lines):
        changes = odd if rank == 2 else {}
        line.report(Report(**dict(rank=rank, reason="x", kind="ValueError", step=5) | changes))
    assert not lines[0].all_alike(0.5)


def test_strangers_are_turned_away(ended: list[int]) -> None:
    """Rank 0 takes only who knows the token, and closes its port afterwards."""
    group = Group()
    made: list[Lifeline] = []
    rank0 = threading.Thread(
        target=lambda: made.append(Lifeline.open(0, 2, "127.0.0.1", group.broadcast))
    )
    rank0.start()
    port, _ = group.broadcast(None)
    stranger = socket.create_connection(("127.0.0.1", port))
    stranger.sendall(b"let-me-in 1\n")
    assert stranger.recv(10) == b""
    made.append(Lifeline.open(1, 2, "127.0.0.1", group.broadcast))
    rank0.join(10)
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port))
    for line in made:
        line.close()
    stranger.close()
    assert os.getpid()
