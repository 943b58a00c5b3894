"""DeepSeek-V3's config, further layers, FP8 weights, and the biases of its routers."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from megatron_lightning.bridge import export_checkpoint, from_hf, import_checkpoint
from megatron_lightning.bridge.hf import FAMILIES
from megatron_lightning.bridge.source_config import SourceConfig
from megatron_lightning.config import GPTConfig, MultiTokenPredictionConfig
from megatron_lightning.models import GPTModel, preset_config
from tests.hf_models import LOCAL, Recorded, assert_same_tensors, tensors_of

FOLDER = LOCAL / "deepseek_v3"
BIAS = "model.layers.1.mlp.gate.e_score_correction_bias"


def config_json(**changes: Any) -> dict[str, Any]:
    values = json.loads((FOLDER / "config.json").read_text())
    return {key: value for key, value in {**values, **changes}.items() if value != "absent"}


def read(**changes: Any) -> GPTConfig:
    return FAMILIES["deepseek_v3"].read(SourceConfig(config_json(**changes), "config.json"))


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"q_lora_rank": "absent"}, "q_lora_rank is missing"),
        ({"kv_lora_rank": "absent"}, "kv_lora_rank is missing"),
        ({"routed_scaling_factor": "absent"}, "routed_scaling_factor is missing"),
        ({"moe_layer_freq": 2}, "moe_layer_freq=2"),
        ({"scoring_func": "softmax"}, "scoring_func='softmax'"),
        ({"topk_method": "greedy"}, "topk_method='greedy'"),
        ({"attention_bias": True}, "attention_bias=True"),
        ({"num_key_value_heads": 2}, "num_key_value_heads=2"),
        ({"qk_head_dim": 11}, "qk_head_dim=11"),
        ({"index_topk": 64}, "index_topk"),
        (
            {"rope_parameters": {**config_json()["rope_parameters"], "mscale": None}},
            "mscale and mscale_all_dim are supported together only",
        ),
    ],
)
def test_what_is_not_followed_is_named(changes: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=re.escape(text)):
        read(**changes)


def test_the_published_config_is_the_preset() -> None:
    """Fields of the published file that concern the network."""
    published = dict(
        model_type="deepseek_v3",
        vocab_size=129280,
        hidden_size=7168,
        intermediate_size=18432,
        moe_intermediate_size=2048,
        num_hidden_layers=61,
        num_nextn_predict_layers=1,
        num_attention_heads=128,
        num_key_value_heads=128,
        n_shared_experts=1,
        n_routed_experts=256,
        ep_size=1,
        routed_scaling_factor=2.5,
        kv_lora_rank=512,
        q_lora_rank=1536,
        qk_rope_head_dim=64,
        v_head_dim=128,
        qk_nope_head_dim=128,
        topk_method="noaux_tc",
        n_group=8,
        topk_group=4,
        num_experts_per_tok=8,
        moe_layer_freq=1,
        first_k_dense_replace=3,
        norm_topk_prob=True,
        scoring_func="sigmoid",
        aux_loss_alpha=0.001,
        seq_aux=True,
        hidden_act="silu",
        max_position_embeddings=163840,
        initializer_range=0.02,
        rms_norm_eps=1e-6,
        rope_theta=10000,
        rope_scaling=dict(
            beta_fast=32,
            beta_slow=1,
            factor=40,
            mscale=1.0,
            mscale_all_dim=1.0,
            original_max_position_embeddings=4096,
            type="yarn",
        ),
        attention_bias=False,
        attention_dropout=0.0,
        tie_word_embeddings=False,
    )
    found = FAMILIES["deepseek_v3"].read(SourceConfig(published, "config.json"))
    preset = preset_config("deepseek-v3")
    same = {name: getattr(preset, name) for name in ("moe", "multi_token_prediction")}
    assert found.with_changes(**same) == preset  # those differ in what only training sees
    assert FAMILIES["deepseek_v3"].expresses(preset) is None


def test_biases_of_routers_come_and_go(tmp_path: Path) -> None:
    model = from_hf(FOLDER)
    expected = tensors_of(FOLDER)[BIAS]
    name = "decoder.layers.1.mlp.router.expert_bias"
    assert torch.equal(model.built_network().get_buffer(name), expected)
    import_checkpoint(FOLDER, tmp_path / "native", dtype=torch.bfloat16)
    loaded = GPTModel.load_from_checkpoint(tmp_path / "native")
    bias = loaded.built_network().get_buffer(name)
    assert bias.dtype == torch.float32
    assert torch.equal(bias, expected)
    bias.add_(1.0)
    loaded.save_hf(tmp_path / "bf16", dtype=torch.bfloat16)
    written = tensors_of(tmp_path / "bf16")
    assert written[BIAS].dtype == torch.float32
    assert torch.equal(written[BIAS], expected + 1.0)
    assert written["lm_head.weight"].dtype == torch.bfloat16


def test_there_and_back_on_disk(tmp_path: Path) -> None:
    import_checkpoint(FOLDER, tmp_path / "native")
    export_checkpoint(tmp_path / "native", tmp_path / "back")
    assert_same_tensors(tmp_path / "back", FOLDER)


@pytest.fixture
def predicting(tmp_path: Path) -> tuple[GPTModel, Path]:
    """A model with two further layers, and its folder as such are published: with copies of the
    embedding and the head in each of them.
    """
    config = read().with_changes(multi_token_prediction=MultiTokenPredictionConfig(num_layers=2))
    model = GPTModel(config)
    model.save_hf(tmp_path / "written")
    tensors = tensors_of(tmp_path / "written")
    for layer in (2, 3):
        tensors[f"model.layers.{layer}.embed_tokens.weight"] = tensors["model.embed_tokens.weight"]
        tensors[f"model.layers.{layer}.shared_head.head.weight"] = tensors["lm_head.weight"]
    folder = tmp_path / "published"
    folder.mkdir()
    save_file({n: t.clone() for n, t in tensors.items()}, folder / "model.safetensors")
    (folder / "config.json").write_text((tmp_path / "written" / "config.json").read_text())
    return model, folder


def test_further_layers(predicting: tuple[GPTModel, Path]) -> None:
    model, folder = predicting
    names = tensors_of(folder).keys()
    assert {
        "model.layers.2.eh_proj.weight",
        "model.layers.3.shared_head.norm.weight",
        "model.layers.3.mlp.experts.3.up_proj.weight",
        "model.layers.2.mlp.gate.e_score_correction_bias",
    } <= names
    back = from_hf(folder)
    assert back.config.prediction_depths == 2
    for name, value in back.built_network().state_dict().items():
        assert torch.equal(value, model.built_network().state_dict()[name]), name


def test_further_layers_left_behind(predicting: tuple[GPTModel, Path]) -> None:
    model, folder = predicting
    back = from_hf(folder, overrides={"num_nextn_predict_layers": 0})
    assert back.config.prediction_depths == 0
    tokens = torch.arange(6)[None]
    assert torch.equal(back(tokens), model(tokens))


def test_weights_in_fp8(tmp_path: Path) -> None:
    """As published: linear layers in tiles with factors, all else as it is."""
    tile = 8
    tensors: dict[str, torch.Tensor] = {}
    plain = {}
    for name, tensor in load_file(FOLDER / "model.safetensors").items():
        value = tensor if name == BIAS else tensor.to(torch.bfloat16)
        if not re.search(r"(_proj|_mqa)\.weight$", name):
            tensors[name] = plain[name] = value
            continue
        rows, columns = (-(-size // tile) for size in tensor.shape)
        factors = torch.rand(rows, columns) * 0.01 + 0.001
        wide = factors.repeat_interleave(tile, 0).repeat_interleave(tile, 1)
        wide = wide[: tensor.shape[0], : tensor.shape[1]]
        tensors[name] = (tensor / wide).clamp(-448, 448).to(torch.float8_e4m3fn)
        tensors[f"{name}_scale_inv"] = factors
        plain[name] = (tensors[name].float() * wide).to(torch.bfloat16)
    quantised = {
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "quant_method": "fp8",
        "weight_block_size": [tile, tile],
    }
    folders = []
    for name, content, more in (
        ("fp8", tensors, {"quantization_config": quantised}),
        ("plain", plain, {}),
    ):
        folder = tmp_path / name
        folder.mkdir()
        save_file(content, folder / "model.safetensors")
        (folder / "config.json").write_text(json.dumps(config_json(**more)))
        folders.append(folder)
    model, expected = (from_hf(folder) for folder in folders)
    ids = Recorded.read(FOLDER).arrays["input_ids"]
    assert torch.equal(model(ids), expected(ids))
    model.save_hf(tmp_path / "back")
    assert_same_tensors(tmp_path / "back", folders[1])
    assert "quantization_config" not in json.loads((tmp_path / "back" / "config.json").read_text())
