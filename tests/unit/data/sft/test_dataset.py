"""From files to samples."""

import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megatron_lightning.data.sft import (
    Documents,
    ExampleEncoder,
    PackedDataset,
    RecordSource,
    load_documents,
)
from megatron_lightning.data.tokenizer import ByteTokenizer

RECORDS: list[dict[str, Any]] = [
    {"prompt": "abc", "completion": "de"},
    {"prompt": "", "completion": "x"},
    {"prompt": "0123456789", "completion": "ü"},
]
EOD = 256
ENCODED = [
    ([97, 98, 99, 100, 101, EOD], [0, 0, 0, 1, 1, 1]),
    ([120, EOD], [1, 1]),
    ([*b"0123456789", 195, 188, EOD], [0] * 10 + [1] * 3),
]


def load(source: Any, **options: Any) -> Documents:
    return load_documents(RecordSource(source), ExampleEncoder(ByteTokenizer(), None), **options)


def lines(records: list[dict[str, Any]] = RECORDS) -> bytes:
    return b"\n".join(json.dumps(r, ensure_ascii=False).encode() for r in records)


def write_plain(path: Path) -> Path:
    path.with_suffix(".jsonl").write_bytes(b"\n" + lines() + b"\n \n")
    return path.with_suffix(".jsonl")


def write_gzip(path: Path) -> Path:
    with gzip.open(f"{path}.jsonl.gz", "wb") as file:
        file.write(lines())
    return Path(f"{path}.jsonl.gz")


def write_zstandard(path: Path) -> Path:
    import pyarrow as pa

    with pa.CompressedOutputStream(f"{path}.jsonl.zst", "zstd") as file:
        file.write(lines())
    return Path(f"{path}.jsonl.zst")


def write_parquet(path: Path) -> Path:
    import pyarrow as pa
    import pyarrow.parquet as parquet

    parquet.write_table(pa.Table.from_pylist(RECORDS), f"{path}.parquet", row_group_size=2)
    return Path(f"{path}.parquet")


def write_data_set(path: Path) -> Path:
    from datasets import Dataset

    Dataset.from_list(RECORDS).save_to_disk(path)
    return path


@pytest.mark.parametrize(
    "write", [write_plain, write_gzip, write_zstandard, write_parquet, write_data_set]
)
def test_sources(tmp_path: Path, write: Callable[[Path], Path]) -> None:
    check(load(write(tmp_path / "data")))


def test_data_set_objects_and_patterns(tmp_path: Path) -> None:
    from datasets import Dataset

    data = Dataset.from_list(RECORDS)
    check(load(data))
    assert load(data).key == load(Dataset.from_list(RECORDS)).key
    check(load(data.to_iterable_dataset()))
    for number, record in enumerate(RECORDS):
        (tmp_path / f"{number}.jsonl").write_bytes(lines([record]))
    check(load(str(tmp_path / "*.jsonl")))
    check(load([tmp_path / f"{number}.jsonl" for number in range(3)]))
    write_parquet(tmp_path / "hub")
    check(load({"path": "parquet", "data_files": str(tmp_path / "hub.parquet"), "split": "train"}))


def check(documents: Documents) -> None:
    assert len(documents) == 3
    for number, (ids, learned) in enumerate(ENCODED):
        begin, end = documents.offsets[number : number + 2]
        assert documents.tokens[begin:end].tolist() == ids
        assert documents.learned[begin:end].astype(int).tolist() == learned


def test_samples(tmp_path: Path) -> None:
    documents = load(write_plain(tmp_path / "d"))
    data = PackedDataset(documents, 16, pad_id=7)
    assert data.document_numbers(0).tolist() == [2, 1]  # 13 + 2; then 6
    sample = {name: tensor.tolist() for name, tensor in data[0].items()}
    assert sample == {
        "tokens": [*b"0123456789", 195, 188, EOD, 120, EOD, 7],
        "labels": [-100] * 9 + [195, 188, EOD, -100, EOD, -100, -100],
        "loss_mask": [0] * 9 + [1, 1, 1, 0, 1, 0, 0],
        "position_ids": [*range(13), 0, 1, 0],
        "cu_seqlens": [0, 13, 15, 16],
    }
    assert data[1]["cu_seqlens"].tolist() == [0, 6, 16, 16]
    assert data[1]["labels"].tolist() == [-100] * 2 + [100, 101, EOD] + [-100] * 11
    dtypes = [data[0][name].dtype for name in ("tokens", "labels", "position_ids", "loss_mask")]
    assert dtypes == [torch.int64] * 3 + [torch.float32]
    assert data[0]["cu_seqlens"].dtype == torch.int32
    statistics = data.statistics
    assert (statistics.documents, statistics.samples) == (3, 2)
    assert (statistics.tokens, statistics.padding_tokens, statistics.loss_tokens) == (21, 11, 7)
    assert statistics.fill_rate == 21 / 32
    assert "3 documents in 2 samples, 65.6% filled" in str(statistics)


def test_without_packing(tmp_path: Path) -> None:
    data = PackedDataset(load(write_plain(tmp_path / "d")), 16, packing="none")
    assert len(data) == 3
    assert "cu_seqlens" not in data[1]
    assert data[1]["loss_mask"].tolist() == [1] + [0] * 15
    assert data[1]["position_ids"].tolist() == list(range(16))


def test_in_order(tmp_path: Path) -> None:
    data = PackedDataset(load(write_plain(tmp_path / "d")), 16, packing="in_order")
    assert [data.document_numbers(n).tolist() for n in range(2)] == [[0, 1], [2]]
    with pytest.raises(IndexError):
        data[2]


def test_documents_of_a_multiple(tmp_path: Path) -> None:
    data = PackedDataset(load(write_plain(tmp_path / "d")), 16, document_multiple=4)
    assert [data.document_numbers(n).tolist() for n in range(2)] == [[2], [0, 1]]
    assert data[1]["cu_seqlens"].tolist() == [0, 8, 12, 16]
    assert data[1]["tokens"].tolist()[6:10] == [0, 0, 120, EOD]
    assert data[1]["loss_mask"].tolist() == [0, 0, 1, 1, 1, 0, 0, 0, 1] + [0] * 7


def test_truncation(tmp_path: Path) -> None:
    documents = load(write_plain(tmp_path / "d"))
    data = PackedDataset(documents, 4)
    statistics = data.statistics  # the third keeps no token to learn, the first keeps one
    assert (statistics.documents, statistics.truncated_documents) == (2, 1)
    assert (statistics.truncated_tokens, statistics.loss_tokens) == (2, 2)
    assert (statistics.dropped_documents, statistics.dropped_tokens) == (1, 13)
    assert data[0]["labels"].tolist() == [-100, -100, 100, -100]
    assert data.read(0)[1] == (0, 0, 1, 1, 0, 1)  # one document, no padding, truncated
    assert data.read(1)[1] == (0, 0, 1, 1, 2, 0)
    dropped = PackedDataset(documents, 6, truncation="drop").statistics
    assert (dropped.documents, dropped.truncated_documents, dropped.dropped_tokens) == (2, 0, 13)
    with pytest.raises(ValueError, match=r"document 2 has 13 tokens, more than seq_length=6 \(so"):
        PackedDataset(documents, 6, truncation="fail")


def test_no_loss_crosses_a_boundary_and_no_token_is_lost(tmp_path: Path) -> None:
    random = np.random.default_rng(3)
    words = ["".join(chr(97 + c) for c in random.integers(0, 26, n)) for n in range(1, 200)]
    records = [
        {"prompt": random.choice(words[:60]), "completion": random.choice(words)}
        for _ in range(300)
    ]
    documents = load([write_records(tmp_path / "d.jsonl", records)])
    data = PackedDataset(documents, 128)
    seen = []
    loss = tokens = 0
    for number in range(len(data)):
        sample = data[number]
        ends = sample["cu_seqlens"].tolist()
        held = data.document_numbers(number).tolist()
        for document, begin, end in zip(held, ends, ends[1:], strict=False):
            start = documents.offsets[document]
            ids = torch.from_numpy(documents.tokens[start : start + end - begin].astype(np.int64))
            assert torch.equal(sample["tokens"][begin:end], ids)
            mask = sample["loss_mask"][begin:end].bool()
            assert not mask[-1]
            assert torch.equal(sample["labels"][begin : end - 1][mask[:-1]], ids[1:][mask[:-1]])
            assert torch.equal(sample["position_ids"][begin:end], torch.arange(end - begin))
        assert not sample["loss_mask"][ends[len(held)] :].any()
        assert (sample["labels"] >= 0).equal(sample["loss_mask"] > 0)
        seen += held
        loss += int(sample["loss_mask"].sum())
        tokens += ends[len(held)]
    statistics = data.statistics
    assert len(set(seen)) == len(seen) == statistics.documents
    assert statistics.documents + statistics.dropped_documents == 300
    assert (loss, tokens) == (statistics.loss_tokens, statistics.tokens)
    total = statistics.tokens + statistics.truncated_tokens + statistics.dropped_tokens
    assert total == len(documents.tokens)


def write_records(path: Path, records: list[dict[str, Any]]) -> str:
    path.write_bytes(lines(records))
    return str(path)


def test_bad_examples_are_named_or_counted(tmp_path: Path) -> None:
    path = tmp_path / "d.jsonl"
    path.write_bytes(lines() + b'\n{"prompt": "x"}\nno json\n[1]\n' + lines(RECORDS[:1]))
    with pytest.raises(ValueError, match=r"d.jsonl:4: no field completion.*on_bad_example"):
        load(path)
    documents = load(path, on_bad_example="skip")
    assert (len(documents), documents.skipped) == (4, 3)
    assert PackedDataset(documents, 16).statistics.skipped_examples == 3
    path.write_bytes(b"{}\n")
    with pytest.raises(ValueError, match=r"no example in the data \(1 skipped\)"):
        load(path, on_bad_example="skip")


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("x")
    (tmp_path / "b.parquet").write_text("no parquet")
    (tmp_path / "c.jsonl.gz").write_text("no gzip")
    whole = write_gzip(tmp_path / "e").read_bytes()
    (tmp_path / "f.jsonl.gz").write_bytes(whole[:-20])
    for source, message in (
        (tmp_path / "a.csv", r"a.csv is none of the kinds"),
        (tmp_path / "b.parquet", r"b.parquet can't be read"),
        (tmp_path / "c.jsonl.gz", r"c.jsonl.gz can't be read"),
        (tmp_path / "f.jsonl.gz", r"f.jsonl.gz"),
        (str(tmp_path / "*.nothing"), r"no file matches"),
        ([], r"train names no file"),
        ({"path": "x"}, r"need a path and a split"),
        (3, r"train=3: give files"),
    ):
        with pytest.raises(ValueError, match=message):
            load(source)
    with pytest.raises(FileNotFoundError, match=r"no file .*missing.jsonl"):
        load(tmp_path / "missing.jsonl")


def test_the_cache_is_keyed_by_content(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, cache = write_plain(tmp_path / "d"), tmp_path / "cache"
    first = PackedDataset(load(path, cache_dir=cache), 16, cache_dir=cache)
    moved = path.rename(tmp_path / "moved.jsonl")
    with monkeypatch.context() as patch:  # nothing is rendered or packed again
        patch.setattr(ExampleEncoder, "render", None)
        patch.setattr(PackedDataset, "_plan", None)
        again = PackedDataset(load(moved, cache_dir=cache), 16, cache_dir=cache)
    assert again.fingerprint == first.fingerprint
    assert again.statistics == first.statistics
    for number in range(2):
        for name, tensor in first[number].items():
            assert torch.equal(again[number][name], tensor)
    moved.write_bytes(lines(RECORDS[:2]))
    other = PackedDataset(load(moved, cache_dir=cache), 16, cache_dir=cache)
    assert other.fingerprint != first.fingerprint
    assert other.statistics.documents == 2
    longer = PackedDataset(load(moved, cache_dir=cache), 32, cache_dir=cache)
    assert longer.fingerprint != other.fingerprint


def test_pickles_in_packed_data_are_not_loaded(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """C37: a cached array that is a pickle is named, and made anew without being loaded."""
    path, cache, marker = write_plain(tmp_path / "d"), tmp_path / "cache", tmp_path / "marker"

    class Marks:
        def __reduce__(self) -> Any:
            return Path.touch, (marker,)

    first = PackedDataset(load(path, cache_dir=cache), 16, cache_dir=cache)
    arrays = sorted(cache.rglob("*.npy"))
    assert len(arrays) == 7
    for file in arrays:
        file.unlink()
        np.save(file, np.array([Marks()], dtype=object), allow_pickle=True)
        again = PackedDataset(load(path, cache_dir=cache), 16, cache_dir=cache)
        assert f"{file} is damaged" in caplog.text
        assert again.statistics == first.statistics
        assert torch.equal(again[0]["labels"], first[0]["labels"])
    assert not marker.exists()


def test_options_out_of_range(tmp_path: Path) -> None:
    documents = load(write_plain(tmp_path / "d"))
    with pytest.raises(ValueError, match="document_multiple=3 must divide seq_length=16"):
        PackedDataset(documents, 16, document_multiple=3)
    with pytest.raises(ValueError, match="truncation='left' is unknown"):
        PackedDataset(documents, 16, truncation="left")  # type: ignore[arg-type]
