"""Mapped, plainly read and remote corpora are the same corpus; blocks are kept, shared, bounded."""

import importlib.util
import itertools
import multiprocessing
import os
import pickle
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest
from fsspec.implementations.local import LocalFileSystem

from megatron_lightning.data import (
    BlockCache,
    GPTDataset,
    IndexedDataset,
    IndexedDatasetWriter,
    PretrainingDataModule,
    corpus_info,
    preprocess_jsonl,
    read_card,
)
from tests.unit.data.test_indexed import damage

SMALL = {"block_bytes": 64, "max_bytes": 1 << 20}


class Counted(LocalFileSystem):
    """Local files under another name; every fetch is a line of `fetches` beside the file."""

    protocol = "counted"

    def cat_file(
        self, path: str, start: int | None = None, end: int | None = None, **_: Any
    ) -> bytes:
        plain = self._strip_protocol(path)
        with (Path(plain).parent / "fetches").open("a") as log:
            log.write(f"{Path(plain).suffix} {start} {end}\n")
        time.sleep(0.002)  # so that ranks meet
        return super().cat_file(path, start=start, end=end)


fsspec.register_implementation("counted", Counted, clobber=True)


@pytest.fixture
def prefix(tmp_path: Path) -> Path:
    random = np.random.RandomState(0)
    with IndexedDatasetWriter(tmp_path / "c", "uint16") as writer:
        for length in random.randint(0, 90, 40).tolist():
            writer.add_document(random.randint(0, 60000, length))
    return tmp_path / "c"


@pytest.fixture(params=["file", "file://", "memory://", "counted://"])
def other(request: pytest.FixtureRequest, prefix: Path) -> Iterator[IndexedDataset]:
    if request.param == "file":
        yield IndexedDataset(prefix, access="file")
        return
    cache = BlockCache(folder=str(prefix.parent / "blocks"), **SMALL)
    if request.param == "memory://":
        memory = fsspec.filesystem("memory")
        for suffix in (".bin", ".idx"):
            memory.pipe_file(f"/corpora/c{suffix}", Path(f"{prefix}{suffix}").read_bytes())
        yield IndexedDataset("memory://corpora/c", cache=cache)
        memory.rm("/corpora", recursive=True)
        return
    yield IndexedDataset(f"{request.param}{prefix}", cache=cache)


def test_every_access_gives_the_same(prefix: Path, other: IndexedDataset) -> None:
    mapped = IndexedDataset(prefix)
    assert (len(other), other.num_tokens, other.dtype) == (len(mapped), mapped.num_tokens, "u2")
    assert np.array_equal(other.sequence_lengths, mapped.sequence_lengths)
    assert np.array_equal(other.document_indices, mapped.document_indices)
    for _ in range(2):  # blocks fetched, then found
        for one, two in zip(mapped[:], other[:], strict=True):
            assert np.array_equal(one, two)
            assert not two.flags.writeable
    assert other.get(3, 2, 5).tolist() == mapped[3][2:7].tolist()
    ours = GPTDataset(other, range(len(other)), 100, 16, 5)
    theirs = GPTDataset(mapped, range(len(mapped)), 100, 16, 5)
    for index in range(len(ours)):
        assert np.array_equal(ours[index]["tokens"], theirs[index]["tokens"])


def read_all(corpora: list[IndexedDataset], results: Any) -> None:
    results.put([b"".join(part.tobytes() for part in corpus[:]) for corpus in corpora])


@pytest.mark.parametrize("method", ["fork", pytest.param("spawn", marks=pytest.mark.slow)])
def test_it_travels_into_worker_processes(prefix: Path, method: str) -> None:
    cache = BlockCache(folder=str(prefix.parent / "blocks"), **SMALL)
    corpora = [
        IndexedDataset(prefix),
        IndexedDataset(prefix, access="file"),
        IndexedDataset(f"file://{prefix}", cache=cache),
    ]
    for corpus in corpora:
        assert len(pickle.dumps(corpus)) < 600
        corpus.get(0)  # so that something is open
    context = multiprocessing.get_context(method)
    results = context.Queue()
    workers = [
        context.Process(target=read_all, args=(corpora, results))
        for _ in range(2 if method == "fork" else 1)
    ]
    for worker in workers:
        worker.start()
    expected = Path(f"{prefix}.bin").read_bytes()
    for _ in workers:
        assert results.get(timeout=120) == [expected] * 3
    for worker in workers:
        worker.join(20)
        assert worker.exitcode == 0


def fetches(prefix: Path) -> list[str]:
    return (prefix.parent / "fetches").read_text().splitlines()


def open_and_read(name: str, folder: str, results: Any) -> None:
    cache = BlockCache(folder=folder, **SMALL)
    read_all([IndexedDataset(name, cache=cache)], results)


def test_ranks_that_share_a_folder_fetch_every_block_once(prefix: Path) -> None:
    context = multiprocessing.get_context("fork")
    results, folder = context.Queue(), str(prefix.parent / "blocks")
    ranks = [
        context.Process(target=open_and_read, args=(f"counted://{prefix}", folder, results))
        for _ in range(4)
    ]
    for rank in ranks:
        rank.start()
    got = [results.get(timeout=60)[0] for _ in ranks]
    for rank in ranks:
        rank.join(20)
    assert got == [Path(f"{prefix}.bin").read_bytes()] * 4
    lines = fetches(prefix)
    assert len(lines) == len(set(lines))
    IndexedDataset(f"counted://{prefix}", cache=BlockCache(folder=folder, **SMALL))[:]
    assert len(fetches(prefix)) == len(lines)  # a later run finds all of it


def test_the_folder_stays_within_its_bound(prefix: Path) -> None:
    folder = prefix.parent / "blocks"
    cache = BlockCache(folder=str(folder), block_bytes=64, max_bytes=2000)
    corpus, mapped = IndexedDataset(f"counted://{prefix}", cache=cache), IndexedDataset(prefix)
    assert mapped.num_tokens * 2 > 3000
    for index in range(len(corpus)):
        assert np.array_equal(corpus[index], mapped[index])
        held = sum(p.stat().st_size for p in folder.iterdir() if not p.name.startswith("."))
        assert held <= 2000
    assert held > 1000
    with pytest.raises(ValueError, match="at least two blocks"):
        BlockCache(max_bytes=10, block_bytes=8)


def test_a_damaged_block_is_fetched_again(prefix: Path) -> None:
    folder = prefix.parent / "blocks"
    cache = BlockCache(folder=str(folder), **SMALL)
    mapped = IndexedDataset(prefix)
    corpus = IndexedDataset(f"counted://{prefix}", cache=cache)
    corpus[:]
    for path in folder.iterdir():
        path.write_bytes(b"")  # what is left by a disk that was full or lost power
    for one, two in zip(IndexedDataset(corpus.prefix, cache=cache)[:], mapped[:], strict=True):
        assert np.array_equal(one, two)


def test_without_a_folder_blocks_are_fetched_each_time(
    prefix: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (prefix.parent / "taken").write_text("")
    cache = BlockCache(folder=str(prefix.parent / "taken" / "blocks"), **SMALL)
    corpus = IndexedDataset(f"counted://{prefix}", cache=cache)
    for one, two in zip(corpus[:], IndexedDataset(prefix)[:], strict=True):
        assert np.array_equal(one, two)
    assert "block cache" in caplog.text


def test_a_replaced_remote_file_is_not_mixed_up(prefix: Path) -> None:
    cache = BlockCache(folder=str(prefix.parent / "blocks"), **SMALL)
    name = f"counted://{prefix}"
    before = IndexedDataset(name, cache=cache)[:]
    with IndexedDatasetWriter(prefix, "uint16") as writer:
        for part in before:
            writer.add_document(part[::-1])
    for one, two in zip(IndexedDataset(name, cache=cache)[:], before, strict=False):
        assert np.array_equal(one, two[::-1])


@pytest.mark.parametrize("access", ["file", "counted://"])
@pytest.mark.parametrize("kind", ["index one byte short", "data one byte short", "zero-byte index"])
def test_c45_damage_is_refused_in_every_way_of_reading(
    tmp_path: Path, access: str, kind: str
) -> None:
    with IndexedDatasetWriter(tmp_path / "a", "int32") as writer:
        for document in ([1, 2, 3], [4], [5, 6]):
            writer.add_document(document)
    path, sizes = damage(tmp_path / "a", kind)
    cache = BlockCache(folder=str(tmp_path / "blocks"), **SMALL)
    name = str(tmp_path / "a") if access == "file" else f"{access}{tmp_path}/a"
    with pytest.raises(ValueError, match="bytes") as error:
        IndexedDataset(name, access="file", cache=cache)
    assert str(path) in str(error.value)
    assert all(str(size) in str(error.value) for size in sizes)


def test_a_file_that_shrinks_while_it_is_read(prefix: Path) -> None:
    corpus = IndexedDataset(prefix, access="file")
    os.truncate(f"{prefix}.bin", 10)
    with pytest.raises(ValueError, match="ended at byte 10"):
        corpus[:]


def first_batches(paths: str, count: int = 3, **options: Any) -> list[list[list[int]]]:
    data = PretrainingDataModule(paths, 8, 2, 4, num_train_samples=40, split="9,1,0", **options)
    data.setup("fit")
    return [b["tokens"].tolist() for b in itertools.islice(data.train_dataloader(), count)]


@pytest.mark.parametrize("workers", [0, 2])
def test_the_data_module_reads_all_of_them(prefix: Path, workers: int) -> None:
    expected = first_batches(str(prefix))
    cache = BlockCache(folder=str(prefix.parent / "blocks"), **SMALL)
    options: dict[str, Any] = {"num_workers": workers, "cache_dir": prefix.parent / "indexes"}
    assert first_batches(str(prefix), corpus_access="file", **options) == expected
    assert first_batches(f"counted://{prefix}", block_cache=cache, **options) == expected
    lines = fetches(prefix)
    assert len(lines) == len(set(lines))


def test_the_data_module_explains_wrong_remote_places() -> None:
    paths = ["nonsense://c", "memory://none/c"]
    if importlib.util.find_spec("s3fs") is None:
        paths.append("s3://bucket/c")
    errors = PretrainingDataModule(paths, 8, 2, 4).validate()
    assert errors[0] == "paths: nonsense://c: Protocol not known: nonsense"
    assert errors[1].startswith("paths: no memory://none/c.bin")
    assert len(errors) == len(paths)
    assert all("s3fs" in error for error in errors[2:])
    with pytest.raises(ValueError, match='corpus_access="ram" must be'):
        PretrainingDataModule("c", 8, 2, 4, corpus_access="ram")  # type: ignore[arg-type]


def test_wrong_places_are_explained(tmp_path: Path) -> None:
    with pytest.raises(
        FileNotFoundError, match=r"no memory://none/c\.bin and memory://none/c\.idx"
    ):
        IndexedDataset("memory://none/c")
    with pytest.raises(ValueError, match="Protocol not known: nonsense"):
        IndexedDataset("nonsense://c")
    with pytest.raises(ValueError, match='access="ram" must be'):
        IndexedDataset(tmp_path / "c", access="ram")  # type: ignore[arg-type]


def test_card_and_info_of_a_remote_corpus(tmp_path: Path) -> None:
    (tmp_path / "t.jsonl").write_text('{"text": "abc"}\n')
    card = preprocess_jsonl(tmp_path / "t.jsonl", tmp_path / "c", "bytes")
    assert read_card(f"file://{tmp_path}/c") == card
    assert corpus_info(f"file://{tmp_path}/c").tokens == 4
