"""Causal self-attention with grouped queries (arXiv 2305.13245), and the two torch cores.

A core is the part between projected queries, keys and values and the output projection. It is an
object of its own, `SelfAttention.core_attention`, so that another one (a context-parallel or a
fused one) can take its place.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron_lightning.config.model import GPTConfig
from megatron_lightning.layers.linear import Linear
from megatron_lightning.layers.rotary import RotaryTables
from megatron_lightning.parallel.context.attend import attend
from megatron_lightning.parallel.context.dense import pad_heads
from megatron_lightning.parallel.context.kernels import choose_kernel
from megatron_lightning.parallel.core_attention import CoreAttention
from megatron_lightning.parallel.random import Initial, Normal
from megatron_lightning.parallel.sequence import SequenceInfo

if TYPE_CHECKING:
    from megatron_lightning.layers.backend import LayerBackend


class SelfAttention(nn.Module):
    """Projection to queries, keys and values, norms on heads, rotation, core, output projection.

    `linear_qkv` packs its rows per query group: the group's query heads, then its key, then its
    value. So a contiguous part of the rows is whole groups, and the number of groups here is what
    the weight holds. `sinks` (N,), where the config has them, are split with the heads.
    """

    sinks: nn.Parameter | None

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
        sinks = None
        self.initials: dict[str, Initial] = {}
        if config.attention.sinks:
            sinks = nn.Parameter(torch.empty(config.num_attention_heads, device=device))
            self.initials["sinks"] = Normal(config.init_method_std)
        self.register_parameter("sinks", sinks)
        self.linear_proj = backend.linear(
            config.attention_size,
            config.hidden_size,
            bias=config.add_bias_linear,
            initial=Normal(config.init_method_std / math.sqrt(2 * config.num_layers)),
            device=device,
        )
        if isinstance(self.linear_qkv, Linear) and isinstance(self.linear_proj, Linear):
            self.linear_qkv.foreign = False, True  # it is joined of three
            self.linear_proj.foreign = True, False

    def forward(
        self,
        hidden: Tensor,
        rotary: RotaryTables | None = None,
        sequence: SequenceInfo | None = None,
    ) -> Tensor:
        """(S, B, H) -> (S, B, H); queries and keys are rotated by `rotary` unless it is None.

        `sequence`: the documents that are packed into the samples, None for one a sample.
        """
        packed = self.linear_qkv(hidden)  # (S, B, G * (N/G + 2) * D)
        packed = packed.unflatten(-1, (-1, self.queries_per_group + 2, self.head_dim))
        query, key, value = packed.split(
            (self.queries_per_group, 1, 1), dim=-2
        )  # (S, B, G, N/G or 1, D)
        if self.q_layernorm is not None and self.k_layernorm is not None:
            query, key = self.q_layernorm(query), self.k_layernorm(key)
        if rotary is not None:
            query, key = rotary.rotate(query), rotary.rotate(key)
            if self.q_layernorm is None:  # a view would keep the whole projection until backward
                value = value.contiguous()
        query, key, value = (x.flatten(2, 3) for x in (query, key, value))
        if self.sinks is None:
            return self.linear_proj(self.core_attention(query, key, value, sequence))
        context = self.core_attention(query, key, value, sequence, sinks=self.sinks)
        return self.linear_proj(context)


def splits_sequence(network: nn.Module) -> bool:
    """Whether context ranks are to call the network with their parts of the sequence."""
    cores = (module for module in network.modules() if isinstance(module, CoreAttention))
    return any(core.splits_sequence for core in cores)


class ReferenceAttention(CoreAttention):
    """Written out, with a float32 softmax: the oracle of the fused cores, and the core of the exact
    mode.
    """

    written_out: ClassVar[bool] = True

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        sequence: SequenceInfo | None = None,
        *,
        rows: Tensor | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """See `CoreAttention.forward`."""
        seen = visible(key.shape[0], self.window_size, sequence, rows, key.device)
        query, key, value = (
            x.permute(1, 2, 0, 3) for x in (query, key, value)
        )  # (B, N or G, S, D)
        key, value = repeat_heads(key, query.shape[1]), repeat_heads(value, query.shape[1])
        scores = (query @ key.transpose(-1, -2)).float() * self.scale  # (B, N, S, S)
        if self.score_cap:
            scores = self.score_cap * torch.tanh(scores / self.score_cap)
        scores = scores.masked_fill(~seen, -torch.inf)
        if sinks is not None:
            one_more = sinks.to(scores.dtype)[:, None, None].expand(*scores.shape[:-1], 1)
            scores = torch.cat((scores, one_more), dim=-1)
        weights = scores.softmax(dim=-1)[..., : key.shape[2]]
        context = self.dropout(weights).to(value.dtype) @ value  # (B, N, S, Dv)
        return context.permute(2, 0, 1, 3).flatten(2)  # (S, B, N * Dv)


class FusedAttention(CoreAttention):
    """`scaled_dot_product_attention` of torch: a flash, memory-efficient or cuDNN kernel that
    fits.
    """

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        sequence: SequenceInfo | None = None,
        *,
        rows: Tensor | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """See `CoreAttention.forward`. Packed documents with dropout, and `rows`, need a mask in
        memory.
        """
        if sinks is not None or self.score_cap:
            assert rows is None and not self.drops, "refused by the back end"  # noqa: PT018
            return self.packed(query, key, value, sequence, sinks)
        if sequence is not None and rows is None and not self.drops:
            return self.packed(query, key, value, sequence)
        seen = None
        if sequence is not None or rows is not None:
            seen = visible(key.shape[0], self.window_size, sequence, rows, key.device)
        query, key, value = (
            x.permute(1, 2, 0, 3) for x in (query, key, value)
        )  # (B, N or G, S, D)
        size, wide = value.shape[-1], max(query.shape[-1], value.shape[-1])
        query, key, value = (pad_heads(x, wide) for x in (query, key, value))
        with self.dropout.fused(query.device) as probability:
            if seen is not None:
                key, value = repeat_heads(key, query.shape[1]), repeat_heads(value, query.shape[1])
                context = F.scaled_dot_product_attention(
                    query, key, value, attn_mask=seen, dropout_p=probability, scale=self.scale
                )
            elif 0 < self.window_size < query.shape[2]:
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
        return context[..., :size].permute(2, 0, 1, 3).flatten(2)  # (S, B, N * Dv)

    def packed(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        sequence: SequenceInfo | None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """By the kernels that give their log-sum-exp, which sinks join; or with capped scores."""
        batch = query.shape[1]
        # Here and not in `_by_blocks`, so that compiled layers copy where they compute.
        query, key, value = (x.transpose(0, 1).flatten(0, 1) for x in (query, key, value))
        context = _by_blocks(self, query, key, value, batch, sequence, sinks)  # (B * S, N, D)
        return context.unflatten(0, (batch, -1)).transpose(0, 1).flatten(2)


def _attend_packed(
    core: FusedAttention,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    batch: int,
    sequence: SequenceInfo | None,
    sinks: Tensor | None,
) -> Tensor:
    """(B * S, heads, D) -> the same; without `sequence` each sample is one document."""
    whole = (query.shape[0] // batch,) * batch
    return attend(
        query,
        key,
        value,
        whole if sequence is None else sequence.flat,
        kernel=choose_kernel(query, value, score_cap=core.score_cap),
        scale=core.scale,
        window=core.window_size,
        sinks=sinks,
    )


# It calls kernels one by one, and compiled code would be made anew for each document's length.
_by_blocks: Any = torch.compiler.disable(_attend_packed)


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


def visible(
    length: int,
    window_size: int,
    sequence: SequenceInfo | None,
    rows: Tensor | None,
    device: torch.device,
) -> Tensor:
    """(1 or B, 1, S', S) bool, True where query `rows` (1 or B, S'; None: all) of a sequence of
    `length` see each of its keys: those before them, of their document, within the window.
    """
    position = torch.arange(length, device=device)[None]  # (1, S)
    rows = position if rows is None else rows.to(device)
    distance = rows[:, :, None] - position[:, None, :]
    seen = distance >= 0
    if window_size:
        seen &= distance < window_size
    if sequence is not None:
        document = sequence.documents(device)  # (B, S)
        own = document.gather(1, rows.expand(len(document), -1))
        seen = seen & (own[:, :, None] == document[:, None, :])
    return seen.unsqueeze(1)


def causal_mask(length: int, window_size: int, device: torch.device) -> Tensor:
    """(S, S) bool, True where query (row) sees key (column): keys up to it, the last `window_size`
    unless 0.
    """
    return visible(length, window_size, None, None, device)[0, 0]


def repeat_heads(x: Tensor, heads: int) -> Tensor:
    """(B, G, ...) -> (B, heads, ...), each group repeated for its query heads."""
    return x if x.shape[1] == heads else x.repeat_interleave(heads // x.shape[1], dim=1)
