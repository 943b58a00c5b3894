"""The seam between networks and kernels: what a back end must make.

A network asks the back end for its layers and never names a kernel. Every back end gives the same
parameter names, shapes and initial values, so that weights and checkpoints do not depend on it, and
says at build time what it can't do.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import nn

from megatron_lightning.config.model import GPTConfig
from megatron_lightning.layers.embedding import (
    PositionEmbedding,
    VocabularyEmbedding,
    VocabularyHead,
)
from megatron_lightning.parallel.core_attention import CoreAttention
from megatron_lightning.parallel.random import Initial


class LayerBackend(Protocol):
    """Makes the layers of a network from global sizes. `device` may be "meta"."""

    @property
    def name(self) -> str:
        """Name for messages and logs."""
        ...

    def supports(self, config: GPTConfig) -> list[str]:
        """What the back end can't do of this config, as sentences with field, value and remedy."""
        ...

    def linear(
        self,
        in_features: int,
        output_shape: int | Sequence[int],
        *,
        bias: bool,
        initial: Initial,
        device: str | None = None,
    ) -> nn.Module:
        """(..., in_features) -> (..., *output_shape), with `weight` of (*output_shape,
        in_features).
        """
        ...

    def norm(self, config: GPTConfig, size: int, *, device: str | None = None) -> nn.Module:
        """The config's norm over a last dim of `size`."""
        ...

    def core_attention(self, config: GPTConfig, layer: int) -> CoreAttention:
        """Core of layer number `layer`: (S, B, N, D), (S, B, G, D), (S, B, G, D) -> (S, B, N *
        D).
        """
        ...

    def hidden_dropout(self, config: GPTConfig) -> nn.Module:
        """Dropout of the hidden state, (S, B, H) -> (S, B, H)."""
        ...

    def word_embeddings(
        self, config: GPTConfig, *, device: str | None = None
    ) -> VocabularyEmbedding:
        """Token ids (B, S) -> (S, B, H)."""
        ...

    def position_embeddings(
        self, config: GPTConfig, *, device: str | None = None
    ) -> PositionEmbedding:
        """Learned positions, (B, S) -> (S, B, H)."""
        ...

    def output_layer(self, config: GPTConfig, *, device: str | None = None) -> VocabularyHead:
        """(S, B, H) -> logits (S, B, V), without bias."""
        ...


def check_supported(backend: LayerBackend, config: GPTConfig) -> None:
    """ValueError with every rule that the config breaks and everything that the back end
    refuses.
    """
    problems = config.check()
    problems += [f"back end {backend.name!r}: {refusal}" for refusal in backend.supports(config)]
    if problems:
        raise ValueError("this network can't be built: " + "; ".join(problems))
