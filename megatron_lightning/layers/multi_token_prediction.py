"""Multi-token prediction (DeepSeek-V3, arXiv 2412.19437, section 2.2), as Megatron-Core trains it.

Depth k joins the hidden state of depth k - 1 (at first the network's, after its final norm) with
the embedding of the token k places further, both normed, projects them to the hidden size, and runs
a layer like the network's last. The output layer is shared, and gives the loss of the token that
stands k places behind the next one. On a later pipeline stage the embedding is a tied copy.

Parameter names are those of Megatron-Core.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor, nn

from megatron_lightning.config.model import GPTConfig
from megatron_lightning.layers.block import TransformerLayer
from megatron_lightning.layers.rotary import RotaryTables
from megatron_lightning.parallel.random import Normal
from megatron_lightning.parallel.sequence import SequenceInfo
from megatron_lightning.parallel.token_shift import TokenShift

if TYPE_CHECKING:
    from megatron_lightning.layers.backend import LayerBackend

IGNORED_LABEL = -100


class Targets(NamedTuple):
    """What the depths see and predict, for each depth (B, S)."""

    tokens: list[Tensor]
    """Ids that are embedded."""
    labels: list[Tensor]
    masks: list[Tensor]
    """Which labels count."""
    counts: Tensor
    """(1 + depths,): tokens with a loss in whole samples, of the network and of each depth."""


class FurtherLosses(NamedTuple):
    """Losses of the depths."""

    losses: Tensor
    """(depths, B, S) float32, not masked."""
    masks: Tensor
    """(depths, B, S): which of them count."""
    counts: Tensor
    """See `Targets.counts`."""

    def means(self, num_tokens: Tensor) -> Tensor:
        """(depths,) means over the tokens of whole samples, each times the share of these samples'
        loss tokens that `num_tokens`, the number of those here, is not: 1 without context
        parallelism. So weighting by that share, as it is done with losses, gives the mean.
        """
        weights = self.counts[0] / self.counts[1:].clamp(min=1)
        return self.shares(num_tokens) * weights

    def shares(self, num_tokens: Tensor) -> Tensor:
        """(depths,) sums over the tokens here, divided by `num_tokens`, the number of the network's
        own loss tokens.
        """
        sums = (self.losses.masked_fill(self.masks == 0, 0.0) * self.masks).sum(dim=(1, 2))
        return sums / num_tokens.clamp(min=1)


class PredictionLayer(nn.Module):
    """One depth."""

    def __init__(
        self, config: GPTConfig, backend: LayerBackend, *, device: str | None = None
    ) -> None:
        super().__init__()
        hidden = config.hidden_size
        self.enorm = backend.norm(config, hidden, device=device)
        self.hnorm = backend.norm(config, hidden, device=device)
        self.eh_proj = backend.linear(
            2 * hidden, hidden, bias=False, initial=Normal(config.init_method_std), device=device
        )
        last = config.num_layers - 1
        self.mtp_model_layer = TransformerLayer(config, last, backend, device=device)
        self.final_layernorm = backend.norm(config, hidden, device=device)

    def forward(
        self,
        hidden: Tensor,
        embedded: Tensor,
        rotary: RotaryTables | None = None,
        sequence: SequenceInfo | None = None,
    ) -> Tensor:
        """Hidden state and embedding, (S, B, H) each -> (S, B, H), normed."""
        joined = torch.cat((self.enorm(embedded), self.hnorm(hidden)), dim=-1)
        return self.final_layernorm(self.mtp_model_layer(self.eh_proj(joined), rotary, sequence))


class MultiTokenPrediction(nn.Module):
    """All depths."""

    def __init__(
        self,
        config: GPTConfig,
        backend: LayerBackend,
        embedding: nn.Module,
        *,
        device: str | None = None,
    ) -> None:
        """`embedding`: (B, S) -> (S, B, H), whose weight is tied to the network's."""
        super().__init__()
        self.embedding = embedding
        depths = range(config.prediction_depths)
        self.layers = nn.ModuleDict(
            {str(k): PredictionLayer(config, backend, device=device) for k in depths}
        )
        self.shift = TokenShift()

    def targets(
        self, tokens: Tensor, labels: Tensor, loss_mask: Tensor, sequence: SequenceInfo | None
    ) -> Targets:
        """From the network's own, (B, S) each; past a document's end nothing counts."""
        depths = len(self.layers)
        masks, counts = self.shift(loss_mask.float(), sequence, depths, 0.0)
        return Targets(
            tokens=self.shift(tokens, sequence, depths, 0)[0],
            labels=self.shift(labels, sequence, depths, IGNORED_LABEL)[0],
            masks=masks,
            counts=counts,
        )

    def forward(
        self,
        hidden: Tensor,
        tokens: Sequence[Tensor],
        rotary: RotaryTables | None = None,
        sequence: SequenceInfo | None = None,
    ) -> list[Tensor]:
        """The network's normed hidden state (S, B, H) and the token ids of each depth (B, S) ->
        what the output layer reads, for each depth (S, B, H).
        """
        found = []
        for layer, ids in zip(self.layers.values(), tokens, strict=True):
            hidden = layer(hidden, self.embedding(ids), rotary, sequence)
            found.append(hidden)
        return found
