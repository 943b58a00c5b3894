"""Inputs of every kind give the same corpus, and what is wrong with one is said with its name."""

import gzip
import json
from pathlib import Path

import pyarrow
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pyarrow import parquet

from megatron_lightning.data import (
    DatasetName,
    IndexedDataset,
    PreprocessOptions,
    open_dataset,
    open_files,
    preprocess,
)
from megatron_lightning.data.card import file_digest
from megatron_lightning.data.preprocessing import files
from megatron_lightning.data.preprocessing.files import LineFile
from megatron_lightning.data.preprocessing.sources import cut, find_files

TEXTS = ["one", "zwei — drei", "", "vier\nfünf", "six" * 50] * 20


def tokens(prefix: Path) -> list[list[int]]:
    data = IndexedDataset(prefix)
    return [data[i].tolist() for i in range(len(data))]


def expected(texts: list[str]) -> list[list[int]]:
    return [list(text.encode()) for text in texts if text]


def jsonl(texts: list[str]) -> bytes:
    return "".join(json.dumps({"text": text, "n": 1}) + "\n" for text in texts).encode()


def run(sources: list, prefix: Path, **options: object) -> list:
    return preprocess(sources, prefix, "bytes", PreprocessOptions(**options))  # type: ignore[arg-type]


def test_lines_plain_and_compressed(tmp_path: Path) -> None:
    zstandard = pytest.importorskip("zstandard")
    content = jsonl(TEXTS)
    half = len(jsonl(TEXTS[:50]))
    (tmp_path / "a.jsonl").write_bytes(content)
    (tmp_path / "a.jsonl.gz").write_bytes(  # two members, as pigz and `cat` make them
        gzip.compress(content[:half]) + gzip.compress(content[half:])
    )
    packer = zstandard.ZstdCompressor()
    (tmp_path / "a.jsonl.zst").write_bytes(
        packer.compress(content[:half]) + packer.compress(content[half:])
    )
    for name in ("a.jsonl", "a.jsonl.gz", "a.jsonl.zst"):
        [card] = run(open_files([tmp_path / name], "auto", ["text"]), tmp_path / "out")
        assert tokens(tmp_path / "out") == expected(TEXTS)
        assert (card.documents, card.empty_documents) == (100, 20)
        assert card.sources == [
            {
                "path": str(tmp_path / name),
                "bytes": (tmp_path / name).stat().st_size,
                "sha256": file_digest(tmp_path / name),
            }
        ]


@pytest.mark.parametrize("suffix", [".gz", ".zst"])
def test_damaged_archives_are_named_and_never_end_early(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"a.jsonl{suffix}"
    content = jsonl([f"{n} {n * n} {n**3}" for n in range(5000)])
    if suffix == ".gz":
        packed = gzip.compress(content)
    else:
        packed = pytest.importorskip("zstandard").ZstdCompressor().compress(content)
    for damaged in (packed[:-20], packed[: len(packed) // 2], b"\0\1\2" + packed, packed + b"x"):
        path.write_bytes(damaged)
        with pytest.raises(ValueError, match=rf"a\.jsonl{suffix}: it cannot be unpacked"):
            run(open_files([path], "auto", ["text"]), tmp_path / "out")
        assert list(tmp_path.iterdir()) == [path]


def test_no_library_for_zstandard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.jsonl.zst").write_bytes(b"")
    monkeypatch.setattr("megatron_lightning.data.preprocessing.sources.zstandard", lambda: None)
    with pytest.raises(ImportError, match=r"a\.jsonl\.zst: pip install megatron-lightning\[zstd\]"):
        open_files([tmp_path / "a.jsonl.zst"], "auto", ["text"])


def test_parquet(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    table = pyarrow.table(
        {
            "text": TEXTS,
            "meta": [{"title": f"t{n}", "list": [f"a{n}", "b"]} for n in range(len(TEXTS))],
            "a.b": TEXTS[::-1],
        }
    )
    parquet.write_table(table, path, row_group_size=7)
    run(open_files([path], "auto", ["text"]), tmp_path / "out")
    assert tokens(tmp_path / "out") == expected(TEXTS)
    run(open_files([path], "auto", ["meta.title"]), tmp_path / "out", fields=("meta.title",))
    assert tokens(tmp_path / "out") == expected([f"t{n}" for n in range(len(TEXTS))])
    run(open_files([path], "auto", ["meta.list"]), tmp_path / "out", fields=("meta.list",))
    assert tokens(tmp_path / "out")[:3] == expected(["a0", "b", "a1"])
    run(open_files([path], "auto", ["a.b"]), tmp_path / "out", fields=("a.b",), partitions=4)
    assert tokens(tmp_path / "out") == expected(TEXTS[::-1])
    with pytest.raises(ValueError, match=r'a\.parquet has no column for the field "body"; it has'):
        open_files([path], "auto", ["body"])


def test_bad_parquet_rows_are_named(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    bad = pyarrow.array([b"ok", b"\xff", b"fine"], pyarrow.binary()).view(pyarrow.string())
    parquet.write_table(pyarrow.table({"text": bad, "n": [1, 2, 3]}), path)
    with pytest.raises(ValueError, match=r"a\.parquet, row 1: no text in UTF-8"):
        run(open_files([path], "auto", ["text"]), tmp_path / "out")
    with pytest.raises(ValueError, match=r'a\.parquet, row 0: "n" is neither .* has a int'):
        run(open_files([path], "auto", ["n"]), tmp_path / "out", fields=("n",))
    [card] = run(open_files([path], "auto", ["text"]), tmp_path / "out", on_bad_line="skip")
    assert (card.documents, card.skipped_lines) == (2, 1)
    path.write_bytes(path.read_bytes()[:-10])
    with pytest.raises(ValueError, match=r"a\.parquet is no Parquet file"):
        open_files([path], "auto", ["text"])


def test_plain_text(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbfone\r\ntwo\r\n\r\n  three\n")
    (tmp_path / "b.txt.gz").write_bytes(gzip.compress(b"packed"))
    names = [tmp_path / "a.txt", tmp_path / "b.txt.gz"]
    run(open_files(names, "auto", ["text"]), tmp_path / "out")
    assert tokens(tmp_path / "out") == expected(["one\r\ntwo\r\n\r\n  three\n", "packed"])
    run(open_files(names, "text-lines", ["text"]), tmp_path / "out")
    assert tokens(tmp_path / "out") == expected(["one", "two", "  three", "packed"])
    (tmp_path / "c.txt").write_bytes(b"ab\xff")
    with pytest.raises(ValueError, match=r"c\.txt:1: no text in UTF-8 .* at byte 2"):
        run(open_files([tmp_path / "c.txt"], "auto", ["text"]), tmp_path / "out")
    with pytest.raises(ValueError, match="plain text and has no fields a, b"):
        open_files([tmp_path / "a.txt"], "auto", ["a", "b"])


def test_data_sets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    datasets = pytest.importorskip("datasets")
    saved = datasets.Dataset.from_dict({"text": TEXTS, "meta": [{"t": "x"}] * len(TEXTS)})
    saved.save_to_disk(tmp_path / "saved")
    datasets.DatasetDict({"valid": saved}).save_to_disk(tmp_path / "splits")
    options = PreprocessOptions(fields=("text",), partitions=3)
    for name in (
        DatasetName(path=str(tmp_path / "saved")),
        DatasetName(path=str(tmp_path / "splits"), split="valid"),
    ):
        [card] = preprocess([open_dataset(name, ["text"])], tmp_path / "out", "bytes", options)
        assert tokens(tmp_path / "out") == expected(TEXTS)
        folder = Path(name.path)
        assert {s["path"] for s in card.sources} == {
            str(path) for path in folder.rglob("*") if path.is_file()
        }
    streamed = open_dataset(DatasetName(path=str(tmp_path / "saved"), streaming=True), ["meta.t"])
    [card] = run([streamed], tmp_path / "out", fields=("meta.t",))
    assert tokens(tmp_path / "out") == expected(["x"] * len(TEXTS))
    assert card.sources[0]["rows"] == len(TEXTS)
    with pytest.raises(ValueError, match="partitions=2: a streamed data set cannot be cut"):
        run([streamed], tmp_path / "out", fields=("meta.t",), partitions=2)
    with pytest.raises(ValueError, match="split train: it has the splits valid"):
        open_dataset(DatasetName(path=str(tmp_path / "splits")), ["text"])
    with pytest.raises(ValueError, match='no column for the field "body"'):
        open_dataset(DatasetName(path=str(tmp_path / "saved")), ["body"])


@pytest.mark.slow
def test_a_folder_of_files_as_a_data_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = pytest.importorskip("datasets").config
    monkeypatch.setattr(config, "HF_DATASETS_CACHE", tmp_path / "cache")
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "train.jsonl").write_bytes(jsonl(TEXTS))
    for streaming in (False, True):
        name = DatasetName(path=str(tmp_path / "in"), streaming=streaming)
        run([open_dataset(name, ["text"])], tmp_path / "out")
        assert tokens(tmp_path / "out") == expected(TEXTS)


def test_patterns_and_missing_files(tmp_path: Path) -> None:
    for name in ("b2", "b10", "a", "[x]"):
        (tmp_path / name).write_bytes(b"")
    found = find_files([tmp_path / "b*", str(tmp_path / "a"), tmp_path / "[x]"])
    assert [path.name for path in found] == ["b10", "b2", "a", "[x]"]
    with pytest.raises(FileNotFoundError, match=r"no input file .*/c, .*/d\*"):
        find_files([tmp_path / "a", tmp_path / "c", tmp_path / "d*"])
    with pytest.raises(ValueError, match='file_format="csv" must be one of auto, jsonl'):
        open_files([tmp_path / "a"], "csv", ["text"])  # type: ignore[arg-type]


def test_several_nested_fields_make_several_corpora(tmp_path: Path) -> None:
    lines = [
        {"meta": {"title": "t", "body": ["a", "b"]}, "x.y": "dotted", "x": {"y": "nested"}},
        {"meta": {"title": "", "body": "c"}, "x": {"y": "nested"}},
    ]
    (tmp_path / "in").write_text("".join(json.dumps(line) + "\n" for line in lines))
    fields = ("meta.title", "meta.body", "x.y")
    cards = run(open_files([tmp_path / "in"], "auto", fields), tmp_path / "o", fields=fields)
    assert tokens(tmp_path / "o_meta.title_document") == expected(["t"])
    assert tokens(tmp_path / "o_meta.body_document") == expected(["a", "b", "c"])
    assert tokens(tmp_path / "o_x.y_document") == expected(["dotted", "nested"])
    assert [card.arguments["field"] for card in cards] == list(fields)
    assert [(card.documents, card.empty_documents) for card in cards] == [(2, 1), (2, 0), (2, 0)]
    (tmp_path / "in").write_text('{"x": {"z": "a"}}\n{"x": {"y": "a"}}\n')
    with pytest.raises(ValueError, match=r'in:2: no JSON object with the key "x\.z"'):
        run(open_files([tmp_path / "in"], "auto", ["x.z"]), tmp_path / "o", fields=("x.z",))


@settings(max_examples=60, deadline=None)
@given(
    lines=st.lists(st.binary(max_size=12).map(lambda b: b.replace(b"\n", b"x")), max_size=12),
    end=st.booleans(),
    parts=st.integers(1, 7),
    block=st.integers(1, 20),
)
def test_parts_of_a_file_hold_every_line_once(
    tmp_path_factory: pytest.TempPathFactory,
    lines: list[bytes],
    end: bool,
    parts: int,
    block: int,
) -> None:
    path = tmp_path_factory.mktemp("lines") / "f"
    path.write_bytes(b"\n".join(lines) + (b"\n" if end and lines else b""))
    source = LineFile(path, json=False)
    content = path.read_bytes()
    wanted = [
        (number, line) for number, line in enumerate(content.split(b"\n"), start=1) if line.strip()
    ]
    found = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(files, "BLOCK_BYTES", block)
        for stretches in cut([source], parts):
            for _, begin, stop in stretches:
                for piece in source.blocks(begin, stop):
                    for at, line in enumerate(piece.content.split(b"\n"), start=piece.first):
                        if line.strip():
                            place = source.place(begin, at)
                            found.append((int(place.rsplit(":", 1)[1]), line))
    assert found == wanted


def test_an_endless_line_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "LONGEST_LINE_BYTES", 1000)
    monkeypatch.setattr(files, "BLOCK_BYTES", 100)
    (tmp_path / "in").write_bytes(jsonl(["a", "b", "c" * 2000]))
    with pytest.raises(ValueError, match=r"in:3: the line is longer than 1,000 bytes"):
        run(open_files([tmp_path / "in"], "auto", ["text"]), tmp_path / "out")


def test_a_file_that_changes_while_it_is_read(tmp_path: Path) -> None:
    (tmp_path / "in").write_bytes(jsonl(["a"]))
    sources = open_files([tmp_path / "in"], "auto", ["text"])
    (tmp_path / "in").write_bytes(jsonl(["a", "b"]))
    with pytest.raises(ValueError, match="in was changed while it was read"):
        run(sources, tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["in"]
