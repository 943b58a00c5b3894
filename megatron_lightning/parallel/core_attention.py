"""The seam of context parallelism: what an attention core is.

A core is the part of attention between projected queries, keys and values and the output
projection. Context parallelism takes it out of a network and puts another one in its place, so
cores derive from `CoreAttention` and say what they compute.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import ClassVar, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from megatron_lightning.parallel.sequence import SequenceInfo


@runtime_checkable
class AttentionDropout(Protocol):
    """What a core's dropout module says of itself (`layers.Dropout` is one)."""

    p: float
    training: bool

    def __call__(self, x: Tensor) -> Tensor:
        """Drop elements of attention probabilities."""
        ...

    def fused(self, device: torch.device) -> AbstractContextManager[float]:
        """Enter for a kernel that drops inside, with the probability that is given."""
        ...


class _NoDropout(nn.Module):
    """The dropout of a core that was given none."""

    p = 0.0

    def forward(self, x: Tensor) -> Tensor:
        return x

    @contextmanager
    def fused(self, device: torch.device) -> Iterator[float]:
        yield self.p


class CoreAttention(nn.Module, ABC):
    """Causal attention: (S, B, N, D), (S, B, G, D), (S, B, G, Dv) -> (S, B, N * Dv).

    Query head i reads group i * G // N. A core has no parameters: sinks are handed to it.
    """

    written_out: ClassVar[bool] = False
    """True when probabilities are made in the open, in float32, and not inside a fused kernel."""
    splits_sequence: ClassVar[bool] = False
    """True when each context rank is to call it with its part of the sequence."""
    dropout: AttentionDropout

    def __init__(
        self,
        *,
        scale: float,
        window_size: int = 0,
        dropout: nn.Module | None = None,
        score_cap: float = 0.0,
    ) -> None:
        """`scale` multiplies the scores; `window_size` in tokens, 0 for none; `dropout`, of
        probabilities, is a `layers.Dropout` of layout HEADS, None for none; scores s become
        score_cap * tanh(s / score_cap) unless it is 0. ValueError for another kind of dropout.
        """
        super().__init__()
        dropout = _NoDropout() if dropout is None else dropout
        written_out = self.written_out and hasattr(dropout, "p")
        if not written_out and not isinstance(dropout, AttentionDropout):
            raise ValueError(
                f"dropout={dropout}: a kernel can't drop by a {type(dropout).__name__}; give"
                " megatron_lightning.layers.Dropout(p, Layout.HEADS), with Layout from"
                " megatron_lightning.parallel, or leave it out to drop nothing"
            )
        self.scale = scale
        self.window_size = window_size
        self.score_cap = score_cap
        self.add_module("dropout", dropout)

    @property
    def drops(self) -> bool:
        """True when attention probabilities are dropped now."""
        return self.training and self.dropout.p > 0.0

    @abstractmethod
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
        """Attend, within documents if `sequence` says that rows are packed.

        `rows` (1 or B, S'): which tokens of the whole sequence the queries (S', B, N, D) are, when
        they are some of them; keys and values are always those of all tokens. `sinks` (N,): a
        score for each head that joins the softmax's denominator and has no value.
        """
