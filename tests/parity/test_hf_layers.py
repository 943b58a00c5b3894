"""Logits, loss and gradient norms of published architectures, against recorded Hugging Face
results.

The names are translated here only, so that the layers are tested apart from any converter.
"""

import json

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from megatron_lightning.config import GPTConfig, RotaryConfig
from megatron_lightning.layers import TorchBackend
from megatron_lightning.models import GPTNetwork

SIZES = {"num_layers": 3, "hidden_size": 64, "num_attention_heads": 4, "vocab_size": 160}
GROUPED = {"num_query_groups": 2}
CONFIGS = {
    "llama": GPTConfig(
        **SIZES,
        **GROUPED,
        ffn_hidden_size=144,
        max_position_embeddings=512,
        rotary=RotaryConfig(scaling="llama3", factor=8.0, original_max_position_embeddings=64),
    ),
    "qwen2": GPTConfig(
        **{**SIZES, "vocab_size": 152},
        **GROUPED,
        ffn_hidden_size=176,
        norm_epsilon=1e-6,
        add_qkv_bias=True,
        tie_word_embeddings=True,
        rotary=RotaryConfig(base=1e6),
    ),
    "qwen3": GPTConfig(
        **SIZES,
        **GROUPED,
        head_dim=16,
        ffn_hidden_size=160,
        norm_epsilon=1e-6,
        qk_layernorm=True,
        rotary=RotaryConfig(base=1e6),
    ),
    "phi3": GPTConfig(**SIZES, **GROUPED, ffn_hidden_size=128),
    "gpt2": GPTConfig(
        **SIZES,
        max_position_embeddings=64,
        norm="layernorm",
        activation="gelu_tanh",
        gated_linear_unit=False,
        add_bias_linear=True,
        position_embedding="learned",
        tie_word_embeddings=True,
    ),
}


def packed(config, query, key, value):
    """Stack rows per group: its query heads, its key, its value."""
    groups, dim = config.num_query_groups, config.head_dim
    parts = [x.unflatten(0, (groups, -1, dim)) for x in (query, key, value)]
    return torch.cat(parts, dim=1).flatten(0, 2)


def llama_layer(config, source):
    """One layer's weights of Llama, Qwen or Phi-3, by our names."""
    sizes = [config.attention_size] + 2 * [config.num_query_groups * config.head_dim]
    attention, mlp = "self_attn.", "mlp."
    layer = {
        "input_layernorm.weight": source["input_layernorm.weight"],
        "pre_mlp_layernorm.weight": source["post_attention_layernorm.weight"],
        "self_attention.linear_proj.weight": source[attention + "o_proj.weight"],
        "mlp.linear_fc2.weight": source[mlp + "down_proj.weight"],
    }
    for kind in ("weight", "bias"):
        if attention + f"qkv_proj.{kind}" in source:
            parts = source[attention + f"qkv_proj.{kind}"].split(sizes)
        elif attention + f"q_proj.{kind}" in source:
            parts = [source[attention + f"{x}_proj.{kind}"] for x in "qkv"]
        else:
            continue
        layer[f"self_attention.linear_qkv.{kind}"] = packed(config, *parts)
    for x in "qk":
        if attention + f"{x}_norm.weight" in source:
            layer[f"self_attention.{x}_layernorm.weight"] = source[attention + f"{x}_norm.weight"]
    if mlp + "gate_up_proj.weight" in source:
        layer["mlp.linear_fc1.weight"] = source[mlp + "gate_up_proj.weight"].unflatten(0, (2, -1))
    else:
        halves = [source[mlp + f"{x}_proj.weight"] for x in ("gate", "up")]
        layer["mlp.linear_fc1.weight"] = torch.stack(halves)
    return layer


def gpt2_layer(config, source):
    """One layer's weights of GPT-2 (stored transposed), by our names."""
    names = {
        "input_layernorm": "ln_1",
        "self_attention.linear_proj": "attn.c_proj",
        "pre_mlp_layernorm": "ln_2",
        "mlp.linear_fc1": "mlp.c_fc",
        "mlp.linear_fc2": "mlp.c_proj",
    }
    layer = {
        f"{ours}.{k}": source[f"{theirs}.{k}"].t()
        for ours, theirs in names.items()
        for k in ("weight", "bias")
    }
    for kind in ("weight", "bias"):
        parts = source[f"attn.c_attn.{kind}"].t().chunk(3)
        layer[f"self_attention.linear_qkv.{kind}"] = packed(config, *parts)
    return layer


def translated(config, source):
    """The whole state dict by our names."""
    gpt2 = "transformer.wte.weight" in source
    names = {
        "embedding.word_embeddings.weight": "model.embed_tokens.weight",
        "decoder.final_layernorm.weight": "model.norm.weight",
        "output_layer.weight": "lm_head.weight",
    }
    if gpt2:
        names = {
            "embedding.word_embeddings.weight": "transformer.wte.weight",
            "embedding.position_embeddings.weight": "transformer.wpe.weight",
            "decoder.final_layernorm.weight": "transformer.ln_f.weight",
            "decoder.final_layernorm.bias": "transformer.ln_f.bias",
        }
    state = {ours: source[theirs] for ours, theirs in names.items() if theirs in source}
    for i in range(config.num_layers):
        prefix = f"transformer.h.{i}." if gpt2 else f"model.layers.{i}."
        own = {k.removeprefix(prefix): v for k, v in source.items() if k.startswith(prefix)}
        layer = gpt2_layer(config, own) if gpt2 else llama_layer(config, own)
        state |= {f"decoder.layers.{i}.{k}": v for k, v in layer.items()}
    if config.tie_word_embeddings:
        state["output_layer.weight"] = state["embedding.word_embeddings.weight"]
    return state


def built(name, folder, attention):
    """Network with the recorded weights."""
    config = CONFIGS[name]
    network = GPTNetwork(config, TorchBackend(attention=attention))
    source = load_file(folder / "model.safetensors")
    network.load_state_dict(translated(config, source))
    assert config.num_parameters() == sum(x.numel() for x in source.values())
    return network


@pytest.mark.parametrize("attention", ["fused", "reference"])
@pytest.mark.parametrize("name", sorted(CONFIGS))
def test_logits_and_loss(golden, name, attention):
    folder = golden / "models" / name
    recorded = {k: torch.from_numpy(v) for k, v in np.load(folder / "golden.npz").items()}
    meta = json.loads((folder / "meta.json").read_text())
    network = built(name, folder, attention)
    tokens = recorded["input_ids"]

    logits = network(tokens).transpose(0, 1)  # (B, S, V)
    torch.testing.assert_close(logits, recorded["logits"], rtol=1e-4, atol=1e-4)

    shifted = torch.full_like(tokens, -100)
    shifted[:, :-1] = recorded["labels"][:, 1:]
    loss = network(tokens, labels=shifted)[shifted >= 0].mean()
    assert loss.item() == pytest.approx(meta["loss"], rel=1e-5)
    loss.backward()
    norms = [p.grad.norm() for p in network.parameters()]
    assert torch.stack(norms).norm().item() == pytest.approx(meta["grad_norm"], rel=1e-4)


def test_positions_given_explicitly_change_nothing(golden):
    folder = golden / "models" / "llama"
    tokens = torch.from_numpy(np.load(folder / "golden.npz")["input_ids"])
    network = built("llama", folder, "fused")
    counted = torch.arange(tokens.shape[1]).expand_as(tokens)
    assert torch.equal(network(tokens), network(tokens, counted))
