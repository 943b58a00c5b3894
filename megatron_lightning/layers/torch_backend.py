"""The layers of plain torch: works on CPU and GPU, with torch's own fused attention kernels."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from megatron_lightning.config.model import GPTConfig
from megatron_lightning.layers.attention import FusedAttention, ReferenceAttention
from megatron_lightning.layers.dropout import Dropout
from megatron_lightning.layers.embedding import (
    PositionEmbedding,
    VocabularyEmbedding,
    VocabularyHead,
)
from megatron_lightning.layers.linear import Linear
from megatron_lightning.layers.norm import LayerNorm, RMSNorm
from megatron_lightning.parallel.core_attention import CoreAttention
from megatron_lightning.parallel.random import Initial, Normal
from megatron_lightning.parallel.streams import Layout

AttentionKernel = Literal["fused", "reference"]


@dataclass(frozen=True, kw_only=True)
class TorchBackend:
    """See `layers.backend.LayerBackend`."""

    attention: AttentionKernel = "fused"
    """fused: torch's kernels; reference: written out with a float32 softmax (oracle, exact
    dropout).
    """
    name: str = "torch"
    """Name for messages and logs."""

    def supports(self, config: GPTConfig) -> list[str]:
        """Dropping probabilities that a kernel of blocks makes is refused."""
        attention = config.attention
        blocks = attention.sinks or attention.score_cap
        if self.attention != "fused" or not blocks or config.attention_dropout == 0:
            return []
        return [
            f"attention_dropout={config.attention_dropout} with attention.sinks={attention.sinks},"
            f" attention.score_cap={attention.score_cap}: no fused kernel does both; use"
            " attention='reference', or attention_dropout=0"
        ]

    def linear(
        self,
        in_features: int,
        output_shape: int | Sequence[int],
        *,
        bias: bool,
        initial: Initial,
        device: str | None = None,
    ) -> Linear:
        """See `LayerBackend.linear`."""
        return Linear(in_features, output_shape, bias=bias, initial=initial, device=device)

    def norm(
        self, config: GPTConfig, size: int, *, device: str | None = None
    ) -> RMSNorm | LayerNorm:
        """See `LayerBackend.norm`."""
        if config.norm == "layernorm":
            return LayerNorm(size, config.norm_epsilon, device=device)
        centered = config.stream.zero_centered_norm
        return RMSNorm(size, config.norm_epsilon, zero_centered=centered, device=device)

    def core_attention(self, config: GPTConfig, layer: int) -> CoreAttention:
        """See `LayerBackend.core_attention`."""
        kind = FusedAttention if self.attention == "fused" else ReferenceAttention
        return kind(
            scale=1.0 / math.sqrt(config.attention.scale_dim or config.head_dim),
            window_size=config.window_of(layer),
            dropout=Dropout(config.attention_dropout, Layout.HEADS),
            score_cap=config.attention.score_cap,
        )

    def hidden_dropout(self, config: GPTConfig) -> Dropout:
        """See `LayerBackend.hidden_dropout`."""
        return Dropout(config.hidden_dropout, Layout.HIDDEN)

    def word_embeddings(
        self, config: GPTConfig, *, device: str | None = None
    ) -> VocabularyEmbedding:
        """See `LayerBackend.word_embeddings`."""
        return VocabularyEmbedding(
            config.vocab_size,
            config.hidden_size,
            initial=Normal(config.init_method_std),
            pad_multiple=config.make_vocab_size_divisible_by,
            device=device,
        )

    def position_embeddings(
        self, config: GPTConfig, *, device: str | None = None
    ) -> PositionEmbedding:
        """See `LayerBackend.position_embeddings`."""
        return PositionEmbedding(
            config.max_position_embeddings,
            config.hidden_size,
            initial=Normal(config.init_method_std),
            device=device,
        )

    def output_layer(self, config: GPTConfig, *, device: str | None = None) -> VocabularyHead:
        """See `LayerBackend.output_layer`."""
        return VocabularyHead(
            config.hidden_size,
            config.vocab_size,
            initial=Normal(config.init_method_std),
            pad_multiple=config.make_vocab_size_divisible_by,
            device=device,
        )
