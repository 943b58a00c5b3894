"""Files in place of checkpoint folders, and paths that hold none: what it is, what to give."""

from pathlib import Path

import pytest
import torch

from megatron_lightning.cli import main as entry


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "text.txt").write_text("hello\n")
    (tmp_path / "corpus.idx").write_bytes(b"MMIDIDX")
    torch.save({"a": torch.zeros(1)}, tmp_path / "old.ckpt")
    return tmp_path


def refusal(
    arguments: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> str:
    monkeypatch.setattr("sys.argv", ["megatron-lightning", *arguments])
    with pytest.raises(SystemExit) as left:
        entry.main()
    assert left.value.code == 2
    return capsys.readouterr().err


@pytest.mark.parametrize(
    ("command", "told"),
    [
        (
            "inspect {}/text.txt",
            "text.txt is a file; give a checkpoint folder, or the path of a cor",
        ),
        ("inspect {}/corpus.idx", "is a file; give the path of a corpus without suffix: "),
        (
            "inspect {}/old.ckpt",
            "is a file; `megatron-lightning convert` makes a checkpoint folder",
        ),
        ("inspect {}/nothing", "neither a checkpoint folder nor "),
        ("generate {}/text.txt --tokenizer bytes --prompt a", "it is a file; give a folder"),
        ("generate {}/nothing --tokenizer bytes --prompt a", "there is no such folder; give"),
        ("convert {}/text.txt {}/out", "text.txt is no checkpoint: it is neither a *.safetensors"),
        ("convert {}/text.txt {}/out --from native", "is a file; a checkpoint of the kind native"),
        ("convert {}/text.txt {}/out --from nemo", "is a file; a checkpoint of the kind nemo is a"),
        ("convert {}/nothing {}/out", "nothing does not exist; give the file or folder of a check"),
        ("convert {}/old.ckpt {}/out", "give --allow-pickle"),
    ],
)
def test_one_message(
    command: str,
    told: str,
    folder: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    arguments = command.replace("{}", str(folder)).split()
    message = refusal(arguments, capsys, monkeypatch)
    assert told in message
    assert message.startswith(f"megatron-lightning {arguments[0]}: ")
    assert len(message.splitlines()) == 1
