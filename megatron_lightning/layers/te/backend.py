"""The layers of Transformer Engine: the torch back end's parameters under other kernels."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from megatron_lightning.config.model import GPTConfig
from megatron_lightning.layers.dropout import Dropout
from megatron_lightning.layers.te.attention import TEAttention
from megatron_lightning.layers.te.products import (
    TELayerNorm,
    TELinear,
    TERMSNorm,
    TEVocabularyHead,
)
from megatron_lightning.layers.torch_backend import TorchBackend
from megatron_lightning.parallel.core_attention import CoreAttention
from megatron_lightning.parallel.random import Initial, Normal
from megatron_lightning.parallel.streams import Layout
from megatron_lightning.precision import te


@dataclass(frozen=True, kw_only=True)
class TransformerEngineBackend(TorchBackend):
    """Linear layers, norms and attention by Transformer Engine; all else is `TorchBackend`'s."""

    name: str = "transformer_engine"
    """Name for messages and logs."""

    def supports(self, config: GPTConfig) -> list[str]:
        """Refused where Transformer Engine isn't installed, and what the torch back end refuses."""
        missing = te.missing()
        refused = super().supports(config)
        if self.attention != "fused":
            refused.append(
                f"attention={self.attention!r}: it is written out in plain torch; use"
                " backend='torch', or attention='fused'"
            )
        return refused if missing is None else [missing, *refused]

    def linear(
        self,
        in_features: int,
        output_shape: int | Sequence[int],
        *,
        bias: bool,
        initial: Initial,
        device: str | None = None,
    ) -> TELinear:
        """See `LayerBackend.linear`."""
        return TELinear(in_features, output_shape, bias=bias, initial=initial, device=device)

    def norm(
        self, config: GPTConfig, size: int, *, device: str | None = None
    ) -> TERMSNorm | TELayerNorm:
        """See `LayerBackend.norm`."""
        if config.norm == "layernorm":
            return TELayerNorm(size, config.norm_epsilon, device=device)
        centered = config.stream.zero_centered_norm
        return TERMSNorm(size, config.norm_epsilon, zero_centered=centered, device=device)

    def core_attention(self, config: GPTConfig, layer: int) -> CoreAttention:
        """See `LayerBackend.core_attention`."""
        return TEAttention(
            scale=1.0 / math.sqrt(config.attention.scale_dim or config.head_dim),
            window_size=config.window_of(layer),
            dropout=Dropout(config.attention_dropout, Layout.HEADS),
            score_cap=config.attention.score_cap,
        )

    def output_layer(self, config: GPTConfig, *, device: str | None = None) -> TEVocabularyHead:
        """See `LayerBackend.output_layer`."""
        return TEVocabularyHead(
            config.hidden_size,
            config.vocab_size,
            initial=Normal(config.init_method_std),
            pad_multiple=config.make_vocab_size_divisible_by,
            device=device,
        )
