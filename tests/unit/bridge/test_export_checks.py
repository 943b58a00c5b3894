"""What stands around an export: verification, model card, hub, progress."""

import io
import json
import sys
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
import yaml

from megatron_lightning.bridge import ExportOptions, export_checkpoint, from_hf
from megatron_lightning.bridge.progress import Bar
from megatron_lightning.bridge.record import SourceRecord
from megatron_lightning.bridge.verify import verify_logits
from megatron_lightning.bridge.writing import Export
from megatron_lightning.checkpoint import CheckpointError
from megatron_lightning.cli.convert import main
from megatron_lightning.models import GPTModel
from tests.hf_models import LOCAL, LOCAL_NAMES, Batches, Recorded, assert_same_tensors
from tests.layout_runs import make_strategy


@pytest.mark.parametrize("name", LOCAL_NAMES)
def test_verified(tmp_path: Path, name: str) -> None:
    """Tensors through the reading side, logits through transformers where it is."""
    from_hf(LOCAL / name).save_hf(tmp_path / "x", verify=True, max_shard_bytes=30_000)
    assert_same_tensors(tmp_path / "x", LOCAL / name)


def test_a_tensor_that_differs_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write = Export.write

    def damage(export: Export, *args: Any) -> None:
        write(export, *args)
        stored = export.files.tensors["model.layers.1.mlp.up_proj.weight"]
        with open(stored.file, "r+b") as file:
            file.seek(stored.start + 8)
            file.write(b"\xff")

    monkeypatch.setattr(Export, "write", damage)
    model = from_hf(LOCAL / "llama")
    with pytest.raises(CheckpointError, match=r"layers\.1\.mlp\.up_proj\.weight differs from"):
        model.save_hf(tmp_path / "x", verify=True)
    assert not list(tmp_path.iterdir())


def test_other_logits_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("transformers")
    from megatron_lightning.bridge import verify

    from_hf(LOCAL / "llama").save_hf(tmp_path / "x")
    found = verify_logits(tmp_path / "x")
    assert found is not None
    assert found < 1e-5
    there = verify._transformers_logits
    monkeypatch.setattr(verify, "_transformers_logits", lambda *a: there(*a) + 0.1)
    with pytest.raises(CheckpointError, match="transformers computes other logits"):
        verify_logits(tmp_path / "x")
    monkeypatch.setattr(verify, "find_spec", lambda name: None)
    assert verify_logits(tmp_path / "x") is None


def test_logits_are_compared_without_dropout(tmp_path: Path) -> None:
    """GPT-2 as it is published has dropout; a mode chosen before the network is built counts."""
    probabilities = dict.fromkeys(("embd_pdrop", "resid_pdrop", "attn_pdrop"), 0.5)
    model = from_hf(LOCAL / "gpt2", overrides=probabilities)
    model.save_hf(tmp_path / "x", verify=True)
    tokens = torch.arange(8)[None]
    again = from_hf(tmp_path / "x").eval()
    expected = from_hf(LOCAL / "gpt2", overrides=dict.fromkeys(probabilities, 0.0))(tokens)
    assert torch.equal(again(tokens), expected)
    adapted = again.add_lora(rank=2, dropout=0.5)
    assert not any(module.training for module in adapted.modules())


def card(folder: Path) -> tuple[dict[str, Any], str]:
    """Front matter and text."""
    _, header, text = (folder / "README.md").read_text().split("---\n", 2)
    return yaml.safe_load(header), text


def test_model_card(tmp_path: Path) -> None:
    """What is known, in the form the hub reads; nothing of the machine it was made on."""
    model = from_hf(LOCAL / "llama")
    base = tmp_path / "base"
    base.mkdir()
    (base / "README.md").write_text("---\nlicense: apache-2.0\nlanguage: [en]\nx: 1\n---\n# Base\n")
    (base / "LICENSE").write_text("terms")
    (base / "generation_config.json").write_text('{"eos_token_id": 2}')
    record = SourceRecord.from_dict(model.source_record or {})
    model.source_record = {**record.to_dict(), "name": "someone/base", "folder": str(base)}
    model.save_hf(tmp_path / "tuned")
    header, text = card(tmp_path / "tuned")
    assert header["base_model"] == "someone/base"
    assert header["library_name"] == "transformers"
    assert (header["license"], header["language"]) == ("apache-2.0", ["en"])
    assert "x" not in header
    assert "| architecture | `LlamaForCausalLM` |" in text
    assert f"| parameters | {model.config.num_parameters():,} |" in text
    assert "someone/base" in text
    assert "training" not in text
    assert str(tmp_path) not in text
    assert (tmp_path / "tuned" / "LICENSE").read_text() == "terms"
    kept = json.loads((tmp_path / "tuned" / "generation_config.json").read_text())
    assert kept == {"eos_token_id": 2}


class Counts(L.Callback):
    """Stands for a `TokenLedger`."""

    def training_facts(self) -> dict[str, int]:
        return {"tokens": 12_345}


def test_training_in_the_card(tmp_path: Path) -> None:
    """From a Trainer, and the same steps and layout from its checkpoint on disk."""
    model = from_hf(LOCAL / "llama")
    recorded = Recorded.read(LOCAL / "llama")
    trainer = L.Trainer(
        strategy=make_strategy({}),
        accelerator="cpu",
        devices=1,
        max_steps=2,
        limit_val_batches=0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[Counts()],
    )
    trainer.fit(model, Batches(recorded.batch(), recorded.batch()))
    model.save_hf(tmp_path / "out")
    _, text = card(tmp_path / "out")
    layout = trainer.strategy.mesh.describe()  # type: ignore[attr-defined]
    for row in ("optimizer steps | 2", "tokens | 12,345", "precision | 32-true", f"| {layout} |"):
        assert row in text
    assert "| base model | llama |" in text
    trainer.save_checkpoint(tmp_path / "x.ckpt")
    export_checkpoint(tmp_path / "x.ckpt", tmp_path / "converted", ExportOptions(verify=True))
    _, text = card(tmp_path / "converted")
    assert "optimizer steps | 2" in text
    assert f"| layout | {layout} |" in text
    assert_same_tensors(tmp_path / "converted", tmp_path / "out")


def test_tokens_of_a_ledger_in_a_checkpoint() -> None:
    from megatron_lightning.bridge.card import facts_of_checkpoint
    from megatron_lightning.callbacks import TokenLedger

    ledger = TokenLedger()
    state = ledger.state_dict()
    state["rows"] = [["a", 0, 1, 1, 100, 90, 80, 0], ["b", 0, 1, 1, 11, 10, 7, 0]]
    facts = facts_of_checkpoint({"global_step": 3, "callbacks": {"TokenLedger": state}}, {})
    assert facts == {"optimizer steps": 3, "tokens": 111, "tokens with a loss": 87}
    ledger.load_state_dict(state)
    assert ledger.training_facts() == {"tokens": 111, "tokens with a loss": 87}


class Hub:
    """Stands for the hub's client."""

    calls: list[tuple[str, dict[str, Any]]]
    broken = False

    def create_repo(self, repo_id: str, **options: Any) -> None:
        self.calls.append(("create", {"repo_id": repo_id, **options}))

    def upload_folder(self, **options: Any) -> None:
        if self.broken:
            raise OSError("not logged in")
        files = sorted(p.name for p in Path(options["folder_path"]).iterdir())
        self.calls.append(("upload", {**options, "files": files}))


def test_push_to_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Hub.calls = []
    monkeypatch.setattr("megatron_lightning.bridge.hub.HfApi", Hub)
    model = from_hf(LOCAL / "llama")
    model.save_hf(tmp_path / "x", push_to_hub="someone/tuned")
    (_, created), (_, uploaded) = Hub.calls
    assert created == {"repo_id": "someone/tuned", "exist_ok": True}
    assert uploaded["repo_id"] == "someone/tuned"
    assert uploaded["files"] == ["README.md", "config.json", "model.safetensors"]
    with pytest.raises(ValueError, match=r"push_to_hub='a/b/c': give the id of a repository"):
        model.save_hf(tmp_path / "y", push_to_hub="a/b/c")
    assert not (tmp_path / "y").exists()
    monkeypatch.setattr(Hub, "broken", True)
    with pytest.raises(ValueError, match="is written, but could not be pushed.*not logged in"):
        model.save_hf(tmp_path / "y", push_to_hub="someone/tuned")
    assert_same_tensors(tmp_path / "y", LOCAL / "llama")


def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Hub.calls = []
    monkeypatch.setattr("megatron_lightning.bridge.hub.HfApi", Hub)
    native, out = str(tmp_path / "native"), str(tmp_path / "out")
    main([str(LOCAL / "qwen2"), native])
    main([native, out, "--to", "huggingface", "--verify", "--push-to-hub", "me/x"])
    assert [name for name, _ in Hub.calls] == ["create", "upload"]
    assert_same_tensors(tmp_path / "out", LOCAL / "qwen2")


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("terminal", [True, False])
def test_progress(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, terminal: bool) -> None:
    """Bars that end at 100% on a terminal; not a word elsewhere."""
    shown = Terminal() if terminal else io.StringIO()
    monkeypatch.setattr(sys, "stderr", shown)
    model = from_hf(LOCAL / "llama")
    model.built_network()
    model.save_hf(tmp_path / "x", verify=True)
    text = shown.getvalue()
    for title in ("reading weights", "writing", "verifying"):
        assert (f"{title}: 100%" in text) == terminal, text


def test_a_bar_of_another_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = Terminal()
    monkeypatch.setattr(sys, "stderr", shown)
    monkeypatch.setattr("torch.distributed.is_initialized", lambda: True)
    monkeypatch.setattr("torch.distributed.get_rank", lambda: 1)
    bar = Bar("reading", "B")
    bar.expect(10)
    bar.update(10)
    assert shown.getvalue() == ""


def test_a_whole_network_expects_what_it_reads() -> None:
    model = from_hf(LOCAL / "gpt2")
    model.built_network()
    source: Any = model.initial_values
    assert source.bar.done == source.bar.total == model.config.num_parameters()
    assert isinstance(model, GPTModel)
    assert torch.isfinite(next(model.parameters())).all()
