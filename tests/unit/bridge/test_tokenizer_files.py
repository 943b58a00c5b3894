"""The tokenizer of an exported model: its files, and its ids in config.json."""

import json
import logging
import shutil
from pathlib import Path

import pytest

from megatron_lightning.bridge import ExportOptions, export_checkpoint, import_checkpoint, verify
from megatron_lightning.bridge.tokenizer_files import companions_of_tokenizer
from megatron_lightning.cli.convert import main
from megatron_lightning.config import GPTConfig
from megatron_lightning.data import load_tokenizer
from megatron_lightning.data.tokenizer import train_byte_bpe
from megatron_lightning.models import GPTModel
from tests.hf_models import LOCAL

TEXT = "to be, or not to be: that is the question, ünïcode"
CONFIG = GPTConfig(
    vocab_size=280, num_layers=2, hidden_size=32, num_attention_heads=4, ffn_hidden_size=40
)


@pytest.fixture
def vocabulary(tmp_path: Path) -> Path:
    """As `preprocess` leaves it: one special token, and a name of its own."""
    train_byte_bpe([TEXT] * 3, 270, tmp_path / "corpus.tokenizer.json")
    return tmp_path / "corpus.tokenizer.json"


def read(path: Path) -> dict:
    return json.loads(path.read_text())


@pytest.mark.parametrize("architecture", ["llama", "qwen3"])
def test_a_file_of_any_name_becomes_what_transformers_loads(
    vocabulary: Path, tmp_path: Path, architecture: str
) -> None:
    transformers = pytest.importorskip("transformers")
    config = CONFIG if architecture == "llama" else GPTConfig(**_fields(qk_layernorm=True))
    GPTModel(config).save_hf(tmp_path / "out", tokenizer=vocabulary, architecture=architecture)
    loaded = transformers.AutoTokenizer.from_pretrained(tmp_path / "out", local_files_only=True)
    ours = load_tokenizer(vocabulary)
    assert loaded(TEXT).input_ids == ours.encode(TEXT)
    assert (loaded.eos_token, loaded.eos_token_id) == ("<|endoftext|>", ours.eod_id)
    assert loaded.bos_token is None
    written = read(tmp_path / "out" / "config.json")
    assert [written[f"{name}_token_id"] for name in ("eos", "bos", "pad")] == [0, None, None]
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert model.config.eos_token_id == 0


def _fields(**changes: object) -> dict:
    names = ("vocab_size", "num_layers", "hidden_size", "num_attention_heads", "ffn_hidden_size")
    return {name: getattr(CONFIG, name) for name in names} | changes


def test_names_come_from_the_settings_beside_it(vocabulary: Path, tmp_path: Path) -> None:
    content = read(vocabulary)
    token = {**content["added_tokens"][0], "content": "<begin>", "id": 270}
    content["added_tokens"].append(token)
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "tokenizer.json").write_text(json.dumps(content))
    assert companions_of_tokenizer(folder).token_ids == {"eos_token_id": 0}  # unknown: not guessed
    settings = {"bos_token": "<begin>", "eos_token": {"content": "<|endoftext|>"}}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    for given in (folder, folder / "tokenizer.json"):
        GPTModel(CONFIG).save_hf(tmp_path / f"of {given.name}", tokenizer=given)
        written = read(tmp_path / f"of {given.name}" / "config.json")
        assert (written["bos_token_id"], written["eos_token_id"]) == (270, 0)
        assert read(tmp_path / f"of {given.name}" / "tokenizer_config.json") == settings


def test_without_a_known_end_all_stays_null(vocabulary: Path, tmp_path: Path) -> None:
    vocabulary.write_text(vocabulary.read_text().replace("<|endoftext|>", "<|own|>"))
    GPTModel(CONFIG).save_hf(tmp_path / "out", tokenizer=vocabulary)
    written = read(tmp_path / "out" / "config.json")
    assert written["eos_token_id"] is None
    assert "eos_token" not in read(tmp_path / "out" / "tokenizer_config.json")


def test_what_a_model_came_with_is_kept(tmp_path: Path) -> None:
    model = GPTModel.from_hf(LOCAL / "llama")
    fields = read(LOCAL / "llama" / "config.json")
    model.save_hf(tmp_path / "same")
    assert read(tmp_path / "same" / "config.json") == fields
    assert not (tmp_path / "same" / "tokenizer_config.json").exists()


def test_the_command(vocabulary: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    native = tmp_path / "native"
    GPTModel(CONFIG).save_hf(tmp_path / "whole")
    import_checkpoint(tmp_path / "whole", native)
    main([str(native), str(tmp_path / "bare"), "--to", "huggingface"])
    assert "without a tokenizer, which --tokenizer FILE adds" in capsys.readouterr().out
    given = ["--to", "huggingface", "--tokenizer", str(vocabulary)]
    main([str(native), str(tmp_path / "out"), *given])
    assert "without a tokenizer" not in capsys.readouterr().out
    assert (tmp_path / "out" / "tokenizer.json").read_bytes() == vocabulary.read_bytes()
    assert read(tmp_path / "out" / "config.json")["eos_token_id"] == 0


def test_what_is_no_tokenizer_of_the_model_is_refused(
    vocabulary: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "no.json").write_text("{}")
    (tmp_path / "text.txt").write_text("")
    for name, said in {
        "nowhere": "there is no such file or folder",
        "empty": "the folder holds none of",
        "text.txt": "transformers doesn't read this file",
        "no.json": "is no tokenizer.json",
    }.items():
        with pytest.raises(ValueError, match=said):
            companions_of_tokenizer(tmp_path / name)
    with pytest.raises(ValueError, match="no file of it that transformers reads"):
        companions_of_tokenizer("bytes")
    with pytest.raises(ValueError, match=r"is sha256:.*, the model was trained with sha256:0"):
        companions_of_tokenizer(vocabulary, digest="sha256:0")
    with pytest.raises(ValueError, match=r"'<\|endoftext\|>': 0.*beyond the 0 ids"):
        companions_of_tokenizer(vocabulary, vocab_size=0)
    folder = tmp_path / "folder"
    folder.mkdir()
    shutil.copy(vocabulary, folder / "tokenizer.json")
    assert not companions_of_tokenizer(folder, vocab_size=0).token_ids
    assert "names none of its tokens beyond the model's" in caplog.text


def test_messages_name_the_folder_that_is_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    import_checkpoint(LOCAL / "llama", tmp_path / "native")
    monkeypatch.setattr(verify, "find_spec", lambda name: None)
    with caplog.at_level(logging.WARNING):
        export_checkpoint(tmp_path / "native", tmp_path / "out", ExportOptions(verify=True))
    (said,) = [r.getMessage() for r in caplog.records if "not compared" in r.getMessage()]
    assert said == f"{tmp_path / 'out'}: logits not compared, transformers is not installed"
