"""One pre-norm transformer layer."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor, nn

from megatron_lightning.config.model import GPTConfig
from megatron_lightning.layers.attention import SelfAttention
from megatron_lightning.layers.mlp import MLP
from megatron_lightning.layers.rotary import RotaryTables
from megatron_lightning.parallel.sequence import SequenceInfo

if TYPE_CHECKING:
    from megatron_lightning.layers.backend import LayerBackend


class TransformerLayer(nn.Module):
    """x + dropout(attention(norm(x))), then x + dropout(mlp(norm(x)))."""

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
        self.self_attention = SelfAttention(config, layer, backend, device=device)
        self.attention_dropout = backend.hidden_dropout(config)
        self.pre_mlp_layernorm = backend.norm(config, config.hidden_size, device=device)
        self.mlp = MLP(config, backend, device=device)
        self.mlp_dropout = backend.hidden_dropout(config)

    def forward(
        self,
        hidden: Tensor,
        rotary: RotaryTables | None = None,
        sequence: SequenceInfo | None = None,
    ) -> Tensor:
        """(S, B, H) -> (S, B, H); `sequence`: packed documents, None for one a sample."""
        attended = self.self_attention(self.input_layernorm(hidden), rotary, sequence)
        hidden = hidden + self.attention_dropout(attended)
        return hidden + self.mlp_dropout(self.mlp(self.pre_mlp_layernorm(hidden)))
