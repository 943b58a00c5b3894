"""Published architectures by name, as differences from the defaults of `GPTConfig` or from each
other.

Sizes are those of the published configurations of the base models. No weights are meant: a preset
is a shape.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatron_lightning.config.latent_attention import LatentAttentionConfig
from megatron_lightning.config.model import GPTConfig
from megatron_lightning.config.moe import MoEConfig
from megatron_lightning.config.multi_token_prediction import MultiTokenPredictionConfig
from megatron_lightning.config.rotary import RotaryConfig
from megatron_lightning.models.presets_variants import VARIANTS

_GPT2: dict[str, Any] = {
    "vocab_size": 50257,
    "num_layers": 12,
    "hidden_size": 768,
    "num_attention_heads": 12,
    "max_position_embeddings": 1024,
    "norm": "layernorm",
    "activation": "gelu_tanh",
    "gated_linear_unit": False,
    "add_bias_linear": True,
    "position_embedding": "learned",
    "tie_word_embeddings": True,
    "attention_dropout": 0.1,
    "hidden_dropout": 0.1,
}
_LLAMA3_8B: dict[str, Any] = {
    "vocab_size": 128256,
    "num_layers": 32,
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "num_query_groups": 8,
    "ffn_hidden_size": 14336,
    "max_position_embeddings": 8192,
    "rotary": RotaryConfig(base=500000.0),
}
_LLAMA3_70B: dict[str, Any] = _LLAMA3_8B | {
    "num_layers": 80,
    "hidden_size": 8192,
    "num_attention_heads": 64,
    "ffn_hidden_size": 28672,
}
_LLAMA31: dict[str, Any] = {
    "max_position_embeddings": 131072,
    "rotary": RotaryConfig(
        base=500000.0, scaling="llama3", factor=8.0, original_max_position_embeddings=8192
    ),
}
_DEEPSEEK_V3: dict[str, Any] = {
    "vocab_size": 129280,
    "num_layers": 61,
    "hidden_size": 7168,
    "num_attention_heads": 128,
    "ffn_hidden_size": 18432,
    "max_position_embeddings": 163840,
    "norm_epsilon": 1e-6,
    "rotary": RotaryConfig(
        interleaved=True,
        scaling="yarn",
        factor=40.0,
        original_max_position_embeddings=4096,
        mscale_all_dim=1.0,
    ),
    "latent_attention": LatentAttentionConfig(q_lora_rank=1536, kv_lora_rank=512),
    "moe": MoEConfig(
        num_experts=256,
        router_topk=8,
        ffn_hidden_size=2048,
        shared_expert_ffn_hidden_size=2048,
        first_dense_layers=3,
        router_score_function="sigmoid",
        router_num_groups=8,
        router_group_topk=4,
        router_group_best=2,
        router_topk_scaling_factor=2.5,
        load_balancing="seq_aux_loss",
        aux_loss_coeff=1e-4,
        expert_bias=True,
    ),
    "multi_token_prediction": MultiTokenPredictionConfig(loss_scaling_factor=0.3),
}
_TINY: dict[str, Any] = {
    "vocab_size": 257,
    "num_layers": 4,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_query_groups": 2,
    "ffn_hidden_size": 176,
    "max_position_embeddings": 128,
}

_MIXTRAL: dict[str, Any] = {
    "vocab_size": 32000,
    "num_query_groups": 8,
    "rotary": RotaryConfig(base=1000000.0),
    "moe": MoEConfig(num_experts=8, aux_loss_coeff=0.01),
}
_QWEN3_30B_A3B: dict[str, Any] = {
    "vocab_size": 151936,
    "num_layers": 48,
    "hidden_size": 2048,
    "num_attention_heads": 32,
    "num_query_groups": 4,
    "head_dim": 128,
    "ffn_hidden_size": 6144,
    "max_position_embeddings": 40960,
    "norm_epsilon": 1e-6,
    "qk_layernorm": True,
    "rotary": RotaryConfig(base=1000000.0),
    "moe": MoEConfig(
        num_experts=128,
        router_topk=8,
        ffn_hidden_size=768,
        aux_loss_coeff=0.001,
    ),
}

PRESETS: Mapping[str, Mapping[str, Any]] = {
    "gpt2": _GPT2,
    "llama3-8b": _LLAMA3_8B,
    "llama3-70b": _LLAMA3_70B,
    "llama3.1-8b": _LLAMA3_8B | _LLAMA31,
    "llama3.1-70b": _LLAMA3_70B | _LLAMA31,
    "mistral-7b": {
        "vocab_size": 32000,
        "num_layers": 32,
        "hidden_size": 4096,
        "num_attention_heads": 32,
        "num_query_groups": 8,
        "ffn_hidden_size": 14336,
        "max_position_embeddings": 32768,
        "window_size": 4096,
    },
    "qwen2.5-7b": {
        "vocab_size": 152064,
        "num_layers": 28,
        "hidden_size": 3584,
        "num_attention_heads": 28,
        "num_query_groups": 4,
        "ffn_hidden_size": 18944,
        "max_position_embeddings": 131072,
        "norm_epsilon": 1e-6,
        "add_qkv_bias": True,
        "rotary": RotaryConfig(base=1000000.0),
    },
    "qwen3-8b": {
        "vocab_size": 151936,
        "num_layers": 36,
        "hidden_size": 4096,
        "num_attention_heads": 32,
        "num_query_groups": 8,
        "ffn_hidden_size": 12288,
        "max_position_embeddings": 40960,
        "norm_epsilon": 1e-6,
        "qk_layernorm": True,
        "rotary": RotaryConfig(base=1000000.0),
    },
    "mixtral-8x7b": _MIXTRAL
    | {
        "num_layers": 32,
        "hidden_size": 4096,
        "num_attention_heads": 32,
        "ffn_hidden_size": 14336,
        "max_position_embeddings": 32768,
    },
    "mixtral-8x22b": _MIXTRAL  # an MLP's default width, 16384
    | {
        "num_layers": 56,
        "hidden_size": 6144,
        "num_attention_heads": 48,
        "max_position_embeddings": 65536,
    },
    "qwen3-30b-a3b": _QWEN3_30B_A3B,
    "qwen3-235b-a22b": _QWEN3_30B_A3B
    | {
        "num_layers": 94,
        "hidden_size": 4096,
        "num_attention_heads": 64,
        "ffn_hidden_size": 12288,
        "moe": MoEConfig(
            num_experts=128,
            router_topk=8,
            ffn_hidden_size=1536,
            aux_loss_coeff=0.001,
        ),
    },
    "deepseek-v3": _DEEPSEEK_V3,
    **VARIANTS,
    "tiny": _TINY,
    "tiny-moe": _TINY | {"moe": MoEConfig(num_experts=8, ffn_hidden_size=64, aux_loss_coeff=0.01)},
    "tiny-deepseek": {
        "vocab_size": 257,
        "num_layers": 4,
        "hidden_size": 64,
        "num_attention_heads": 4,
        "ffn_hidden_size": 176,
        "max_position_embeddings": 128,
        "rotary": RotaryConfig(interleaved=True),
        "latent_attention": LatentAttentionConfig(
            q_lora_rank=32, kv_lora_rank=24, qk_head_dim=16, qk_pos_emb_head_dim=8, v_head_dim=16
        ),
        "moe": MoEConfig(
            num_experts=8,
            ffn_hidden_size=32,
            shared_expert_ffn_hidden_size=32,
            first_dense_layers=1,
            router_score_function="sigmoid",
            router_num_groups=4,
            router_group_topk=2,
            router_group_best=2,
            router_topk_scaling_factor=2.5,
            load_balancing="seq_aux_loss",
            aux_loss_coeff=1e-4,
            expert_bias=True,
        ),
        "multi_token_prediction": MultiTokenPredictionConfig(loss_scaling_factor=0.3),
    },
    "tiny-gpt2": _GPT2
    | {
        "vocab_size": 257,
        "num_layers": 4,
        "hidden_size": 64,
        "num_attention_heads": 4,
        "max_position_embeddings": 128,
        "attention_dropout": 0.0,
        "hidden_dropout": 0.0,
    },
}
"""Name -> fields that differ from GPTConfig's defaults. The tiny ones are for tests and
examples.
"""


def preset_config(name: str, **changes: Any) -> GPTConfig:
    """The config of preset `name` with `changes` to its fields; ValueError naming the known ones
    otherwise.
    """
    if name not in PRESETS:
        raise ValueError(f"preset={name!r} is unknown; use one of {sorted(PRESETS)}")
    return GPTConfig(**PRESETS[name]).with_changes(**changes)
