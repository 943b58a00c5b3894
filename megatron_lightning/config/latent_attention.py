"""Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1) as data: sizes of the
compressed queries, of what keys and values come from, and of the heads. The layer is in
`layers/latent_attention.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from megatron_lightning.config.names import NamesFields

if TYPE_CHECKING:
    from megatron_lightning.config.model import GPTConfig


@dataclass(frozen=True, kw_only=True)
class LatentAttentionConfig(NamesFields):
    """Keys and values are made from one small vector a token.

    Only a part of each query and key head is rotated, and that part of the key is shared by all
    heads.
    """

    kv_lora_rank: int
    """Size of the vector that keys and values are made from."""
    q_lora_rank: int = 0
    """Size of the vector that queries are made from; 0: they are made from the hidden state."""
    qk_head_dim: int = 128
    """Part of a query or key head without position."""
    qk_pos_emb_head_dim: int = 64
    """Part of a query or key head that is rotated."""
    v_head_dim: int = 128
    """Size of a value head."""

    @property
    def query_dim(self) -> int:
        """Size of a whole query or key head."""
        return self.qk_head_dim + self.qk_pos_emb_head_dim

    def matmul_weights(self, hidden_size: int, heads: int) -> int:
        """Elements of the weights of all projections."""
        query = heads * self.query_dim
        if self.q_lora_rank:
            queries = self.q_lora_rank * (hidden_size + query)
        else:
            queries = hidden_size * query
        keys_values = hidden_size * (self.kv_lora_rank + self.qk_pos_emb_head_dim)
        keys_values += self.kv_lora_rank * heads * (self.qk_head_dim + self.v_head_dim)
        return queries + keys_values + heads * self.v_head_dim * hidden_size


def latent_problems(config: GPTConfig) -> list[str]:
    """Every violated rule as a sentence with field, value and remedy."""
    latent = config.latent_attention
    if latent is None:
        return []
    return [*_sizes(latent), *_together(config, latent)]


def _sizes(latent: LatentAttentionConfig) -> list[str]:
    smallest = {
        "kv_lora_rank": 1,
        "q_lora_rank": 0,
        "qk_head_dim": 1,
        "qk_pos_emb_head_dim": 2,
        "v_head_dim": 1,
    }
    found = [
        f"latent_attention.{name}={value} must be at least {least}"
        for name, least in smallest.items()
        if (value := getattr(latent, name)) < least
    ]
    if latent.qk_pos_emb_head_dim % 2:
        found.append(
            f"latent_attention.qk_pos_emb_head_dim={latent.qk_pos_emb_head_dim} must be even:"
            " elements are rotated in pairs"
        )
    return found


def _together(config: GPTConfig, latent: LatentAttentionConfig) -> list[str]:
    found = []
    if config.head_dim != latent.query_dim:
        found.append(
            f"head_dim={config.head_dim} with latent_attention: it is qk_head_dim +"
            f" qk_pos_emb_head_dim = {latent.query_dim}; leave it 0"
        )
    if config.num_query_groups != config.num_attention_heads:
        found.append(
            f"num_query_groups={config.num_query_groups} with latent_attention: every query head"
            f" has keys and values of its own; leave it 0, or use {config.num_attention_heads}"
        )
    if config.position_embedding != "rope":
        found.append(
            f"position_embedding={config.position_embedding!r} with latent_attention: a part of"
            " each head is rotated; use 'rope'"
        )
    if config.rotary.percent != 1.0:
        found.append(
            f"rotary.percent={config.rotary.percent} with latent_attention: qk_pos_emb_head_dim"
            " says how much is rotated; use 1.0"
        )
    if config.qk_layernorm:
        found.append(
            "qk_layernorm=True with latent_attention: it has norms on what queries, keys and"
            " values are made from; use False"
        )
    if config.attention.sinks:
        found.append("attention.sinks=True with latent_attention: not supported; use False")
    found += [
        f"{name}=True with latent_attention: its projections have no biases; use False"
        for name in ("add_bias_linear", "add_qkv_bias")
        if getattr(config, name)
    ]
    return found
