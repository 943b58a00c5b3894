"""The file format: what a right pair looks like, and that every damage is refused with path and
sizes.
"""

import dataclasses
import pickle
import struct
from pathlib import Path

import numpy as np
import pytest

from megatron_lightning.data import (
    GPTDataset,
    IndexedDataset,
    IndexedDatasetWriter,
    best_dtype,
    merge,
    preprocess_jsonl,
    read_card,
    split_documents,
    write_card,
)
from megatron_lightning.data.indexed import check_digests


def write(prefix: Path, documents: list[list[int]], dtype: str = "int32") -> Path:
    with IndexedDatasetWriter(prefix, dtype) as writer:
        for document in documents:
            writer.add_document(document)
    return prefix


def contents(prefix: Path) -> list[list[int]]:
    data = IndexedDataset(prefix)
    return [data.get(i).tolist() for i in range(len(data))]


def test_c45_standard_index_of_three_documents(tmp_path: Path) -> None:
    write(tmp_path / "a", [[1, 2, 3], [4], [5, 6]])
    raw = (tmp_path / "a.idx").read_bytes()
    assert len(raw) == 102  # 34 + 12 + 24 + 32
    expected = b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, 4, 3, 4)
    expected += struct.pack("<3i3q4q", 3, 1, 2, 0, 12, 16, 0, 1, 2, 3)
    assert raw == expected
    assert (tmp_path / "a.bin").read_bytes() == struct.pack("<6i", 1, 2, 3, 4, 5, 6)


@pytest.mark.parametrize("dtype", ["u1", "i1", "i2", "i4", "i8", "f8", "f4", "u2"])
def test_every_type_round_trips(tmp_path: Path, dtype: str) -> None:
    write(tmp_path / "a", [[1, 2], [], [100]], dtype)
    data = IndexedDataset(tmp_path / "a")
    assert data.dtype == np.dtype(dtype)
    assert [data.get(i).tolist() for i in range(2)] == [[1, 2], [100]]
    assert data.document_indices.tolist() == [0, 1, 1, 2]
    assert data.sequence_lengths.tolist() == [2, 1]
    assert data.num_tokens == 3


def test_documents_of_several_sequences(tmp_path: Path) -> None:
    with IndexedDatasetWriter(tmp_path / "a", "uint16") as writer:
        writer.add_document([1, 2, 3], lengths=[1, 0, 2])
        writer.add_document([4])
    data = IndexedDataset(tmp_path / "a")
    assert contents(tmp_path / "a") == [[1], [], [2, 3], [4]]
    assert data.document_indices.tolist() == [0, 3, 4]


def test_get_reads_parts_and_refuses_what_is_not_there(tmp_path: Path) -> None:
    data = IndexedDataset(write(tmp_path / "a", [[1, 2, 3, 4], [5, 6]]))
    assert data.get(0, 1).tolist() == [2, 3, 4]
    assert data.get(0, 1, 2).tolist() == [2, 3]
    assert data.get(1, 2).tolist() == []
    for index, offset, length in [(2, 0, None), (-1, 0, None), (0, 5, None), (1, 1, 2), (0, 2, -1)]:
        with pytest.raises(IndexError, match="a"):
            data.get(index, offset, length)
    with pytest.raises(ValueError, match="read-only"):
        data.get(0)[0] = 9


def test_empty_corpus(tmp_path: Path) -> None:
    data = IndexedDataset(write(tmp_path / "a", []))
    assert (len(data), data.num_tokens) == (0, 0)
    assert data.document_indices.tolist() == [0]


def test_travels_by_path(tmp_path: Path) -> None:
    data = IndexedDataset(write(tmp_path / "a", [[7] * 1000]))
    blob = pickle.dumps(data)
    assert len(blob) < 300
    assert pickle.loads(blob).get(0).tolist() == [7] * 1000


def damage(prefix: Path, kind: str) -> tuple[Path, list[int]]:
    """Damages a pair; returns the file to be blamed and the sizes the message must name."""
    index, tokens = prefix.with_suffix(".idx"), prefix.with_suffix(".bin")
    raw = index.read_bytes()
    if kind == "index one byte short":
        index.write_bytes(raw[:-1])
        return index, [101, 102]
    if kind == "data one byte short":
        tokens.write_bytes(tokens.read_bytes()[:-1])
        return tokens, [23, 24]
    if kind == "index of another file":
        other = write(prefix.with_name("other"), [[1], [2], [3]])
        index.write_bytes(other.with_suffix(".idx").read_bytes())
        return tokens, [24, 12]
    if kind == "zero-byte index":
        index.write_bytes(b"")
        return index, [0, 34]
    if kind == "truncated header":
        index.write_bytes(raw[:20])
        return index, [20, 34]
    if kind == "multimodal":
        index.write_bytes(raw + b"\x00\x00\x00")
        return index, [105, 102]
    raise AssertionError(kind)


@pytest.mark.parametrize(
    "kind",
    [
        "index one byte short",
        "data one byte short",
        "index of another file",
        "zero-byte index",
        "truncated header",
        "multimodal",
    ],
)
def test_c45_wrong_sizes_are_named(tmp_path: Path, kind: str) -> None:
    prefix = write(tmp_path / "a", [[1, 2, 3], [4], [5, 6]])
    path, sizes = damage(prefix, kind)
    with pytest.raises(ValueError, match="bytes") as error:
        IndexedDataset(prefix)
    assert str(path) in str(error.value)
    for size in sizes:
        assert str(size) in str(error.value)


@pytest.mark.parametrize(
    ("at", "value", "message"),
    [
        (0, b"X", "not an index file"),
        (9, b"\x02", "version 2"),
        (17, b"\x63", "dtype code 99"),
        (34, struct.pack("<i", 2), "running sum"),
        (34, struct.pack("<i", -3), "negative sequence length"),
        (46, struct.pack("<q", 4), "running sum"),
        (70, struct.pack("<q", 1), "from 0 to 3"),
        (94, struct.pack("<q", 4), "from 0 to 3"),
        (78, struct.pack("<q", 3), "decrease"),
    ],
)
def test_wrong_contents_are_refused(tmp_path: Path, at: int, value: bytes, message: str) -> None:
    prefix = write(tmp_path / "a", [[1, 2, 3], [4], [5, 6]])
    index = prefix.with_suffix(".idx")
    raw = bytearray(index.read_bytes())
    raw[at : at + len(value)] = value
    index.write_bytes(raw)
    with pytest.raises(ValueError, match=message) as error:
        IndexedDataset(prefix)
    assert str(index) in str(error.value)


class Marker:
    """Creates a file when unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple:
        return Path.touch, (self.path,)


def test_c37_a_pickle_in_place_of_the_index_is_not_executed(tmp_path: Path) -> None:
    prefix = write(tmp_path / "a", [[1, 2, 3]])
    prefix.with_suffix(".idx").write_bytes(pickle.dumps(Marker(tmp_path / "marker")))
    with pytest.raises(ValueError, match=r"a\.idx"):
        IndexedDataset(prefix)
    assert not (tmp_path / "marker").exists()


def test_missing_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"a\.bin and .*a\.idx"):
        IndexedDataset(tmp_path / "a")
    write(tmp_path / "a", [[1]])
    (tmp_path / "a.bin").unlink()
    with pytest.raises(FileNotFoundError, match=r"no .*a\.bin:"):
        IndexedDataset(tmp_path / "a")


def test_c45_merge_of_two_and_three_documents(tmp_path: Path) -> None:
    a = write(tmp_path / "a", [[1, 2], [3]])
    b = write(tmp_path / "b", [[4], [5, 6, 7], [8]])
    merge([a, b], tmp_path / "ab")
    assert IndexedDataset(tmp_path / "ab").document_indices.tolist() == [0, 1, 2, 3, 4, 5]
    assert contents(tmp_path / "ab") == [[1, 2], [3], [4], [5, 6, 7], [8]]
    with pytest.raises(ValueError, match="one of the inputs"):
        merge([a, b], a)
    with pytest.raises(ValueError, match="empty"):
        merge([], tmp_path / "none")
    c = write(tmp_path / "c", [[1]], "uint16")
    with pytest.raises(ValueError, match="uint16 tokens.*int32"):
        merge([a, c], tmp_path / "ac")
    assert not list(tmp_path.glob("*ac*"))


def test_an_interrupted_writer_leaves_nothing_and_keeps_the_old_pair(tmp_path: Path) -> None:
    write(tmp_path / "a", [[1, 2]])

    def interrupted() -> None:
        with IndexedDatasetWriter(tmp_path / "a", "i4") as writer:
            writer.add_document([3])
            assert contents(tmp_path / "a") == [[1, 2]]
            raise RuntimeError("stop")

    with pytest.raises(RuntimeError, match="stop"):
        interrupted()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.bin", "a.idx"]
    assert contents(tmp_path / "a") == [[1, 2]]
    write(tmp_path / "a", [[5], [6]])
    assert contents(tmp_path / "a") == [[5], [6]]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.bin", "a.idx"]


def test_a_crash_between_the_renames_leaves_no_readable_pair(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path / "a", [[1, 2]])
    rename = Path.replace

    def fail_on_index(self: Path, target: Path) -> Path:
        if str(target).endswith(".idx"):
            raise OSError("no space")
        return rename(self, target)

    monkeypatch.setattr(Path, "replace", fail_on_index)
    with pytest.raises(OSError, match="no space"):
        write(tmp_path / "a", [[3, 4]])
    with pytest.raises(FileNotFoundError):
        IndexedDataset(tmp_path / "a")


def test_writer_refuses_what_would_be_stored_wrongly(tmp_path: Path) -> None:
    writer = IndexedDatasetWriter(tmp_path / "a", "uint16")
    with pytest.raises(ValueError, match="70000, outside uint16"):
        writer.add_document([1, 70000])
    with pytest.raises(ValueError, match="-1 to 1"):
        writer.add_document([1, -1])
    with pytest.raises(ValueError, match="must be integers"):
        writer.add_document([0.5])
    with pytest.raises(ValueError, match=r"lengths=\[1\]"):
        writer.add_document([1, 2], [1])
    with pytest.raises(ValueError, match="one-dimensional"):
        writer.add_document([[1, 2]])
    writer.finalize()
    with pytest.raises(RuntimeError, match="closed"):
        writer.add_document([1])
    with pytest.raises(ValueError, match="dtype=complex128"):
        IndexedDatasetWriter(tmp_path / "b", complex)


def test_best_dtype() -> None:
    assert best_dtype(65499) == np.uint16
    assert best_dtype(65500) == np.int32
    for size in (0, 2**31 + 1):
        with pytest.raises(ValueError, match="vocab_size"):
            best_dtype(size)


def test_items_are_token_arrays(tmp_path: Path) -> None:
    data = IndexedDataset(write(tmp_path / "a", [[1, 2, 3], [4], [5, 6]]))
    assert data[0].tolist() == [1, 2, 3]
    assert data[-1].tolist() == [5, 6]
    assert [part.tolist() for part in data[1:]] == [[4], [5, 6]]
    assert [part.tolist() for part in data[::-2]] == [[5, 6], [1, 2, 3]]
    assert [part.tolist() for part in data] == [[1, 2, 3], [4], [5, 6]]
    for index in (3, -4):
        with pytest.raises(IndexError, match="which has 3"):
            data[index]


def test_a_corpus_of_floats_is_no_text(tmp_path: Path) -> None:
    data = IndexedDataset(write(tmp_path / "a", [[1, 2, 3, 4, 5, 6]], "f4"))
    with pytest.raises(ValueError, match="holds float32, not token ids"):
        GPTDataset(data, range(1), None, 2, 1)[0]


def test_parts_and_their_cards(tmp_path: Path) -> None:
    (tmp_path / "t.jsonl").write_text("".join(f'{{"text": "{"x" * n}"}}\n' for n in range(5)))
    preprocess_jsonl(tmp_path / "t.jsonl", tmp_path / "a", "bytes")
    parts = split_documents(tmp_path / "a", tmp_path / "p", documents=2)
    assert parts == [f"{tmp_path}/p-0000{number}" for number in range(3)]
    assert [contents(Path(part)) for part in parts] == [
        [[120, 256]],
        [[120] * 2 + [256], [120] * 3 + [256]],
        [[120] * 4 + [256]],
    ]
    cards = [read_card(part) for part in parts]
    assert [(c.documents, c.empty_documents, c.tokens) for c in cards if c] == [
        (2, 1, 2),
        (2, 0, 7),
        (1, 0, 5),
    ]
    for part in parts:
        check_digests(part)
    with pytest.raises(ValueError, match="part 1 of 2 would have none"):
        split_documents(tmp_path / "a", tmp_path / "q", shares=[1, 0])
    with pytest.raises(ValueError, match="give one of them"):
        split_documents(tmp_path / "a", tmp_path / "q")
    assert not list(tmp_path.glob("q*"))


def test_corpora_of_different_tokenizers_are_not_merged(tmp_path: Path) -> None:
    (tmp_path / "t.jsonl").write_text('{"text": "abc"}\n')
    for name in ("a", "b"):
        preprocess_jsonl(tmp_path / "t.jsonl", tmp_path / name, "bytes")
    card = read_card(tmp_path / "b")
    assert card is not None
    write_card(tmp_path / "b", dataclasses.replace(card, tokenizer_digest="another"))
    with pytest.raises(ValueError, match=r"b\.card\.json says tokenizer bytes \(another"):
        merge([tmp_path / "a", tmp_path / "b"], tmp_path / "ab")
    (tmp_path / "b.card.json").unlink()
    merge([tmp_path / "a", tmp_path / "b"], tmp_path / "ab")
    assert read_card(tmp_path / "ab") is None  # half of its origin is unknown
    assert not list(tmp_path.glob(".*"))


def test_a_failing_part_leaves_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "a", [[1], [2], [3]])
    append, calls = IndexedDatasetWriter.add_dataset, []

    def fail(self: IndexedDatasetWriter, *arguments: object) -> None:
        calls.append(1)
        if len(calls) == 3:
            raise OSError("no space")
        append(self, *arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(IndexedDatasetWriter, "add_dataset", fail)
    with pytest.raises(OSError, match="no space"):
        split_documents(tmp_path / "a", tmp_path / "p", documents=1)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.bin", "a.idx"]
