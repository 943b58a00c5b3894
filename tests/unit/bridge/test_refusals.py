"""What can't be followed is refused by its name."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from megatron_lightning.bridge import from_hf
from tests.hf_models import LOCAL, legacy_copy

Edit = Callable[..., Path]


@pytest.fixture
def edited(tmp_path: Path) -> Edit:
    """Copies a model with changes to its config (None removes a field) and tensors."""

    def edit(
        name: str,
        changes: dict[str, Any] | None = None,
        tensors: Callable[[dict[str, torch.Tensor]], Any] | None = None,
        legacy: bool = False,
    ) -> Path:
        folder = tmp_path / "model"
        shutil.rmtree(folder, ignore_errors=True)
        if legacy:
            legacy_copy(LOCAL / name, folder)
        else:
            shutil.copytree(LOCAL / name, folder)
        config = json.loads((folder / "config.json").read_text())
        for key, value in (changes or {}).items():
            config[key] = value
            if value is None:
                del config[key]
        (folder / "config.json").write_text(json.dumps(config))
        if tensors is not None:
            held = load_file(folder / "model.safetensors")
            tensors(held)
            save_file(held, folder / "model.safetensors")
        return folder

    return edit


def rope(**fields: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_theta": 10000.0, **fields}}


CONFIGS: dict[str, tuple[str, dict[str, Any], str]] = {
    "unknown model": ("llama", {"model_type": "llamba"}, "model_type='llamba' is unknown"),
    "no model": ("llama", {"model_type": None}, "model_type=None is unknown"),
    "no cap": (
        "gemma2",
        {"attn_logit_softcapping": None},
        "attn_logit_softcapping is missing",
    ),
    "no pattern": (
        "gemma3_text",
        {"layer_types": None, "_sliding_window_pattern": None},
        "no sliding",
    ),
    "window of none": ("gemma2", {"sliding_window": None}, "must be a number"),
    "bitnet": ("llama", {"model_type": "bitnet"}, "parts that are not there yet: ternary"),
    "noise": ("mixtral", {"router_jitter_noise": 0.1}, "noise on what experts see is not"),
    "no experts": ("mixtral", {"num_local_experts": None}, "num_local_experts is missing"),
    "two numbers of experts": ("qwen3_moe", {"num_experts": 5}, "the file says .*5.*6"),
    "biases on experts alone": ("gpt_oss", {"attention_bias": False}, "biases on experts alone"),
    "more experts a token": ("gpt_oss", {"experts_per_token": 3}, "num_experts_per_tok=2 is not"),
    "no size": ("llama", {"hidden_size": None}, "hidden_size is missing"),
    "no layers": ("gpt2", {"n_layer": None}, "n_layer is missing"),
    "no epsilon": ("llama", {"rms_norm_eps": None}, "rms_norm_eps is missing"),
    "no vocabulary": ("qwen2", {"vocab_size": None}, "vocab_size is missing"),
    "groups not derived": ("qwen2", {"num_key_value_heads": None}, "num_key_value_heads is miss"),
    "head size not derived": ("qwen3", {"head_dim": None}, "head_dim is missing"),
    "text as number": ("llama", {"hidden_size": "64"}, "hidden_size='64': not a int"),
    "activation": ("llama", {"hidden_act": "mish"}, "hidden_act='mish': unknown activation"),
    "no rope": ("llama", {"rope_parameters": None}, "rope_theta.* is missing"),
    "no base": ("llama", {"rope_parameters": {"rope_type": "default"}}, "rope_theta.* is missing"),
    "dynamic rope": ("llama", rope(rope_type="dynamic", factor=2.0), "rope kind 'dynamic' is not"),
    "longrope": ("phi3", rope(rope_type="longrope"), "rope kind 'longrope' is not"),
    "no factor": ("llama", rope(rope_type="linear"), r"'linear' needs \['factor'\]"),
    "odd rope": ("llama", rope(rope_type="linear", factor=2.0, odd=1), r"unknown fields \['odd'\]"),
    "rope in layers": (
        "llama",
        {"rope_parameters": {"full_attention": {"rope_theta": 1.0}}},
        "different layers",
    ),
    "part of a head": (
        "llama",
        rope(rope_type="default", partial_rotary_factor=0.5),
        "partial_rotary_factor=0.5: this architecture rotates whole heads",
    ),
    "two bases": ("llama", {"rope_theta": 10.0}, "rope_theta=10.0: rope_parameters say 500000.0"),
    "quantised": (
        "llama",
        {"quantization_config": {"quant_method": "awq"}},
        "quantization_config.quant_method='awq' is not supported",
    ),
    "unknown field": ("llama", {"residual_multiplier": 0.2}, "residual_multiplier.*not understood"),
    "bias on attention": ("llama", {"attention_bias": True}, "attention_bias=True"),
    "bias on mlp": ("llama", {"mlp_bias": True}, "mlp_bias=True"),
    "scale by layer": ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, "scale for each layer"),
    "dropouts": ("gpt2", {"embd_pdrop": 0.1}, "embd_pdrop=0.1: must equal resid_pdrop"),
    "layer kinds": ("qwen2", {"layer_types": ["full_attention", "x"]}, "layer_types"),
    "no window": ("mistral", {"sliding_window": 0}, "sliding_window=0: must be positive"),
    "heads": ("llama", {"num_key_value_heads": 3}, "num_query_groups=3 does not divide"),
}


@pytest.mark.parametrize("case", CONFIGS)
def test_configs(edited: Edit, case: str) -> None:
    name, changes, message = CONFIGS[case]
    with pytest.raises(ValueError, match=message):
        from_hf(edited(name, changes))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rope_theta": None}, "rope_theta.* is missing"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope kind 'dynamic'"),
        ({"rope_scaling": {"type": "linear"}}, "needs"),
        ({"rope_scaling": 8}, "rope_scaling=8: not a mapping"),
    ],
)
def test_configs_in_the_older_spelling(edited: Edit, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        from_hf(edited("llama", changes, legacy=True))


def renamed(old: str, new: str) -> Callable[[dict[str, torch.Tensor]], Any]:
    return lambda held: held.update({new: held.pop(old)})


NORM, HEAD = "model.norm.weight", "lm_head.weight"
TENSORS: dict[str, tuple[str, Callable[[dict[str, torch.Tensor]], Any], str]] = {
    "missing": ("llama", lambda t: t.pop(NORM), r"tensors are missing: \['model.norm.weight'\]"),
    "misspelt": ("llama", renamed(NORM, "model.norm.wait"), "belong to no parameter.*norm.wait"),
    "a bias too many": (
        "qwen2",
        lambda t: t.update({"model.layers.0.self_attn.o_proj.bias": torch.zeros(32)}),
        "belong to no parameter.*o_proj.bias",
    ),
    "a layer too many": (
        "llama",
        lambda t: t.update({k.replace(".1.", ".2."): v + 0 for k, v in t.items() if ".1." in k}),
        "belong to no parameter.*layers.2",
    ),
    "shape": (
        "llama",
        lambda t: t.update({NORM: torch.zeros(31)}),
        r"model.norm.weight has shape \[31\], not \[32\]",
    ),
    "vocabulary": (
        "llama",
        lambda t: t.update({HEAD: torch.zeros(40, 32)}),
        r"lm_head.weight has shape \[40, 32\], not \[35, 32\]",
    ),
    "integers": (
        "llama",
        lambda t: t.update({HEAD: torch.zeros(35, 32, dtype=torch.int8)}),
        "quantised weights are not supported",
    ),
    "tied but not in the file": (
        "qwen2",
        lambda t: t.update({HEAD: torch.ones(35, 32)}),
        "differs from model.embed_tokens.weight, but the config says tie_word_embeddings=true",
    ),
    "not tied and no head": ("llama", lambda t: t.pop(HEAD), "set tie_word_embeddings"),
}


@pytest.mark.parametrize("case", TENSORS)
def test_tensors(edited: Edit, case: str) -> None:
    name, change, message = TENSORS[case]
    with pytest.raises(ValueError, match=message):
        from_hf(edited(name, tensors=change))


def test_folders(edited: Edit, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no such folder"):
        from_hf(tmp_path / "nowhere")
    with pytest.raises(ValueError, match=r"there is no config\.json"):
        from_hf(tmp_path)
    folder = edited("llama")
    (folder / "config.json").write_text("{")
    with pytest.raises(ValueError, match="is no JSON"):
        from_hf(folder)
    folder = edited("llama")
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(ValueError, match="pickles, which are not read"):
        from_hf(folder)
    folder = edited("llama")
    (folder / "model.safetensors.index.json").write_text('{"weight_map": {"a": "b.safetensors"}}')
    with pytest.raises(ValueError, match=r"b\.safetensors is missing"):
        from_hf(folder)
    (folder / "model.safetensors.index.json").write_text('{"weight_map": {"a": "../b"}}')
    with pytest.raises(ValueError, match="no name of a file in this folder"):
        from_hf(folder)
    (folder / "model.safetensors.index.json").write_text(
        '{"weight_map": {"a": "model.safetensors"}}'
    )
    with pytest.raises(ValueError, match="does not agree with its files"):
        from_hf(folder)


def test_what_is_harmless_is_accepted(edited: Edit) -> None:
    """Fields that are off, computed buffers, a tied head that is stored twice."""
    fields = {"use_mrope": False, "sep_token_id": 5, "pruned_heads": {}, "do_sample": True}
    from_hf(edited("llama", fields))
    buffers = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(4)}
    from_hf(edited("llama", tensors=lambda t: t.update(buffers)))
    from_hf(
        edited("gpt2", tensors=lambda t: t.update({"transformer.h.0.attn.bias": torch.ones(1)}))
    )
    word = "model.embed_tokens.weight"
    from_hf(edited("qwen2", tensors=lambda t: t.update({HEAD: t[word].clone()})))


def test_overrides_fill_and_remove(edited: Edit) -> None:
    folder = edited("llama", {"rope_theta": None, "odd": 3}, legacy=True)
    with pytest.raises(ValueError, match=r"overrides=\{'rope_theta': \.\.\.\}"):
        from_hf(folder)
    model = from_hf(folder, overrides={"rope_theta": 500000.0, "odd": None})
    assert model.config == from_hf(LOCAL / "llama").config


def test_an_id_that_the_hub_does_not_give(monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    def refuse(*_: Any, **__: Any) -> None:
        raise huggingface_hub.errors.LocalEntryNotFoundError("no connection")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", refuse)
    with pytest.raises(ValueError, match="someone/model is no folder here.*no connection"):
        from_hf("someone/model")


def test_an_id_of_the_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    asked = []

    def give(name: str, *, revision: str | None, allow_patterns: list[str]) -> str:
        asked.append((name, revision))
        assert "*.safetensors" in allow_patterns
        assert not any(pattern.endswith(".bin") for pattern in allow_patterns)
        return str(LOCAL / "llama")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", give)
    model = from_hf("someone/model", revision="main")
    assert asked == [("someone/model", "main")]
    assert model.config == from_hf(LOCAL / "llama").config
