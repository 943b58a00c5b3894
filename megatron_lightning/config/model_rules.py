"""The choices that a GPTConfig offers, and one small function for each rule about its values.

A rule returns its violations as sentences: field, value, what would fit. Pure, no torch.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Literal, get_args

if TYPE_CHECKING:
    from megatron_lightning.config.model import GPTConfig

Norm = Literal["rmsnorm", "layernorm"]
Activation = Literal["silu", "gelu", "gelu_tanh", "relu", "squared_relu"]
PositionEmbeddingKind = Literal["rope", "learned", "none"]


def _positive_sizes(config: GPTConfig) -> list[str]:
    names = (
        "vocab_size",
        "num_layers",
        "hidden_size",
        "num_attention_heads",
        "num_query_groups",
        "ffn_hidden_size",
        "max_position_embeddings",
        "make_vocab_size_divisible_by",
    )
    return [
        f"{name}={value} must be at least 1"
        for name in names
        if (value := getattr(config, name)) < 1
    ]


def _head_size_known(config: GPTConfig) -> list[str]:
    heads, hidden = config.num_attention_heads, config.hidden_size
    if config.head_dim > 0 or heads < 1 or hidden < 1:
        return []
    if config.head_dim < 0:
        return [f"head_dim={config.head_dim} must be at least 1, or 0 for hidden_size / heads"]
    fits = [n for n in range(1, hidden + 1) if hidden % n == 0 and n <= 2 * heads]
    return [
        f"num_attention_heads={heads} does not divide hidden_size={hidden}; use one of {fits},"
        " or give head_dim"
    ]


def _groups_divide_heads(config: GPTConfig) -> list[str]:
    heads, groups = config.num_attention_heads, config.num_query_groups
    if groups < 1 or heads < 1 or heads % groups == 0:
        return []
    fits = [n for n in range(1, heads + 1) if heads % n == 0]
    return [
        f"num_query_groups={groups} does not divide num_attention_heads={heads}; use one of {fits}"
    ]


def _known_choices(config: GPTConfig) -> list[str]:
    choices = {"norm": Norm, "activation": Activation, "position_embedding": PositionEmbeddingKind}
    return [
        f"{name}={getattr(config, name)!r} is unknown; use one of {get_args(kind)}"
        for name, kind in choices.items()
        if getattr(config, name) not in get_args(kind)
    ]


def _even_rotary_dim(config: GPTConfig) -> list[str]:
    fits = config.rotary_dim % 2 == 0 and config.rotary_dim > 0
    if config.position_embedding != "rope" or config.head_dim < 1 or fits:
        return []
    if config.latent_attention is not None:  # which has a rule of its own
        return []
    return [
        f"rotary.percent={config.rotary.percent} of head_dim={config.head_dim} rotates"
        f" {config.rotary_dim} elements; it must be an even number above 0"
    ]


def _probabilities(config: GPTConfig) -> list[str]:
    names = ("attention_dropout", "hidden_dropout", "label_smoothing")
    return [
        f"{name}={value} must be in [0, 1)"
        for name in names
        if not 0 <= (value := getattr(config, name)) < 1
    ]


def _positive_reals(config: GPTConfig) -> list[str]:
    names = ("norm_epsilon", "init_method_std")
    return [
        f"{name}={value} must be a positive finite number"
        for name in names
        if not (value := getattr(config, name)) > 0 or math.isinf(value)
    ]


def _window(config: GPTConfig) -> list[str]:
    found = []
    if config.window_size < 0:
        found.append(f"window_size={config.window_size} must be 0 (no limit) or positive")
    if not config.window_pattern or set(config.window_pattern) - {"S", "F"}:
        found.append(
            f"window_pattern={config.window_pattern!r} must be letters S (sliding) and F (full),"
            " e.g. 'SSSF'"
        )
    return found


MODEL_RULES: tuple[Callable[[GPTConfig], list[str]], ...] = (
    _positive_sizes,
    _head_size_known,
    _groups_divide_heads,
    _known_choices,
    _even_rotary_dim,
    _probabilities,
    _positive_reals,
    _window,
)
