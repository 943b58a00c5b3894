"""Causal self-attention with grouped queries (arXiv 2305.13245), and the two torch cores.

A core is the part between projected queries, keys and values and the output projection. It is an
object of its own, `SelfAttention.core_attention`, so that another one (a context-parallel or a
fused one) can take its place.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron_lightning.config.model import GPTConfig
from megatron_lightning.layers.dropout import Dropout
from megatron_lightning.layers.rotary import RotaryTables
from megatron_lightning.parallel.random import Normal

if TYPE_CHECKING:
    from megatron_lightning.layers.backend import LayerBackend


class SelfAttention(nn.Module):
    """Projection to queries, keys and values, norms on heads, rotation, core, output projection.

    `linear_qkv` packs its rows per query group: the group's query heads, then its key, then its
    value. So a contiguous part of the rows is whole groups, and the number of groups here is what
    the weight holds.
    """

    def __init__(
        self,
        config: GPTConfig,
        layer: int,
        backend: LayerBackend,
        *,
        device: str | None = None,
    ) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        self.queries_per_group = config.queries_per_group
        self.linear_qkv = backend.linear(
            config.hidden_size,
            config.qkv_size,
            bias=config.add_bias_linear or config.add_qkv_bias,
            initial=Normal(config.init_method_std),
            device=device,
        )
        self.q_layernorm = (
            backend.norm(config, config.head_dim, device=device) if config.qk_layernorm else None
        )
        self.k_layernorm = (
            backend.norm(config, config.head_dim, device=device) if config.qk_layernorm else None
        )
        self.core_attention = backend.core_attention(config, layer)
        self.linear_proj = backend.linear(
            config.attention_size,
            config.hidden_size,
            bias=config.add_bias_linear,
            initial=Normal(config.init_method_std / math.sqrt(2 * config.num_layers)),
            device=device,
        )

    def forward(self, hidden: Tensor, rotary: RotaryTables | None = None) -> Tensor:
        """(S, B, H) -> (S, B, H); queries and keys are rotated by `rotary` unless it is None."""
        packed = self.linear_qkv(hidden)  # (S, B, G * (N/G + 2) * D)
        packed = packed.unflatten(-1, (-1, self.queries_per_group + 2, self.head_dim))
        query, key, value = packed.split(
            (self.queries_per_group, 1, 1), dim=-2
        )  # (S, B, G, N/G or 1, D)
        if self.q_layernorm is not None and self.k_layernorm is not None:
            query, key = self.q_layernorm(query), self.k_layernorm(key)
        if rotary is not None:
            query, key = rotary.rotate(query), rotary.rotate(key)
        context = self.core_attention(query.flatten(2, 3), key.flatten(2, 3), value.flatten(2, 3))
        return self.linear_proj(context)


class ReferenceAttention(nn.Module):
    """Written out, with a float32 softmax: the oracle of the fused cores, and the core of the exact
    mode.
    """

    def __init__(self, *, scale: float, window_size: int = 0, dropout: Dropout) -> None:
        """`scale` multiplies the scores; `window_size` in tokens, 0 for none; `dropout` of layout
        HEADS.
        """
        super().__init__()
        self.scale = scale
        self.window_size = window_size
        self.dropout = dropout

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """(S, B, N, D), (S, B, G, D), (S, B, G, D) -> (S, B, N * D). Query head i reads group i * G
        // N.
        """
        query, key, value = (
            x.permute(1, 2, 0, 3) for x in (query, key, value)
        )  # (B, N or G, S, D)
        key, value = repeat_heads(key, query.shape[1]), repeat_heads(value, query.shape[1])
        scores = (query @ key.transpose(-1, -2)).float() * self.scale  # (B, N, S, S)
        seen = causal_mask(scores.shape[-1], self.window_size, scores.device)
        weights = scores.masked_fill(~seen, -torch.inf).softmax(dim=-1)
        context = self.dropout(weights).to(value.dtype) @ value  # (B, N, S, D)
        return context.permute(2, 0, 1, 3).flatten(2)  # (S, B, N * D)


class FusedAttention(ReferenceAttention):
    """`scaled_dot_product_attention` of torch: a flash, memory-efficient or cuDNN kernel where one
    fits.
    """

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """(S, B, N, D), (S, B, G, D), (S, B, G, D) -> (S, B, N * D). Query head i reads group i * G
        // N.
        """
        length = query.shape[0]
        query, key, value = (
            x.permute(1, 2, 0, 3) for x in (query, key, value)
        )  # (B, N or G, S, D)
        mask = None
        if 0 < self.window_size < length:
            mask = causal_mask(length, self.window_size, query.device)
            # The kernels that take a mask do not take fewer key heads than query heads.
            key, value = repeat_heads(key, query.shape[1]), repeat_heads(value, query.shape[1])
        with self.dropout.fused(query.device) as probability:
            context = F.scaled_dot_product_attention(
                query,
                key,
                value,
                attn_mask=mask,
                dropout_p=probability,
                is_causal=mask is None,
                scale=self.scale,
                enable_gqa=key.shape[1] != query.shape[1],
            )  # (B, N, S, D)
        return context.permute(2, 0, 1, 3).flatten(2)  # (S, B, N * D)


def causal_mask(length: int, window_size: int, device: torch.device) -> Tensor:
    """(S, S) bool, True where query (row) sees key (column): keys up to it, the last `window_size`
    unless 0.
    """
    position = torch.arange(length, device=device)
    distance = position[:, None] - position[None, :]
    seen = distance >= 0
    return seen & (distance < window_size) if window_size else seen


def repeat_heads(x: Tensor, heads: int) -> Tensor:
    """(B, G, S, D) -> (B, heads, S, D), each group repeated for its query heads."""
    return x if x.shape[1] == heads else x.repeat_interleave(heads // x.shape[1], dim=1)
