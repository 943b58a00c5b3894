"""One pre-norm transformer layer."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor, nn

from megatron_lightning.config.model import GPTConfig
from megatron_lightning.layers.attention import SelfAttention
from megatron_lightning.layers.latent_attention import LatentAttention
from megatron_lightning.layers.mlp import MLP
from megatron_lightning.layers.moe.layer import MoELayer
from megatron_lightning.layers.rotary import RotaryTables
from megatron_lightning.parallel.sequence import SequenceInfo

if TYPE_CHECKING:
    from megatron_lightning.layers.backend import LayerBackend


class TransformerLayer(nn.Module):
    """x + dropout(attention(norm(x))), then x + dropout(mlp(norm(x))); with `stream.branch_norm`
    what attention and MLP give passes a norm of its own before dropout.
    """

    def __init__(
        self,
        config: GPTConfig,
        layer: int,
        backend: LayerBackend,
        *,
        device: str | None = None,
    ) -> None:
        """Build layer number `layer` (from 0, of the whole network; it decides the window)."""
        super().__init__()
        self.input_layernorm = backend.norm(config, config.hidden_size, device=device)
        attention = SelfAttention if config.latent_attention is None else LatentAttention
        self.self_attention = attention(config, layer, backend, device=device)
        branch_norm = config.stream.branch_norm
        self.post_attention_layernorm = (
            backend.norm(config, config.hidden_size, device=device) if branch_norm else None
        )
        self.attention_dropout = backend.hidden_dropout(config)
        self.pre_mlp_layernorm = backend.norm(config, config.hidden_size, device=device)
        moe = config.is_moe_layer(layer)
        self.mlp = (MoELayer if moe else MLP)(config, backend, device=device)
        self.post_mlp_layernorm = (
            backend.norm(config, config.hidden_size, device=device) if branch_norm else None
        )
        self.mlp_dropout = backend.hidden_dropout(config)

    def forward(
        self,
        hidden: Tensor,
        rotary: RotaryTables | None = None,
        sequence: SequenceInfo | None = None,
    ) -> Tensor:
        """(S, B, H) -> (S, B, H); `sequence`: packed documents, None for one a sample."""
        attended = self.self_attention(self.input_layernorm(hidden), rotary, sequence)
        if self.post_attention_layernorm is not None:
            attended = self.post_attention_layernorm(attended)
        hidden = hidden + self.attention_dropout(attended)
        fed = self.mlp(self.pre_mlp_layernorm(hidden))
        if self.post_mlp_layernorm is not None:
            fed = self.post_mlp_layernorm(fed)
        return hidden + self.mlp_dropout(fed)
