"""`megatron-lightning data`: counts, merged and cut corpora, one message for a wrong input."""

import json
from pathlib import Path

import pytest

from megatron_lightning.cli.data import main
from megatron_lightning.cli.errors import UserError
from megatron_lightning.data import IndexedDataset, preprocess_jsonl, read_card


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    lines = [json.dumps({"text": "word " * number}) for number in (1, 2, 0, 3, 4)]
    (tmp_path / "text.jsonl").write_text("\n".join(lines) + "\n")
    preprocess_jsonl(tmp_path / "text.jsonl", tmp_path / "c", "bytes")
    return tmp_path / "c"


def test_info(corpus: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["info", str(corpus), str(corpus), "--verify"])
    first, second = capsys.readouterr().out.split("\n\n")
    assert first == second.rstrip("\n")
    rows = dict(line.split("  ", 1) for line in first.splitlines())
    found = {name: text.strip() for name, text in rows.items()}
    assert found["documents"] == "5"
    assert found["empty documents"] == "1"
    assert found["sequences"] == "4"
    assert found["tokens"] == "54, uint16"
    assert found["size"] == "108 bytes and an index of 130"
    assert found["tokens a sequence"] == "6 to 21, mean 13.5, median 13.5"
    assert found["tokenizer"] == "bytes, 257 ids, end of document 256"
    assert found["verified"] == "both files have the digests of the data card"
    main(["info", str(corpus), "--json"])
    counted = json.loads(capsys.readouterr().out)
    assert (counted["tokens"], counted["card"]["documents"]) == (54, 5)


def test_split_and_merge_give_the_same_corpus(
    corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    main(["split", str(corpus), "--output-prefix", str(tmp_path / "p"), "--shares", "60,40"])
    assert capsys.readouterr().out.splitlines() == [
        f"{tmp_path}/p-00000  3 documents, 17 tokens",
        f"{tmp_path}/p-00001  2 documents, 37 tokens",
    ]
    parts = [str(tmp_path / "p-00000"), str(tmp_path / "p-00001")]
    main(["merge", *parts, "--output-prefix", str(tmp_path / "again")])
    for suffix in (".bin", ".idx"):
        assert (
            Path(f"{corpus}{suffix}").read_bytes() == Path(f"{tmp_path}/again{suffix}").read_bytes()
        )
    whole, again = read_card(corpus), read_card(tmp_path / "again")
    assert whole is not None
    assert again is not None
    assert (whole.tokens, whole.empty_documents) == (again.tokens, again.empty_documents)
    assert (whole.bin_sha256, whole.idx_sha256) == (again.bin_sha256, again.idx_sha256)
    main(["split", str(corpus), "--output-prefix", str(tmp_path / "q"), "--documents", "2"])
    assert [len(IndexedDataset(tmp_path / f"q-0000{n}").document_indices) for n in range(3)] == [
        3,
        3,
        2,
    ]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "'' is no action; choose one of info, merge, split"),
        (["info", "nowhere"], "no nowhere.bin and nowhere.idx"),
        (["merge", "C", "--output-prefix", "C"], "is one of the inputs"),
        (
            ["split", "C", "--output-prefix", "X", "--documents", "0"],
            "documents=0 must be at least",
        ),
        (["split", "C", "--output-prefix", "X", "--shares", "1,x"], "numbers with commas"),
        (["split", "C", "--output-prefix", "X", "--shares", "1,-1"], "shares="),
        (["split", "C", "--output-prefix", "X", "--shares", "99,1"], "part 1 of 2 would have none"),
        (["split", "C", "--output-prefix", "X"], "--documents --shares is required"),
    ],
)
def test_wrong_input_is_one_message(
    corpus: Path, arguments: list[str], message: str, tmp_path: Path
) -> None:
    before = sorted(path.name for path in tmp_path.iterdir())
    places = {"C": str(corpus), "X": str(tmp_path / "x")}
    with pytest.raises(UserError) as error:
        main([places.get(word, word) for word in arguments])
    assert message in str(error.value)
    assert sorted(path.name for path in tmp_path.iterdir()) == before


def test_help(capsys: pytest.CaptureFixture[str]) -> None:
    main(["--help"])
    assert "split" in capsys.readouterr().out
