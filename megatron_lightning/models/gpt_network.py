"""The GPT network: decoder-only transformer from global sizes, written as for one device.

Nothing here knows of ranks: `models/plans.py` says what may be split, and the layers compute with
the tensors they hold. Hidden states are sequence-first, (S, B, H).
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor, nn

from megatron_lightning.config.model import GPTConfig
from megatron_lightning.layers.backend import LayerBackend, check_supported
from megatron_lightning.layers.block import TransformerLayer
from megatron_lightning.layers.loss import CrossEntropy, is_observed, soft_cap
from megatron_lightning.layers.multi_token_prediction import FurtherLosses, MultiTokenPrediction
from megatron_lightning.layers.rotary import RotaryEmbedding, RotaryTables
from megatron_lightning.layers.sequence import PackedSequences
from megatron_lightning.layers.staged import Carried, StagedNetwork
from megatron_lightning.layers.torch_backend import TorchBackend


class GPTEmbedding(nn.Module):
    """Word embedding, plus learned positions where the config has them, then dropout."""

    def __init__(self, config: GPTConfig, backend: LayerBackend, *, device: str | None) -> None:
        super().__init__()
        self.word_embeddings = backend.word_embeddings(config, device=device)
        learned = config.position_embedding == "learned"
        self.position_embeddings = (
            backend.position_embeddings(config, device=device) if learned else None
        )
        self.scale = config.stream.embedding_scale
        self.dropout = backend.hidden_dropout(config)

    def forward(self, tokens: Tensor, position_ids: Tensor | None = None) -> Tensor:
        """(B, S) -> (S, B, H); positions count from 0 when not given."""
        hidden = self.word_embeddings(tokens)
        if self.scale != 1.0:
            hidden = hidden * torch.tensor(self.scale, dtype=hidden.dtype).item()
        if self.position_embeddings is not None:
            if position_ids is None:
                position_ids = torch.arange(tokens.shape[1], device=tokens.device).unsqueeze(
                    0
                )  # (1, S)
            hidden = hidden + self.position_embeddings(position_ids)
        return self.dropout(hidden)


class GPTDecoder(nn.Module):
    """The layers, keyed by their number in the whole network, and the norm after the last. Holds
    them, runs nothing.
    """

    def __init__(self, config: GPTConfig, backend: LayerBackend, *, device: str | None) -> None:
        super().__init__()
        self.layers = nn.ModuleDict(
            {
                str(i): TransformerLayer(config, i, backend, device=device)
                for i in range(config.num_layers)
            }
        )
        self.final_layernorm = backend.norm(config, config.hidden_size, device=device)


class GPTNetwork(StagedNetwork):
    """Tokens -> logits, or with labels -> the loss of each token.

    Call: `network(tokens, position_ids=None, labels=None, cu_seqlens=None, loss_mask=None)`; the
    first three (B, S) int64 (positions also (1, S)), positions in [0, max_position_embeddings),
    labels already shifted, negative ones ignored. `cu_seqlens` (B, documents + 1): where packed
    documents begin and the last one ends; attention stays within them, and positions count from
    their beginnings when not given. Returns logits (S, B, V) of the true vocabulary, or with labels
    the losses (B, S) in float32, unmasked and not averaged.

    `loss_mask` (B, S), besides labels, asks for the losses of multi-token prediction too: (losses,
    `FurtherLosses`).
    """

    layers_path: ClassVar[str] = "decoder.layers"

    def __init__(
        self, config: GPTConfig, backend: LayerBackend | None = None, *, device: str | None = None
    ) -> None:
        """Build with uninitialised weights; "meta" costs nothing. ValueError lists all that is
        wrong with the config.
        """
        super().__init__()
        backend = TorchBackend() if backend is None else backend
        check_supported(backend, config)
        self.config = config
        self.embedding = GPTEmbedding(config, backend, device=device)
        self.decoder = GPTDecoder(config, backend, device=device)
        self.output_layer = backend.output_layer(config, device=device)
        if config.tie_word_embeddings:
            self.output_layer.weight = self.embedding.word_embeddings.weight
        self.loss = CrossEntropy(
            config.vocab_size,
            label_smoothing=config.label_smoothing,
            logit_cap=config.stream.logit_cap,
        )
        rotates = config.position_embedding == "rope"
        self.rotary = RotaryEmbedding(config.rotary_dim, config.rotary) if rotates else None
        local = config.attention.local_rotary
        self.local_rotary = None if local is None else RotaryEmbedding(config.rotary_dim, local)
        self.packed = PackedSequences()
        self.mtp = None
        if config.multi_token_prediction is not None:
            embedding = GPTEmbedding(config, backend, device=device)
            embedding.word_embeddings.weight = self.embedding.word_embeddings.weight
            self.mtp = MultiTokenPrediction(config, backend, embedding, device=device)

    def begin(
        self,
        tokens: Tensor,
        position_ids: Tensor | None = None,
        labels: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        loss_mask: Tensor | None = None,
    ) -> Tensor:
        """Embed: (B, S) -> (S, B, H)."""
        if position_ids is None:
            position_ids = self.packed.positions(cu_seqlens, tokens.device)
        return self.embedding(tokens, position_ids)

    def apply_layer(
        self,
        name: str,
        layer: nn.Module,
        carried: Carried,
        tokens: Tensor,
        position_ids: Tensor | None = None,
        labels: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        loss_mask: Tensor | None = None,
    ) -> Tensor:
        """One transformer layer: (S, B, H) -> (S, B, H)."""
        sequence = self.packed(cu_seqlens)
        return layer(carried, self._tables(int(name), tokens, position_ids, cu_seqlens), sequence)

    def _tables(
        self, layer: int, tokens: Tensor, position_ids: Tensor | None, cu_seqlens: Tensor | None
    ) -> RotaryTables | None:
        """Rotation in layer number `layer`."""
        if self.rotary is None:
            return None
        if position_ids is None:
            position_ids = self.packed.positions(cu_seqlens, tokens.device)
        # From the tokens' shape, since the hidden state may hold only a part of the sequence.
        return self._rotary_of(layer)(tokens.shape[1], position_ids, tokens.device)

    def _rotary_of(self, layer: int) -> RotaryEmbedding:
        """That of layer number `layer`: sliding ones may have their own."""
        sliding = self.local_rotary is not None and self.config.window_of(layer)
        found = self.local_rotary if sliding else self.rotary
        assert found is not None
        return found

    def finish(
        self,
        carried: Carried,
        tokens: Tensor,
        position_ids: Tensor | None = None,
        labels: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        loss_mask: Tensor | None = None,
    ) -> Tensor | tuple[Tensor, FurtherLosses]:
        """Norm, head, and loss if there are labels: (S, B, H) -> (B, S) losses, or (S, B, V)
        logits.
        """
        hidden = self.decoder.final_layernorm(carried)
        logits = self.output_layer(hidden)
        if labels is not None:
            # A loss of the user's own may look at the logits in its backward.
            own = type(self.loss) is CrossEntropy
            options = {"consume": not is_observed(self.output_layer, self.loss)} if own else {}
            losses = self.loss(logits, labels, **options)
            if self.mtp is None or loss_mask is None:
                return losses
            tables = self._tables(self.config.num_layers - 1, tokens, position_ids, cu_seqlens)
            sequence = self.packed(cu_seqlens)
            targets = self.mtp.targets(tokens, labels, loss_mask, sequence)
            states = self.mtp(hidden, targets.tokens, tables, sequence)
            further = [
                self.loss(self.output_layer(state), ids, **options)
                for state, ids in zip(states, targets.labels, strict=True)
            ]
            stacked = torch.stack(further), torch.stack(targets.masks)
            return losses, FurtherLosses(*stacked, targets.counts)
        return soft_cap(self.output_layer.whole(logits), self.config.stream.logit_cap)
