"""Presets of the families with attention and norms of their own: Gemma 2, Gemma 3 (the language
model of the larger ones) and GPT-OSS. See `models/presets.py`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from megatron_lightning.config.moe import MoEConfig
from megatron_lightning.config.rotary import RotaryConfig
from megatron_lightning.config.variants import AttentionConfig, ClampConfig, StreamConfig

_LOCAL = AttentionConfig(local_rotary=RotaryConfig())
_GLOBAL = RotaryConfig(base=1000000.0)
_GLOBAL_STRETCHED = RotaryConfig(base=1000000.0, scaling="linear", factor=8.0)


def _gemma(hidden_size: int, logit_cap: float = 0.0) -> dict[str, Any]:
    return {
        "hidden_size": hidden_size,
        "norm_epsilon": 1e-6,
        "activation": "gelu_tanh",
        "tie_word_embeddings": True,
        "stream": StreamConfig(
            embedding_scale=math.sqrt(hidden_size),
            zero_centered_norm=True,
            branch_norm=True,
            logit_cap=logit_cap,
        ),
    }


def _gemma2(hidden_size: int, scale_dim: int = 0) -> dict[str, Any]:
    return _gemma(hidden_size, 30.0) | {
        "vocab_size": 256000,
        "head_dim": 256,
        "max_position_embeddings": 8192,
        "window_size": 4096,
        "window_pattern": "SF",
        "attention": AttentionConfig(scale_dim=scale_dim, score_cap=50.0),
    }


def _gemma3(hidden_size: int, layers: int, heads: int, groups: int, width: int) -> dict[str, Any]:
    return _gemma(hidden_size) | {
        "vocab_size": 262144,
        "num_layers": layers,
        "num_attention_heads": heads,
        "num_query_groups": groups,
        "head_dim": 256,
        "ffn_hidden_size": width,
        "max_position_embeddings": 32768,
        "qk_layernorm": True,
        "rotary": _GLOBAL,
        "window_size": 512,
        "window_pattern": "SSSSSF",
        "attention": _LOCAL,
    }


_GEMMA3_LARGE: dict[str, Any] = {
    "vocab_size": 262208,
    "max_position_embeddings": 131072,
    "rotary": _GLOBAL_STRETCHED,
    "window_size": 1024,
}
_GPT_OSS: dict[str, Any] = {
    "vocab_size": 201088,
    "hidden_size": 2880,
    "num_attention_heads": 64,
    "num_query_groups": 8,
    "head_dim": 64,
    "ffn_hidden_size": 2880,
    "max_position_embeddings": 131072,
    "add_bias_linear": True,
    "rotary": RotaryConfig(
        base=150000.0,
        scaling="yarn",
        factor=32.0,
        original_max_position_embeddings=4096,
        truncate=False,
    ),
    "window_size": 128,
    "window_pattern": "SF",
    "attention": AttentionConfig(sinks=True),
    "clamp": ClampConfig(),
}

VARIANTS: Mapping[str, Mapping[str, Any]] = {
    "gemma2-2b": _gemma2(2304)
    | {
        "num_layers": 26,
        "num_attention_heads": 8,
        "num_query_groups": 4,
        "ffn_hidden_size": 9216,
    },
    "gemma2-9b": _gemma2(3584)
    | {
        "num_layers": 42,
        "num_attention_heads": 16,
        "num_query_groups": 8,
        "ffn_hidden_size": 14336,
    },
    "gemma2-27b": _gemma2(4608, scale_dim=144)
    | {
        "num_layers": 46,
        "num_attention_heads": 32,
        "num_query_groups": 16,
        "head_dim": 128,
        "ffn_hidden_size": 36864,
    },
    "gemma3-270m": _gemma3(640, 18, 4, 1, 2048),
    "gemma3-1b": _gemma3(1152, 26, 4, 1, 6912),
    "gemma3-4b": _gemma3(2560, 34, 8, 4, 10240) | _GEMMA3_LARGE,
    "gemma3-12b": _gemma3(3840, 48, 16, 8, 15360) | _GEMMA3_LARGE,
    "gemma3-27b": _gemma3(5376, 62, 32, 16, 21504)
    | _GEMMA3_LARGE
    | {
        "head_dim": 128,
        "attention": AttentionConfig(scale_dim=168, local_rotary=RotaryConfig()),
    },
    "gpt-oss-20b": _GPT_OSS
    | {"num_layers": 24, "moe": MoEConfig(num_experts=32, router_topk=4, router_bias=True)},
    "gpt-oss-120b": _GPT_OSS
    | {"num_layers": 36, "moe": MoEConfig(num_experts=128, router_topk=4, router_bias=True)},
}
"""As `PRESETS`."""
