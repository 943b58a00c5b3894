"""The index cache: same arrays as without, shared by racing ranks, never a pickle, no folder no
harm.
"""

import pickle
import threading
from pathlib import Path

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


def test_racing_ranks_share_one_entry(tmp_path: Path) -> None:
    start = threading.Barrier(8)
    results: list[np.ndarray] = []

    def build() -> dict[str, np.ndarray]:
        start.wait(10)  # all of them have found no entry
        return {"a": np.arange(1000)}

    def rank() -> None:
        results.append(cached_arrays(tmp_path / "cache", {"x": 1}, build)["a"])

    threads = [threading.Thread(target=rank) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert len(results) == 8
    assert all(np.array_equal(result, np.arange(1000)) for result in results)
    assert len(list((tmp_path / "cache").iterdir())) == 1


def test_a_folder_that_cannot_be_written_is_done_without(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")  # a file where the folder would be: fails even for root
    arrays = cached_arrays(blocked / "cache", {"x": 1}, lambda: {"a": np.arange(3)})
    assert arrays["a"].tolist() == [0, 1, 2]


@pytest.mark.parametrize("victim", ["a.npy", "key.json"])
def test_a_pickle_in_the_cache_is_not_executed(tmp_path: Path, victim: str) -> None:
    cached_arrays(tmp_path / "cache", {"x": 1}, lambda: {"a": np.arange(3)})
    (path,) = (tmp_path / "cache").glob(f"*/{victim}")
    path.write_bytes(pickle.dumps(Marker(tmp_path / "marker")))
    with pytest.raises(ValueError, match=victim.replace(".", r"\.")):
        cached_arrays(tmp_path / "cache", {"x": 1}, lambda: {"a": np.arange(3)})
    assert not (tmp_path / "marker").exists()


def test_a_failing_build_leaves_nothing(tmp_path: Path) -> None:
    def build() -> dict[str, np.ndarray]:
        raise RuntimeError("stop")

    with pytest.raises(RuntimeError, match="stop"):
        cached_arrays(tmp_path / "cache", {"x": 1}, build)
    assert not (tmp_path / "cache").exists()
