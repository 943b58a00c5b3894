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
    """`scaled_dot_product_attention` of torch: a flash, memory-efficient or cuDNN kernel that
    fits.
    """

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """(S, B, N, D), (S, B, G, D), (S, B, G, D) -> (S, B, N * D).

        Query head i reads group i * G // N.
        """
        query, key, value = (
            x.permute(1, 2, 0, 3) for x in (query, key, value)
        )  # (B, N or G, S, D)
        with self.dropout.fused(query.device) as probability:
            if 0 < self.window_size < query.shape[2]:
                context = sliding_attention(
                    query,
                    key,
                    value,
                    window_size=self.window_size,
                    scale=self.scale,
                    dropout_p=probability,
                )
            else:
                context = full_attention(query, key, value, scale=self.scale, dropout_p=probability)
        return context.permute(2, 0, 1, 3).flatten(2)  # (S, B, N * D)


def full_attention(
    query: Tensor, key: Tensor, value: Tensor, *, scale: float, dropout_p: float = 0.0
) -> Tensor:
    """Causal attention without a mask in memory: (B, N, S, D), (B, G, S, D) twice -> (B, N, S,
    D).
    """
    grouped = key.shape[1] != query.shape[1]
    return F.scaled_dot_product_attention(
        query, key, value, dropout_p=dropout_p, is_causal=True, scale=scale, enable_gqa=grouped
    )


def sliding_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    window_size: int,
    scale: float,
    dropout_p: float = 0.0,
) -> Tensor:
    """Causal attention to the last `window_size` < S keys, in time and memory of S * window_size.

    The first block of `window_size` queries is plainly causal. Each later block sees parts of the
    block before it and of itself, under one mask that all these blocks share. Shapes as in
    `full_attention`.
    """
    length, width = query.shape[2], window_size
    first = full_attention(
        *(x[:, :, :width] for x in (query, key, value)), scale=scale, dropout_p=dropout_p
    )
    padding = -length % width  # at the end, where no true query looks
    query, key, value = (F.pad(x, (0, 0, 0, padding)) for x in (query, key, value))
    queries = query[:, :, width:].unflatten(2, (-1, width))  # (B, N, blocks, W, D)
    # The kernels that take a mask do not take fewer key heads than query heads.
    keys, values = (
        repeat_heads(x.unfold(2, 2 * width, width).transpose(-1, -2), query.shape[1])
        for x in (key, value)
    )  # (B, N, blocks, 2W, D)
    row = torch.arange(width, device=query.device)[:, None]
    column = torch.arange(2 * width, device=query.device)[None, :]
    mask = (column > row) & (column <= row + width)  # row is query number W + row of the 2W keys
    later = F.scaled_dot_product_attention(
        *(x.transpose(1, 2).flatten(0, 1) for x in (queries, keys, values)),
        attn_mask=mask,
        dropout_p=dropout_p,
        scale=scale,
    )  # (B * blocks, N, W, D)
    later = later.unflatten(0, (first.shape[0], -1)).transpose(1, 2).flatten(2, 3)
    return torch.cat((first, later[:, :, : length - width]), dim=2)  # (B, N, S, D)


def causal_mask(length: int, window_size: int, device: torch.device) -> Tensor:
    """(S, S) bool, True where query (row) sees key (column): keys up to it, the last `window_size`
    unless 0.
    """
    position = torch.arange(length, device=device)
    distance = position[:, None] - position[None, :]
    seen = distance >= 0
    return seen & (distance < window_size) if window_size else seen


def repeat_heads(x: Tensor, heads: int) -> Tensor:
    """(B, G, ...) -> (B, heads, ...), each group repeated for its query heads."""
    return x if x.shape[1] == heads else x.repeat_interleave(heads // x.shape[1], dim=1)
