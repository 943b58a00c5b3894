"""Hugging Face folders to native checkpoints and back, on disk, and on the command line."""

import json
from pathlib import Path

import lightning as L
import pytest
import torch

from megatron_lightning.bridge import (
    ExportOptions,
    export_checkpoint,
    from_hf,
    import_checkpoint,
)
from megatron_lightning.checkpoint import list_tensors
from megatron_lightning.cli.convert import main
from megatron_lightning.cli.errors import UserError
from megatron_lightning.models import GPTModel
from tests.hf_models import (
    LOCAL,
    LOCAL_NAMES,
    LOGITS,
    Batches,
    Recorded,
    assert_same_tensors,
    tensors_of,
)
from tests.layout_runs import make_strategy


@pytest.mark.parametrize("name", LOCAL_NAMES)
def test_there_and_back(tmp_path: Path, name: str) -> None:
    import_checkpoint(LOCAL / name, tmp_path / "native", files=2)
    model = GPTModel.load_from_checkpoint(tmp_path / "native")
    tokens = Recorded.read(LOCAL / name).arrays["input_ids"]
    with torch.no_grad():
        assert torch.equal(model(tokens), from_hf(LOCAL / name)(tokens))
    export_checkpoint(tmp_path / "native", tmp_path / "out", ExportOptions(max_shard_bytes=10_000))
    assert_same_tensors(tmp_path / "out", LOCAL / name)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config == json.loads((LOCAL / name / "config.json").read_text())


def test_an_imported_checkpoint_under_a_trainer(tmp_path: Path) -> None:
    import_checkpoint(LOCAL / "llama", tmp_path / "native")
    recorded = Recorded.read(LOCAL / "llama")
    model = GPTModel(from_hf(LOCAL / "llama").config)
    trainer = L.Trainer(
        strategy=make_strategy({}),
        accelerator="cpu",
        devices=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
    )
    (logits,) = trainer.predict(  # type: ignore[misc]
        model, Batches(recorded.batch()), ckpt_path=str(tmp_path / "native")
    )
    torch.testing.assert_close(logits, recorded.arrays["logits"], rtol=LOGITS, atol=LOGITS)
    assert model.source_record is not None


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    native, out = str(tmp_path / "native"), str(tmp_path / "out")
    main([str(LOCAL / "llama"), native, "--dtype", "bfloat16"])
    assert "tensors of weights" in capsys.readouterr().out
    assert {t.dtype for t in list_tensors(native).values()} == {torch.bfloat16}
    main([native, out, "--to", "huggingface", "--architecture", "mistral", "--shard-size", "1e-5"])
    assert json.loads((tmp_path / "out" / "config.json").read_text())["model_type"] == "mistral"
    assert len(list((tmp_path / "out").glob("*.safetensors"))) > 3
    ours, theirs = tensors_of(tmp_path / "out"), tensors_of(LOCAL / "llama")
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[k], v.bfloat16().to(ours[k].dtype)) for k, v in theirs.items())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["HF", "x.safetensors", "--to", "safetensors"], "convert in two steps"),
        (["HF", "x", "--preset", "tiny"], "--preset: without a meaning"),
        (["HF", "x", "--shard-size", "2"], "--shard-size: without a meaning"),
        (["HF", "."], "exists; choose another name"),
        (["./nowhere", "x", "--from", "huggingface"], "no such folder"),
        (["nowhere", "x", "--to", "huggingface"], "nowhere"),
        (["HF", "x", "--files", "0"], "files=0: give at least 1"),
        (["HF", "x", "--allow-pickle"], "--allow-pickle: without a meaning"),
        (["x", "y", "--to", "huggingface", "--shard-size", "nan"], "--shard-size nan: give gigab"),
        (["x", "y", "--to", "huggingface", "--push-to-hub", "a/b/c"], "push_to_hub='a/b/c': give"),
        (["x.safetensors", "x", "--tokenizer", "y"], "--tokenizer: only with --to huggingface"),
    ],
)
def test_wrong_arguments(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    arguments = [str(LOCAL / "llama") if a == "HF" else a for a in arguments]
    with pytest.raises(UserError, match=message):
        main(arguments)
    assert not list(tmp_path.iterdir())
