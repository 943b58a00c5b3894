"""Folders that come out: as they came in, or in the first architecture that is the network."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from safetensors.torch import load_file, save_file

from megatron_lightning.bridge import FAMILIES, from_hf, to_hf
from megatron_lightning.bridge.family import difference
from megatron_lightning.config import (
    AttentionConfig,
    ClampConfig,
    GPTConfig,
    MoEConfig,
    RotaryConfig,
    StreamConfig,
)
from megatron_lightning.models import GPTModel, preset_config
from tests.hf_models import LOCAL, LOCAL_NAMES, Batches, Recorded, assert_same_tensors, tensors_of
from tests.layout_runs import make_strategy

SMALL: dict[str, Any] = dict(
    vocab_size=33,
    num_layers=3,
    hidden_size=32,
    num_attention_heads=4,
    num_query_groups=2,
    ffn_hidden_size=40,
    max_position_embeddings=64,
)
YARN = RotaryConfig(scaling="yarn", factor=4.0, original_max_position_embeddings=16)
LLAMA3 = RotaryConfig(scaling="llama3", factor=8.0, original_max_position_embeddings=16)
OWN: dict[str, tuple[str, dict[str, Any]]] = {
    "plain": ("llama", {}),
    "llama3": ("llama", {"rotary": LLAMA3, "tie_word_embeddings": True}),
    "linear": ("llama", {"rotary": RotaryConfig(scaling="linear", factor=2.0)}),
    "biases": ("llama", {"add_bias_linear": True}),
    "window": ("mistral", {"window_size": 7, "head_dim": 16}),
    "qkv bias": ("qwen2", {"add_qkv_bias": True, "rotary": YARN, "norm_epsilon": 1e-6}),
    "upper windows": (
        "qwen2",
        {"add_qkv_bias": True, "window_size": 5, "window_pattern": "FSS"},
    ),
    "head norms": ("qwen3", {"qk_layernorm": True, "activation": "gelu_tanh"}),
    "gemma2": (
        "gemma2",
        {
            "window_size": 5,
            "window_pattern": "SF",
            "tie_word_embeddings": True,
            "attention": AttentionConfig(scale_dim=12, score_cap=2.0),
            "stream": StreamConfig(
                embedding_scale=SMALL["hidden_size"] ** 0.5,
                zero_centered_norm=True,
                branch_norm=True,
                logit_cap=3.0,
            ),
        },
    ),
    "gemma3_text": (
        "gemma3_text",
        {
            "window_size": 5,
            "window_pattern": "SSF",
            "qk_layernorm": True,
            "rotary": RotaryConfig(base=1e6, scaling="linear", factor=4.0),
            "attention": AttentionConfig(local_rotary=RotaryConfig()),
            "stream": StreamConfig(
                embedding_scale=SMALL["hidden_size"] ** 0.5,
                zero_centered_norm=True,
                branch_norm=True,
            ),
        },
    ),
    "mixtral": ("mixtral", {"window_size": 6, "moe": MoEConfig(num_experts=4)}),
    "qwen3_moe": (
        "qwen3_moe",
        {
            "qk_layernorm": True,
            "moe": MoEConfig(
                num_experts=6,
                ffn_hidden_size=12,
                layer_pattern="ED",
                router_pre_softmax=True,
                router_normalize_topk=False,
            ),
        },
    ),
    "gpt_oss": (
        "gpt_oss",
        {
            "window_size": 5,
            "window_pattern": "SF",
            "add_bias_linear": True,
            "rotary": replace(YARN, truncate=False),
            "attention": AttentionConfig(sinks=True),
            "clamp": ClampConfig(limit=0.5),
            "moe": MoEConfig(num_experts=4, router_bias=True),
        },
    ),
    "partly rotated": ("phi3", {"rotary": RotaryConfig(percent=0.5)}),
    "gpt2": (
        "gpt2",
        {
            "norm": "layernorm",
            "activation": "gelu_tanh",
            "gated_linear_unit": False,
            "add_bias_linear": True,
            "position_embedding": "learned",
            "num_query_groups": 4,
        },
    ),
}


def logits(model: GPTModel) -> torch.Tensor:
    tokens = torch.arange(24).reshape(2, 12) % model.config.vocab_size
    with torch.no_grad():
        return model(tokens)


@pytest.mark.parametrize("case", OWN)
def test_own_models(tmp_path: Path, case: str) -> None:
    """A model that came from nowhere is written so that it comes back as the same network."""
    architecture, changes = OWN[case]
    model = GPTModel(GPTConfig(**{**SMALL, **changes}))
    model.save_hf(tmp_path / "x")
    config = json.loads((tmp_path / "x" / "config.json").read_text())
    assert config["model_type"] == architecture
    assert config["torch_dtype"] == "float32"
    back = from_hf(tmp_path / "x")
    assert difference(model.config, back.config) is None
    assert torch.equal(logits(back), logits(model))


@pytest.mark.parametrize(
    ("name", "family"),
    [
        ("gpt2", "gpt2"),
        ("llama3.1-8b", "llama"),
        ("mistral-7b", "mistral"),
        ("qwen2.5-7b", "qwen2"),
        ("qwen3-8b", "qwen3"),
        ("mixtral-8x7b", "mixtral"),
        ("qwen3-30b-a3b", "qwen3_moe"),
        ("gemma2-2b", "gemma2"),
        ("gemma2-27b", "gemma2"),
        ("gemma3-1b", "gemma3_text"),
        ("gemma3-27b", "gemma3_text"),
        ("gpt-oss-20b", "gpt_oss"),
    ],
)
def test_presets_are_expressed(name: str, family: str) -> None:
    assert FAMILIES[family].expresses(preset_config(name)) is None


@pytest.mark.parametrize("architecture", ["mistral", "phi3"])
def test_another_architecture_that_expresses_it(tmp_path: Path, architecture: str) -> None:
    model = GPTModel(GPTConfig(**SMALL))
    to_hf(model, tmp_path / "x", architecture=architecture)
    assert torch.equal(logits(from_hf(tmp_path / "x")), logits(model))


def test_networks_that_no_architecture_is(tmp_path: Path) -> None:
    model = GPTModel(GPTConfig(**SMALL, qk_layernorm=True, add_qkv_bias=True))
    with pytest.raises(ValueError, match=r"no architecture(.|\n)*- qwen3: add_qkv_bias=True"):
        model.save_hf(tmp_path / "x")
    with pytest.raises(ValueError, match="'llama' is not this network: .*qk_layernorm=True"):
        model.save_hf(tmp_path / "x", architecture="llama")
    with pytest.raises(ValueError, match="model_type='llaama' is unknown"):
        model.save_hf(tmp_path / "x", architecture="llaama")
    assert not list(tmp_path.iterdir())


def test_nothing_is_overwritten_and_nothing_left_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = GPTModel(GPTConfig(**SMALL))
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    with pytest.raises(ValueError, match="exists already"):
        model.save_hf(tmp_path / "full")
    (tmp_path / "full" / "file").unlink()
    with monkeypatch.context() as patch:
        patch.setattr("megatron_lightning.bridge.writing.write_box", _no_room)
        with pytest.raises(OSError, match="no space left"):
            model.save_hf(tmp_path / "full")
    assert [p.name for p in tmp_path.iterdir()] == ["full"]
    model.save_hf(tmp_path / "full")
    assert torch.equal(logits(from_hf(tmp_path / "full")), logits(model))
    for wrong in ({"max_shard_bytes": 0}, {"dtype": torch.int8}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            model.save_hf(tmp_path / "other", **wrong)
    assert [p.name for p in tmp_path.iterdir()] == ["full"]


def _no_room(*_: Any) -> None:
    raise OSError("no space left")


def bfloat16_copy(name: str, folder: Path) -> Path:
    """A model in bfloat16 with norms in float32, in several files, with a tokenizer."""
    shutil.copytree(LOCAL / name, folder)
    held = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    placed = {}
    for number, (key, tensor) in enumerate(sorted(held.items())):
        file = f"model-{number % 3 + 1:05d}-of-00003.safetensors"
        placed.setdefault(file, {})[key] = tensor if "norm" in key else tensor.bfloat16()
    for file, tensors in placed.items():
        save_file(tensors, folder / file)
    names = {key: file for file, tensors in placed.items() for key in tensors}
    index = {"metadata": {}, "weight_map": names}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "dtype": "bfloat16"}))
    for companion in ("tokenizer.json", "generation_config.json"):
        (folder / companion).write_text("{}")
    return folder


def test_places_that_have_other_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A link to an empty folder, and the empty folder that one is in."""
    model = from_hf(LOCAL / "llama")
    for name in ("real", "here"):
        (tmp_path / name).mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    model.save_hf(tmp_path / "link")
    assert (tmp_path / "link").is_symlink()
    monkeypatch.chdir(tmp_path / "here")
    model.save_hf(".")
    for name in ("real", "here"):
        assert_same_tensors(tmp_path / name, LOCAL / "llama")
    with pytest.raises(ValueError, match=r"tokenizer='.*nowhere': there is no such file or folder"):
        model.save_hf(tmp_path / "x", tokenizer=tmp_path / "nowhere")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["here", "link", "real"]


def test_dtypes_files_and_companions(tmp_path: Path) -> None:
    source = bfloat16_copy("qwen3", tmp_path / "source")
    model = from_hf(source)
    model.save_hf(tmp_path / "same")
    assert_same_tensors(tmp_path / "same", source)
    config = json.loads((tmp_path / "same" / "config.json").read_text())
    assert config == json.loads((source / "config.json").read_text())
    assert (tmp_path / "same" / "tokenizer.json").read_text() == "{}"
    assert (tmp_path / "same" / "generation_config.json").is_file()
    model.save_hf(tmp_path / "float", dtype=torch.float32)
    assert {t.dtype for t in tensors_of(tmp_path / "float").values()} == {torch.float32}
    assert json.loads((tmp_path / "float" / "config.json").read_text())["dtype"] == "float32"


def test_names_without_a_prefix(tmp_path: Path) -> None:
    """Files of the bare model, as the first GPT-2 on the hub is."""
    source = tmp_path / "source"
    shutil.copytree(LOCAL / "gpt2", source)
    held = load_file(source / "model.safetensors")
    save_file(
        {k.removeprefix("transformer."): v for k, v in held.items()}, source / "model.safetensors"
    )
    model = from_hf(source)
    assert torch.equal(logits(model), logits(from_hf(LOCAL / "gpt2")))
    model.save_hf(tmp_path / "same")
    assert_same_tensors(tmp_path / "same", source)


@pytest.mark.parametrize("name", LOCAL_NAMES)
def test_transposed_and_fused_weights_in_bfloat16(tmp_path: Path, name: str) -> None:
    source = bfloat16_copy(name, tmp_path / "source")
    from_hf(source).save_hf(tmp_path / "same", max_shard_bytes=5000)
    assert_same_tensors(tmp_path / "same", source)


def test_what_a_model_was_outlives_checkpoints(tmp_path: Path) -> None:
    """phi3 is written as phi3 after a checkpoint of a run; its network is that of a llama."""
    model = from_hf(LOCAL / "phi3")
    trainer = L.Trainer(
        strategy=make_strategy({}),
        accelerator="cpu",
        devices=1,
        max_steps=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(model, Batches(Recorded.read(LOCAL / "phi3").batch()))
    trainer.save_checkpoint(tmp_path / "x.ckpt")
    loaded = GPTModel.load_from_checkpoint(tmp_path / "x.ckpt")
    assert loaded.initial_values is None
    loaded.save_hf(tmp_path / "loaded")
    model.save_hf(tmp_path / "direct")
    assert_same_tensors(tmp_path / "loaded", tmp_path / "direct")
    config = json.loads((tmp_path / "loaded" / "config.json").read_text())
    assert config == json.loads((LOCAL / "phi3" / "config.json").read_text())


def test_a_config_that_was_changed_is_written_changed(tmp_path: Path) -> None:
    model = from_hf(LOCAL / "phi3")
    longer = GPTModel(model.config.with_changes(max_position_embeddings=512))
    longer.source_record = model.source_record
    longer.save_hf(tmp_path / "x")
    config = json.loads((tmp_path / "x" / "config.json").read_text())
    assert (config["model_type"], config["max_position_embeddings"]) == ("phi3", 512)
    assert (config["bos_token_id"], config["eos_token_id"]) == (1, 2)
