"""`inspect`, `generate` and `fit --ckpt_path` on checkpoints that are whole, damaged or another
model's.
"""

import json
import shutil
from pathlib import Path

import pytest

from megatron_lightning import __version__
from megatron_lightning.checkpoint import CheckpointError, is_checkpoint
from megatron_lightning.checkpoint.preflight import read_tables
from megatron_lightning.cli.errors import run_command
from megatron_lightning.cli.main import main
from megatron_lightning.data.tokenizer import train_byte_bpe
from tests.unit.cli.test_trainer import checkpoint, folder  # noqa: F401 - fixtures


def run(arguments: list[str]) -> int:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert isinstance(ended.value.code, int)
    return ended.value.code


@pytest.fixture
def copy(checkpoint: Path, tmp_path: Path) -> Path:  # noqa: F811
    shutil.copytree(checkpoint, tmp_path / "copy.ckpt")
    return tmp_path / "copy.ckpt"


def flip(file: Path, place: int) -> None:
    data = bytearray(file.read_bytes())
    data[place] ^= 1
    file.write_bytes(data)


# ---------------------------------------------------------------------- inspect


def test_inspect_as_json(checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:  # noqa: F811
    assert run(["inspect", str(checkpoint), "--json", "--verify"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["megatron_lightning"] == __version__  # known without an installation
    assert (found["global_step"], found["layout"]) == (2, "one process (1 rank)")
    assert found["samples"] == 8  # two batches of four
    assert found["tokenizer_digest"] == "utf-8-bytes-256"
    assert found["hyper_parameters"]["config"]["hidden_size"] == 32
    embedding = "network.embedding.word_embeddings.weight"
    assert found["tensors"][f"model.{embedding}"] == {
        "dtype": "float32",
        "shape": [257, 32],
        "bytes": 257 * 32 * 4,
        "files": ["data/rank_00000.bin"],
    }
    assert f"optimizer.0.exp_avg.{embedding}" in found["tensors"]
    assert found["verified"] == f"all {len(found['files'])} files have their checksum"


def test_inspect_as_text(checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:  # noqa: F811
    assert run(["inspect", str(checkpoint), "--tensors"]) == 0
    shown = capsys.readouterr().out
    for text in (
        f"megatron_lightning {__version__}, torch ",
        "one process (1 rank)",
        "model.network.decoder.final_layernorm.weight",
        "float32 [257, 32]",
    ):
        assert text in shown


def test_a_flipped_byte_is_found_by_file_and_tensor(
    copy: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    name = "optimizer.0.exp_avg.network.decoder.layers.1.mlp.linear_fc2.weight"
    stored = read_tables(copy).index[name].boxes[0]
    flip(copy / stored.file, stored.start + 100)
    assert run(["inspect", str(copy)]) == 0  # tables only
    assert run(["inspect", str(copy), "--verify", "--json"]) == 2
    message = capsys.readouterr().err
    assert "data/rank_00000.bin is damaged" in message
    assert f"(in tensors {name} at [0, 0])" in message
    assert "Traceback" not in message


# ---------------------------------------------------------------------- generate


def test_generate_wants_the_tokenizer_of_the_training_data(
    checkpoint: Path,  # noqa: F811
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A smaller vocabulary would fit, and give nonsense."""
    train_byte_bpe(["to be or not to be"], 257, tmp_path / "tokenizer.json")
    arguments = ["generate", str(checkpoint), "--prompt", "to be", "--max-new-tokens", "2"]
    assert run([*arguments, "--tokenizer", str(tmp_path / "tokenizer.json")]) == 2
    message = capsys.readouterr().err
    assert "was trained with utf-8-bytes-256" in message
    assert "sha256:" in message
    assert run([*arguments, "--tokenizer", "bytes"]) == 0


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (["--device", "cuda"], "--device cuda: there is no such device here"),
        (["--device", "cuda:99"], "--device cuda:99: there is no such device here"),
        (["--device", "toaster"], "--device toaster: not a torch device"),
        (["--device", "meta"], "--device meta: holds no values"),
        (["--temperature", "-1"], "temperature=-1.0 must be 0 (greedy) or positive"),
        (["--top-k", "-1", "--top-p", "2"], "top_k=-1 must be 0"),
        (["--top-p", "0"], "top_p=0.0 must be in (0, 1]"),
        (["--max-new-tokens", "-3"], "max_new_tokens=-3 must not be negative"),
        (["--seed", "-1"], "seed=-1 must be between"),
    ],
)
def test_generate_checks_its_options_before_it_loads(
    options: list[str],
    text: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    import torch

    if options[1] == "cuda" and torch.cuda.is_available():
        pytest.skip("there is a CUDA device")
    arguments = ["generate", str(tmp_path), "--tokenizer", "bytes", "--prompt", "x"]
    assert run([*arguments, *options]) == 2
    message = capsys.readouterr().err
    assert text in message
    assert "Traceback" not in message
    assert "not a complete checkpoint" not in message


# ---------------------------------------------------------------------- fit --ckpt_path


@pytest.mark.parametrize("file", ["manifest.json", "metadata.json", "objects.json"])
def test_fit_finds_a_damaged_table_before_any_rank(
    file: str,
    folder: Path,  # noqa: F811
    copy: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    flip(copy / file, 60)
    arguments = ["fit", "--config", str(folder / "fit.yaml"), "--trainer.devices", "2"]
    assert run([*arguments, "--ckpt_path", str(copy)]) == 2
    captured = capsys.readouterr()
    assert f"{file} is damaged" in captured.err
    assert "Traceback" not in captured.err
    assert "GLOBAL_RANK" not in captured.err + captured.out


@pytest.mark.parametrize(
    ("option", "value", "text"),
    [
        ("num_layers", "1", "are in it, but not in the model"),
        ("num_layers", "3", "are missing in it: network.decoder.layers.2."),
        ("hidden_size", "64", "saved with shape [257, 32], the model has [257, 64]"),
        ("tie_word_embeddings", "true", "is in it, but not in the model"),
    ],
)
def test_fit_finds_another_model_before_any_rank(
    option: str,
    value: str,
    text: str,
    folder: Path,  # noqa: F811
    checkpoint: Path,  # noqa: F811
    capsys: pytest.CaptureFixture[str],
) -> None:
    arguments = ["fit", "--config", str(folder / "fit.yaml"), f"--model.config.{option}", value]
    assert run([*arguments, "--trainer.devices", "2", "--ckpt_path", str(checkpoint)]) == 2
    captured = capsys.readouterr()
    assert "it holds another model" in captured.err
    assert text in captured.err
    assert "Traceback" not in captured.err
    assert "GLOBAL_RANK" not in captured.err + captured.out


def test_fit_finds_another_tokenizer_before_any_rank(
    folder: Path,  # noqa: F811
    copy: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    from megatron_lightning.checkpoint.convert import Conversion, convert, native

    content = native.read_native(copy)
    objects = {**content.objects, "tokenizer_digest": "sha256:0"}
    other = copy.with_name("other.ckpt")
    native.write_native(other, type(content)(**{**vars(content), "objects": objects}))
    assert is_checkpoint(other)
    arguments = ["fit", "--config", str(folder / "fit.yaml"), "--ckpt_path", str(other)]
    assert run(arguments) == 2
    assert "it was trained with the tokenizer sha256:0" in capsys.readouterr().err
    convert(other, copy.with_name("third.ckpt"), how=Conversion(weights_only=True))


# ---------------------------------------------------------------------- errors


def test_a_checkpoint_error_is_one_message(capsys: pytest.CaptureFixture[str]) -> None:
    def command(arguments: list[str]) -> None:
        raise CheckpointError("a/b.bin: No space left on device")

    assert run_command(command, [], "fit") == 1
    assert capsys.readouterr().err == "megatron-lightning fit: a/b.bin: No space left on device\n"

    def crash(arguments: list[str]) -> None:
        raise RuntimeError("shapes differ")

    with pytest.raises(RuntimeError, match="shapes differ"):
        run_command(crash, [], "fit")
