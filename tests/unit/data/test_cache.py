"""The index cache: same arrays as without, shared by racing ranks, never a pickle, no folder no
harm.
"""

import contextlib
import multiprocessing
import pickle
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron_lightning.data import GPTDataset, IndexedDataset, IndexedDatasetWriter
from megatron_lightning.data.cache import cached_arrays
from tests.unit.data.test_indexed import Marker


@pytest.fixture
def indexed(tmp_path: Path) -> IndexedDataset:
    with IndexedDatasetWriter(tmp_path / "corpus", "uint16") as writer:
        for length in (30, 1, 17, 55):
            writer.add_document(range(length))
    return IndexedDataset(tmp_path / "corpus")


def test_cached_indexes_equal_built_ones(indexed: IndexedDataset, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    plain = GPTDataset(indexed, range(4), 60, 5, 7)
    for _ in range(2):
        cached = GPTDataset(indexed, range(4), 60, 5, 7, cache_dir=cache)
        for name in ("document_index", "sample_index", "shuffle_index"):
            assert np.array_equal(getattr(plain, name), getattr(cached, name))
            assert getattr(plain, name).dtype == getattr(cached, name).dtype
        assert cached[11]["tokens"].tolist() == plain[11]["tokens"].tolist()
    assert len(list(cache.iterdir())) == 1
    GPTDataset(indexed, range(4), 60, 5, 8, cache_dir=cache)
    GPTDataset(indexed, range(1, 4), 60, 5, 7, cache_dir=cache)
    assert len(list(cache.iterdir())) == 3


def race_in_threads(cache: Path, wait_in_build: bool) -> int:
    """Lets eight threads ask for one entry at once; returns how many built it."""
    start = threading.Barrier(8)
    built: list[int] = []
    results: list[np.ndarray] = []

    def build() -> dict[str, np.ndarray]:
        if wait_in_build:
            start.wait(10)  # all of them have found no entry
        built.append(1)
        return {"a": np.arange(1000)}

    def rank() -> None:
        if not wait_in_build:
            start.wait(10)
        results.append(cached_arrays(cache, {"x": 1}, build)["a"])

    threads = [threading.Thread(target=rank) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert len(results) == 8
    assert all(np.array_equal(result, np.arange(1000)) for result in results)
    assert len(list(cache.iterdir())) == 1
    return len(built)


def test_racing_ranks_share_one_entry(tmp_path: Path) -> None:
    assert race_in_threads(tmp_path / "cache", wait_in_build=False) == 1


def test_a_folder_that_cannot_be_written_is_done_without(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")  # a file where the folder would be: fails even for root
    arrays = cached_arrays(blocked / "cache", {"x": 1}, lambda: {"a": np.arange(3)})
    assert arrays["a"].tolist() == [0, 1, 2]


def damage(path: Path, kind: str, marker: Path) -> None:
    content = path.read_bytes()
    if kind == "pickle":
        path.write_bytes(pickle.dumps(Marker(marker)))
    elif kind == "cut short":
        path.write_bytes(content[:-1])
    elif kind == "zeros":
        path.write_bytes(bytes(len(content)))
    elif kind == "one bit":
        path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    else:
        path.unlink()


@pytest.mark.parametrize("kind", ["pickle", "cut short", "zeros", "one bit", "missing"])
@pytest.mark.parametrize("victim", ["a.npy", "key.json"])
def test_c37_a_damaged_entry_is_built_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, victim: str, kind: str
) -> None:
    """Never unpickled, never believed: the file is named, and the entry is a good one again."""
    for _ in range(2):
        cached_arrays(tmp_path / "cache", {"x": 1}, lambda: {"a": np.arange(3)})
    assert not caplog.records
    (path,) = (tmp_path / "cache").glob(f"*/{victim}")
    damage(path, kind, tmp_path / "marker")
    for _ in range(2):
        arrays = cached_arrays(tmp_path / "cache", {"x": 1}, lambda: {"a": np.arange(3)})
        assert arrays["a"].tolist() == [0, 1, 2]
    assert not (tmp_path / "marker").exists()
    assert sorted(p.name for p in path.parent.iterdir()) == ["a.npy", "key.json"]
    assert len(list((tmp_path / "cache").iterdir())) == 1
    named = [record.getMessage() for record in caplog.records]
    assert all(victim in text for text in named)
    assert named or (kind, victim) in [("missing", "key.json"), ("one bit", "key.json")]


def race(folder: str, rank: int, start: Any, results: Any, damaged: bool) -> None:
    start.wait(20)
    for number in range(12):
        built: list[int] = []

        def build(number: int = number, built: list[int] = built) -> dict[str, np.ndarray]:
            built.append(1)
            return {"a": np.arange(2000) + number, "b": np.array([number])}

        arrays = cached_arrays(folder, {"number": number}, build)
        right = arrays["a"].tolist() == list(range(number, number + 2000))
        results.put((rank, number, right and arrays["b"][0] == number, len(built)))
        if damaged and rank == 0:  # while others read
            for path in Path(folder).glob("*/b.npy"):
                bad = path.with_name("bad")
                with contextlib.suppress(FileNotFoundError):  # moved away already
                    bad.write_bytes(b"damaged")
                    bad.replace(path)  # not in place: others have the old one mapped


@pytest.mark.parametrize("damaged", [False, True])
def test_processes_that_race_all_get_the_right_arrays(tmp_path: Path, damaged: bool) -> None:
    """No process is told to be the first; with `damaged` one of them also breaks entries."""
    context = multiprocessing.get_context("fork")
    start, results = context.Barrier(6), context.Queue()
    ranks = [
        context.Process(target=race, args=(str(tmp_path / "cache"), rank, start, results, damaged))
        for rank in range(6)
    ]
    for rank in ranks:
        rank.start()
    got = [results.get(timeout=60) for _ in range(6 * 12)]
    for rank in ranks:
        rank.join(20)
        assert rank.exitcode == 0
    assert all(right for _, _, right, _ in got)
    if not damaged:  # one builds, the others wait for it
        assert sum(built for *_, built in got) == 12
        assert len(list((tmp_path / "cache").iterdir())) == 12


def test_without_locks_every_rank_builds_and_one_entry_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a file system that knows no locks."""

    def refuse(*_: object) -> None:
        raise OSError("no locks here")

    monkeypatch.setattr("fcntl.flock", refuse)
    assert race_in_threads(tmp_path / "cache", wait_in_build=True) == 8


def test_a_read_only_folder_is_read_and_done_without(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Root may write anywhere, so the refusal is put in where the folder is made."""
    cache = tmp_path / "cache"
    cached_arrays(cache, {"x": 1}, lambda: {"a": np.arange(3)})

    def refuse(self: Path, *_: object, **__: object) -> None:
        raise PermissionError(f"read-only: {self}")

    def never() -> dict[str, np.ndarray]:
        raise AssertionError("it is in the cache")

    for name in ("mkdir", "rename", "unlink"):
        monkeypatch.setattr(Path, name, refuse)
    assert cached_arrays(cache, {"x": 1}, never)["a"].tolist() == [0, 1, 2]
    assert cached_arrays(cache, {"x": 2}, lambda: {"a": np.arange(4)})["a"].tolist() == [0, 1, 2, 3]
    assert len([p for p in cache.iterdir() if not p.name.startswith(".")]) == 1


def test_a_failing_build_leaves_nothing(tmp_path: Path) -> None:
    def build() -> dict[str, np.ndarray]:
        raise RuntimeError("stop")

    with pytest.raises(RuntimeError, match="stop"):
        cached_arrays(tmp_path / "cache", {"x": 1}, build)
    assert not list((tmp_path / "cache").iterdir())
