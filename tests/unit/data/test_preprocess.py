"""JSON lines to a corpus: right content, honest counts, nothing half-written."""

import json
from pathlib import Path

import pytest

from megatron_lightning.data import (
    IndexedDataset,
    card_path,
    load_tokenizer,
    preprocess_jsonl,
    python_help_texts,
    read_card,
    train_byte_bpe,
    write_python_help,
)
from megatron_lightning.data.card import file_digest

LINES = [{"text": "ab"}, {"text": ""}, {"other": 1, "text": "é"}, {"text": ["x", "", "yz"]}]


def write(path: Path, lines: list) -> Path:
    path.write_text("".join((x if isinstance(x, str) else json.dumps(x)) + "\n" for x in lines))
    return path


def contents(prefix: Path) -> list[list[int]]:
    data = IndexedDataset(prefix)
    return [data.get(i).tolist() for i in range(len(data))]


def test_documents_boundaries_and_card(tmp_path: Path) -> None:
    source = write(tmp_path / "in.jsonl", [*LINES, "", "  "])
    card = preprocess_jsonl(source, tmp_path / "out", "bytes")
    assert contents(tmp_path / "out") == [[97, 98, 256], [195, 169, 256], [120], [121, 122, 256]]
    assert IndexedDataset(tmp_path / "out").document_indices.tolist() == [0, 1, 1, 2, 4]
    assert (card.documents, card.sequences, card.tokens) == (4, 4, 10)
    assert (card.empty_documents, card.skipped_lines) == (1, 0)
    assert (card.vocab_size, card.eod_id, card.dtype, card.tokenizer) == (
        257,
        256,
        "uint16",
        "bytes",
    )
    assert card.sources == [
        {"path": str(source), "bytes": source.stat().st_size, "sha256": file_digest(source)}
    ]
    assert card.bin_sha256 == file_digest(tmp_path / "out.bin")
    assert card.idx_sha256 == file_digest(tmp_path / "out.idx")
    assert card.bin_bytes == 20
    assert read_card(tmp_path / "out") == card
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        "in.jsonl",
        "out.bin",
        "out.card.json",
        "out.idx",
    ]


def test_options(tmp_path: Path) -> None:
    a = write(tmp_path / "a", [{"body": "a"}])
    b = write(tmp_path / "b", [{"body": "b"}])
    card = preprocess_jsonl([b, a], tmp_path / "out", "bytes", json_key="body", append_eod=False)
    assert contents(tmp_path / "out") == [[98], [97]]
    assert card.arguments == {
        "fields": ["body"],
        "field": "body",
        "append_eod": False,
        "sentences": "whole",
        "language": None,
        "keep_newlines": False,
        "on_bad_line": "fail",
    }


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{broken", "no JSON"),
        ('"text"', "no JSON object with the key"),
        ('{"body": "a"}', 'the key "text"'),
        ('{"text": 3}', "neither a string nor"),
        ('{"text": ["a", null]}', "neither a string nor"),
    ],
)
@pytest.mark.parametrize("workers", [1, 2])
def test_bad_lines(tmp_path: Path, line: str, message: str, workers: int) -> None:
    source = write(tmp_path / "in", [{"text": "a"}, "", line, {"text": "b"}])
    with pytest.raises(ValueError, match=message) as error:
        preprocess_jsonl(source, tmp_path / "out", "bytes", workers=workers)
    assert f"{source}:3" in str(error.value)
    assert 'on_bad_line="skip"' in str(error.value)
    assert [p.name for p in tmp_path.iterdir()] == ["in"]
    card = preprocess_jsonl(source, tmp_path / "out", "bytes", workers=workers, on_bad_line="skip")
    assert (card.documents, card.skipped_lines) == (2, 1)
    assert contents(tmp_path / "out") == [[97, 256], [98, 256]]


def test_bytes_that_are_no_text_are_a_bad_line(tmp_path: Path) -> None:
    (tmp_path / "in").write_bytes(b'{"text": "\xff\xfe"}\n')
    with pytest.raises(ValueError, match=r"in:1: no text in UTF-8 .* at byte 10"):
        preprocess_jsonl(tmp_path / "in", tmp_path / "out", "bytes")


def test_a_failed_run_keeps_the_old_corpus(tmp_path: Path) -> None:
    preprocess_jsonl(write(tmp_path / "in", LINES), tmp_path / "out", "bytes")
    before = {path.name: file_digest(path) for path in tmp_path.iterdir() if path.name != "in"}
    with pytest.raises(ValueError, match="no JSON"):
        preprocess_jsonl(write(tmp_path / "in", ["{"]), tmp_path / "out", "bytes")
    assert before == {p.name: file_digest(p) for p in tmp_path.iterdir() if p.name != "in"}


def test_bad_arguments(tmp_path: Path) -> None:
    source = write(tmp_path / "in", LINES)
    with pytest.raises(FileNotFoundError, match="absent"):
        preprocess_jsonl([source, tmp_path / "absent"], tmp_path / "out", "bytes")
    with pytest.raises(ValueError, match="inputs is empty"):
        preprocess_jsonl([], tmp_path / "out", "bytes")
    with pytest.raises(ValueError, match="workers=0"):
        preprocess_jsonl(source, tmp_path / "out", "bytes", workers=0)
    with pytest.raises(ValueError, match='on_bad_line="ignore"'):
        preprocess_jsonl(source, tmp_path / "out", "bytes", on_bad_line="ignore")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="no document in"):
        preprocess_jsonl(write(tmp_path / "void", [""]), tmp_path / "out", "bytes")
    assert not list(tmp_path.glob("*out*"))


def test_python_help_is_a_corpus_that_workers_do_not_change(tmp_path: Path) -> None:
    count = write_python_help(tmp_path / "help.jsonl")
    texts = [json.loads(line)["text"] for line in (tmp_path / "help.jsonl").open()]
    assert texts == python_help_texts()
    assert len(texts) == count > 50
    assert sum(map(len, texts)) > 300_000
    tokenizer = train_byte_bpe(texts, 600, tmp_path / "tokenizer.json")
    cards = [
        preprocess_jsonl(tmp_path / "help.jsonl", tmp_path / f"w{n}", tokenizer, workers=n)
        for n in (1, 3)
    ]
    assert cards[0] == cards[1]
    data = IndexedDataset(tmp_path / "w3")
    assert len(data) == count
    for number, text in enumerate(texts):
        ids = data.get(number).tolist()
        assert ids[-1] == tokenizer.eod_id
        assert tokenizer.decode(ids) == text
    assert cards[0].tokenizer_digest == load_tokenizer(tmp_path / "tokenizer.json").digest


def test_a_damaged_card_is_named(tmp_path: Path) -> None:
    assert read_card(tmp_path / "a") is None
    for text in ("", "[]", '{"card_version": 1}', '{"card_version": 99}'):
        card_path(tmp_path / "a").write_text(text)
        with pytest.raises(ValueError, match=r"a\.card\.json is no data card"):
            read_card(tmp_path / "a")
