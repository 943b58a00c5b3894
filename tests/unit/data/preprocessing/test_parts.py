"""Parts: the same corpus in any number of them, on any machine, resumed or not."""

import json
from pathlib import Path

import pytest

from megatron_lightning.data import PreprocessOptions, open_files, preprocess, read_card
from megatron_lightning.data.card import file_digest
from megatron_lightning.data.preprocessing import run as run_module

NAMES = ("out.bin", "out.idx", "out.card.json")


@pytest.fixture
def inputs(tmp_path: Path) -> list[Path]:
    paths = [tmp_path / "a.jsonl", tmp_path / "b.jsonl", tmp_path / "c.txt"]
    for path in paths[:2]:
        lines = [{"text": f"{path.name} {n} " + "x" * (n * 7 % 90)} for n in range(120)]
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    paths[2].write_text("one document")
    return paths


def run(inputs: list[Path], prefix: Path, **options: object) -> list:
    chosen = PreprocessOptions(append_eod=True, **options)  # type: ignore[arg-type]
    return preprocess(open_files(inputs, "auto", ["text"]), prefix, "bytes", chosen)


def digests(prefix: Path) -> list[str]:
    return [file_digest(f"{prefix}.{suffix}") for suffix in ("bin", "idx", "card.json")]


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("partitions", [2, 7, 60])
def test_parts_make_the_same_corpus(
    inputs: list[Path], tmp_path: Path, workers: int, partitions: int
) -> None:
    if workers == 2 and partitions == 60:
        partitions = 3
    [card] = run(inputs, tmp_path / "whole")
    assert run(inputs, tmp_path / "parts", partitions=partitions, workers=workers) == [card]
    assert digests(tmp_path / "parts") == digests(tmp_path / "whole")
    assert card.documents == 241
    assert not (tmp_path / "parts.parts").exists()


def test_machines_make_a_part_each(inputs: list[Path], tmp_path: Path) -> None:
    run(inputs, tmp_path / "whole")
    for part in (2, 0, 1):
        with pytest.raises(ValueError, match=r"out\.parts lacks the parts"):
            run(inputs, tmp_path / "out", partitions=3, merge=True)
        assert run(inputs, tmp_path / "out", partitions=3, partition=part) == []
        assert not (tmp_path / "out.idx").exists()
    run(inputs, tmp_path / "out", partitions=3, merge=True)
    assert digests(tmp_path / "out") == digests(tmp_path / "whole")
    assert not (tmp_path / "out.parts").exists()


def counted(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Parts that are made from now on."""
    made: list[int] = []
    original = run_module._Run._make_part

    def make(self: object, workers: object, part: int) -> None:
        original(self, workers, part)  # type: ignore[arg-type]
        made.append(part)

    monkeypatch.setattr(run_module._Run, "_make_part", make)
    return made


def test_finished_parts_are_used_again(
    inputs: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(inputs, tmp_path / "whole")
    good = inputs[1].read_text()
    lines = good.splitlines(keepends=True)
    broken = "".join([*lines[:60], "#" + lines[60][1:], *lines[61:]])  # of the same length
    inputs[1].write_text(broken)
    made = counted(monkeypatch)
    with pytest.raises(ValueError, match=r"b\.jsonl:61: no JSON"):
        run(inputs, tmp_path / "out", partitions=8, workers=2)
    assert made == [0, 1, 2, 3, 4]
    assert not any((tmp_path / name).exists() for name in NAMES)
    assert not list(tmp_path.rglob("*.partial"))
    inputs[1].write_text(good)
    with pytest.raises(ValueError, match=r"out\.parts holds finished parts of an earlier run"):
        run(inputs, tmp_path / "out", partitions=8)
    run(inputs, tmp_path / "out", partitions=8, resume=True)
    assert made[5:] == [5, 6, 7]
    assert digests(tmp_path / "out") == digests(tmp_path / "whole")
    run(inputs, tmp_path / "out", partitions=2)
    assert made[8:] == [0, 1]


def half_done(inputs: list[Path], tmp_path: Path) -> Path:
    for part in range(2):
        run(inputs, tmp_path / "out", partitions=3, partition=part)
    return tmp_path / "out.parts"


def test_changed_inputs_and_damaged_parts_are_made_again(
    inputs: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = counted(monkeypatch)
    folder = half_done(inputs, tmp_path)
    assert made == [0, 1]
    inputs[0].write_text(inputs[0].read_text().replace("a.jsonl 3 ", "A.jsonl 3 "))
    (folder / "00001-of-00003.bin").write_bytes(b"short")
    run(inputs, tmp_path / "out", partitions=3, resume=True)
    assert made[2:] == [0, 1, 2]
    run(inputs, tmp_path / "whole")
    assert digests(tmp_path / "out") == digests(tmp_path / "whole")
    folder = half_done(inputs, tmp_path)
    damaged = bytearray((folder / "00001-of-00003.bin").read_bytes())
    damaged[40] ^= 1
    (folder / "00001-of-00003.bin").write_bytes(damaged)
    with pytest.raises(ValueError, match=r"00001-of-00003\.bin or \.idx is not what was written"):
        run(inputs, tmp_path / "out", partitions=3, resume=True)
    inputs[0].write_text(inputs[0].read_text() + '{"text": "more"}\n')
    run(inputs, tmp_path / "other", partitions=3, partition=0)
    with pytest.raises(ValueError, match="part 0 of 3 cannot be used: the inputs have other sizes"):
        run(inputs, tmp_path / "out", partitions=3, merge=True)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"on_bad_line": "skip"}, "was made with on_bad_line='fail', now it is 'skip'"),
        ({"sentences": "regex"}, "was made with sentences='whole', now it is 'regex'"),
    ],
)
def test_other_arguments_are_refused(
    inputs: list[Path], tmp_path: Path, change: dict, message: str
) -> None:
    half_done(inputs, tmp_path)
    with pytest.raises(ValueError, match=message):
        run(inputs, tmp_path / "out", partitions=3, resume=True, **change)
    record = tmp_path / "out.parts" / "00000-of-00003.json"
    record.write_text("{")
    with pytest.raises(ValueError, match=r"00000-of-00003\.json is no record of a part"):
        run(inputs, tmp_path / "out", partitions=3, resume=True)


def test_skipped_lines_of_all_parts_are_named(inputs: list[Path], tmp_path: Path) -> None:
    for number, path in enumerate(inputs[:2]):
        lines = path.read_text().splitlines(keepends=True)
        lines[10 + number] = '{"text": null}\n'
        lines[99] = "{}\n"
        path.write_text("".join(lines))
    for partitions in (1, 5):
        [card] = run(inputs, tmp_path / "out", partitions=partitions, on_bad_line="skip")
        assert card.skipped_lines == 4
        assert card.documents == 237
        listed = (tmp_path / "out.skipped.txt").read_text().splitlines()
        places = [entry.split(": ")[0].rsplit("/", 1)[1] for entry in listed]
        assert places == ["a.jsonl:11", "a.jsonl:100", "b.jsonl:12", "b.jsonl:100"]
        assert listed[0].endswith('"text" is neither a string nor a list of strings but has null')
    run(inputs[2:], tmp_path / "out")
    assert not (tmp_path / "out.skipped.txt").exists()
    assert read_card(tmp_path / "out").skipped_lines == 0  # type: ignore[union-attr]


def test_all_wrong_options_are_named() -> None:
    options = PreprocessOptions(
        fields=("a", "a"),
        workers=0,
        partitions=0,
        on_bad_line="x",  # type: ignore[arg-type]
        sentences="y",  # type: ignore[arg-type]
        merge=True,
        partition=1,
    )
    text = "\n".join(options.problems())
    for part in (
        "workers=0 must be at least 1",
        "partitions=0 must be at least 1",
        'sentences="y" must be "whole" or "regex" or "nltk"',
        'on_bad_line="x" must be "fail" or "skip"',
        "names a field twice",
        "partition, merge: give one of them",
        "partition=1 of 0",
    ):
        assert part in text
    assert "needs the number" in PreprocessOptions(partition=0).problems()[0]
    assert "needs the number" in PreprocessOptions(merge=True).problems()[0]
    assert "keep_newlines belongs" in PreprocessOptions(keep_newlines=True).problems()[0]
    assert PreprocessOptions(partitions=4, partition=3, resume=True).problems() == []
