"""`preprocess`, and `inspect` of a corpus."""

import json
from pathlib import Path

import pytest

from megatron_lightning.cli import inspect as inspect_command
from megatron_lightning.cli import preprocess
from megatron_lightning.cli.errors import UserError
from megatron_lightning.data import IndexedDataset, load_tokenizer

TEXTS = ["one two three", "", "two three four five"]


@pytest.fixture
def text_file(tmp_path: Path) -> Path:
    path = tmp_path / "text.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    return path


def tokens(prefix: Path) -> list[list[int]]:
    corpus = IndexedDataset(prefix)
    return [corpus.get(i).tolist() for i in range(len(corpus))]


def test_bytes(text_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = [str(text_file), "--output-prefix", f"{tmp_path}/c", "--tokenizer", "bytes"]
    preprocess.main([*given, "--append-eod"])
    assert tokens(tmp_path / "c") == [[*TEXTS[0].encode(), 256], [*TEXTS[2].encode(), 256]]
    shown = dict(line.split(None, 1) for line in capsys.readouterr().out.splitlines())
    assert shown["documents"] == "3 (1 empty)"
    assert shown["sequences"] == "2"
    assert shown["tokens"] == "34, uint16, 68 bytes"  # 13 + 1 and 19 + 1 tokens
    assert shown["tokenizer"] == "bytes, 257 ids"
    assert shown["end"] == "of document 256"
    preprocess.main(given)  # Megatron's default
    assert tokens(tmp_path / "c") == [[*TEXTS[0].encode()], [*TEXTS[2].encode()]]
    assert "end of document not appended (see --append-eod)" in capsys.readouterr().out


def test_too_few_documents_to_validate_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = tmp_path / "text.txt"
    text.write_text("".join(f"line {number}\n" for number in range(100)))
    given = [str(text), "--output-prefix", f"{tmp_path}/c", "--tokenizer", "bytes"]
    preprocess.main(given)
    shown = dict(line.split(None, 1) for line in capsys.readouterr().out.splitlines())
    assert "the default split 969,30,1 gives it 0 of 1 sequences" in shown["validation"]
    assert "--input-format text-lines" in shown["validation"]
    preprocess.main([*given, "--input-format", "text-lines"])
    assert "validation" not in capsys.readouterr().out


def test_trained_tokenizer_is_used_and_kept(text_file: Path, tmp_path: Path) -> None:
    prefix = tmp_path / "c"
    options = ["--train-tokenizer", "bpe", "--vocab-size", "262", "--append-eod"]
    preprocess.main([str(text_file), "--output-prefix", str(prefix), *options])
    tokenizer = load_tokenizer(f"{prefix}.tokenizer.json")
    assert tokenizer.vocab_size == 262
    expected = [[*tokenizer.encode(TEXTS[i]), tokenizer.eod_id] for i in (0, 2)]
    assert tokens(prefix) == expected
    assert len(expected[0]) < len(TEXTS[0]) + 1  # something was merged


def test_bad_lines_are_named_or_skipped(
    text_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text_file.write_text('{"text": "a"}\n{"other": 1}\n{"text": 3}\n{"text": ["b", "c"]}\nno\n')
    options = [str(text_file), "--output-prefix", f"{tmp_path}/c"]
    options += ["--train-tokenizer", "bpe", "--vocab-size", "257"]
    with pytest.raises(UserError, match=r'text\.jsonl:2: no JSON object with the key "text"'):
        preprocess.main(options)
    assert not (tmp_path / "c.idx").exists()
    preprocess.main([*options, "--on-bad-line", "skip", "--no-append-eod"])
    assert "lines skipped   3" in capsys.readouterr().out
    assert [len(sequence) for sequence in tokens(tmp_path / "c")] == [1, 1, 1]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--tokenizer", "bytes", "--vocab-size", "9"], "--vocab-size: belongs to"),
        (["--tokenizer", "bytes", "--save-tokenizer", "x"], "--save-tokenizer: belongs to"),
        (["--train-tokenizer", "bpe"], "--train-tokenizer: needs the number of ids"),
        (["--train-tokenizer", "bpe", "--vocab-size", "9"], "vocab_size=9 must be at least 257"),
        (["--tokenizer", "/nowhere"], "no tokenizer file /nowhere"),
        (["--tokenizer", "bytes", "--workers", "0"], "workers=0 must be at least 1"),
        (["--tokenizer", "bytes", "--partition", "2"], "--partition 2: give number and count"),
        (
            ["--tokenizer", "bytes", "--partition", "2/2"],
            "partition=2 of 2 must be between 0 and 1",
        ),
        (["--tokenizer", "bytes", "--merge"], "merge needs the number of partitions"),
        (["--tokenizer", "bytes", "--streaming"], "--streaming: belongs to --dataset"),
        (["--tokenizer", "bytes", "--dataset", "x"], "FILE, --dataset: give one of them"),
        (["--tokenizer", "bytes", "--keep-newlines"], "keep_newlines belongs to splitting"),
        (
            ["--train-tokenizer", "bpe", "--vocab-size", "300", "--partition", "0/2"],
            "--train-tokenizer: all parts need the same tokenizer",
        ),
        (["--tokenizer", "bytes", "--train-tokenizer", "bpe"], "not allowed with"),
        ([], "one of the arguments --tokenizer --train-tokenizer is required"),
    ],
)
def test_wrong_options(options: list[str], message: str, text_file: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=message):
        preprocess.main([str(text_file), "--output-prefix", f"{tmp_path}/c", *options])
    assert not (tmp_path / "c.idx").exists()


def test_all_wrong_options_at_once(tmp_path: Path) -> None:
    given = [f"{tmp_path}/a", f"{tmp_path}/b", "--output-prefix", "c", "--train-tokenizer", "bpe"]
    with pytest.raises(UserError) as error:
        preprocess.main(given)
    assert len(str(error.value).splitlines()) == 3
    assert f"{tmp_path}/a: there is no such file" in str(error.value)


def test_several_keys_sentences_and_parts(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    lines = [{"meta": {"title": f"T{n}"}, "body": f"One {n}. Two {n}."} for n in range(9)]
    for half in range(2):
        content = "".join(json.dumps(line) + "\n" for line in lines[5 * half : 5 * half + 5])
        (tmp_path / f"in{half}.jsonl").write_text(content)
    given = [f"{tmp_path}/in*.jsonl", "--output-prefix", f"{tmp_path}/c", "--tokenizer", "bytes"]
    given += ["--json-keys", "meta.title", "body", "--split-sentences", "--append-eod"]
    for part in ("1/2", "0/2"):
        preprocess.main([*given, "--partition", part])
        assert "is finished" in capsys.readouterr().out
    preprocess.main([*given, "--resume", "--partition", "0/3"])
    with pytest.raises(UserError, match=r"lacks the parts 1, 2 of 3"):
        preprocess.main([*given, "--partitions", "3", "--merge"])
    preprocess.main([*given, "--partitions", "2", "--merge"])
    assert "c_body_sentence.bin, .idx" in capsys.readouterr().out
    assert tokens(tmp_path / "c_meta.title_sentence")[3] == [*b"T3", 256]
    assert tokens(tmp_path / "c_body_sentence")[6:8] == [[*b"One 3."], [*b"Two 3.", 256]]


def test_a_data_set_and_plain_text(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    datasets.Dataset.from_dict({"body": TEXTS}).save_to_disk(tmp_path / "set")
    given = ["--output-prefix", f"{tmp_path}/c", "--tokenizer", "bytes"]
    preprocess.main(["--dataset", f"{tmp_path}/set", "--json-keys", "body", *given])
    assert tokens(tmp_path / "c") == [[*TEXTS[0].encode()], [*TEXTS[2].encode()]]
    (tmp_path / "a.text").write_text("one\ntwo\n")
    preprocess.main([f"{tmp_path}/a.text", "--input-format", "text-lines", *given])
    assert tokens(tmp_path / "c") == [[*b"one"], [*b"two"]]


def test_inspect_corpus(
    text_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prefix = tmp_path / "c"
    given = ["--output-prefix", str(prefix), "--tokenizer", "bytes", "--append-eod"]
    preprocess.main([str(text_file), *given])
    capsys.readouterr()
    inspect_command.main([str(prefix), "--verify"])
    shown = capsys.readouterr().out
    for line in (
        "documents          3",
        "tokens             34, uint16",
        "tokens a sequence  14 to 20, mean 17.0",
        f"source             {text_file}, {text_file.stat().st_size} bytes",
        "verified           both files have the digests of the data card",
    ):
        assert line in shown
    damaged = Path(f"{prefix}.bin")
    damaged.write_bytes(damaged.read_bytes()[:-1] + b"\x07")
    with pytest.raises(UserError, match=r"c\.bin: its digest is not the one of the data card"):
        inspect_command.main([str(prefix), "--verify"])


def test_inspect_nothing(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="neither a checkpoint folder nor"):
        inspect_command.main([str(tmp_path / "x")])
    with pytest.raises(UserError, match=r"is not a complete checkpoint: it has no manifest\.json"):
        inspect_command.main([str(tmp_path)])
    Path(f"{tmp_path}/half.bin").write_bytes(b"")
    with pytest.raises(UserError, match=r"no .*half\.idx"):
        inspect_command.main([f"{tmp_path}/half"])
