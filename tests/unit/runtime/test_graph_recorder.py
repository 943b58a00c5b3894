"""What a recorder keeps of its graphs; `torch.cuda` is stood in for."""

import contextlib
import itertools
from typing import Any

import pytest
import torch

from megatron_lightning.runtime.graph_recorder import CudaRecorder, Replay


class Graph:
    """Notes that it lives, and in which pool it was recorded."""

    alive = 0
    pools: list[int] = []

    def __init__(self) -> None:
        Graph.alive += 1
        self.is_reset = False

    def __del__(self) -> None:
        Graph.alive -= 1

    def capture_begin(self, *, pool: int, capture_error_mode: str) -> None:
        Graph.pools.append(pool)

    def capture_end(self) -> None:
        pass

    def replay(self) -> None:
        assert not self.is_reset

    def reset(self) -> None:
        self.is_reset = True


class Stream:
    """Notes who waits for whom."""

    waits: list[tuple[str, str]] = []

    def __init__(self, name: str) -> None:
        self.name = name

    def wait_stream(self, other: Any) -> None:
        Stream.waits.append((self.name, other.name))


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> CudaRecorder:
    monkeypatch.setattr(Graph, "pools", [])
    monkeypatch.setattr(Stream, "waits", [])
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: Stream("recording"))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: Stream("current"))
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", itertools.count().__next__)
    return CudaRecorder(torch.device("cpu"))


def record(recorder: CudaRecorder) -> Replay:
    return recorder.record(lambda: None, ())[0]


def test_graphs_go_with_the_last_that_replays_them(recorder: CudaRecorder) -> None:
    before = Graph.alive
    replays = [record(recorder) for _ in range(3)]
    assert Graph.alive == before + 3
    del replays[1:]
    assert Graph.alive == before + 1
    replays[0]()
    replays.append(record(recorder))
    assert len(set(Graph.pools)) == 1
    del replays
    assert Graph.alive == before


def test_the_first_replay_comes_after_what_recording_did(recorder: CudaRecorder) -> None:
    """`capture_begin` fills the generators' seeds and offsets, which a replay fills too."""
    Stream.waits.clear()
    record(recorder)
    assert Stream.waits == [("recording", "current"), ("current", "recording")]


def test_a_pool_is_not_used_after_its_graphs(recorder: CudaRecorder) -> None:
    """An allocator refuses to record into a pool that no graph uses any more."""
    for _ in range(2):
        record(recorder)
    assert len(set(Graph.pools)) == 2


def test_graphs_in_use_are_reset_at_the_end(recorder: CudaRecorder) -> None:
    replays = [record(recorder) for _ in range(2)]
    recorder.close()
    for replay in replays:
        with pytest.raises(AssertionError):
            replay()
