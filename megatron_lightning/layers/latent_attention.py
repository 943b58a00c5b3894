"""Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1; YaRN as in DeepSeek-V3).

One small vector a token, normed, gives the keys and values of all heads; another gives the queries.
Position is carried by a part of each head alone: the end of every query head, and one rotated key
part that all heads share. Keys and values are made in full here, as training does; the form that
multiplies the projections into each other serves a cache during generation.

Parameter names are those of Megatron-Core.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from megatron_lightning.config.model import GPTConfig
from megatron_lightning.config.rotary import RotaryConfig
from megatron_lightning.layers.rotary import RotaryTables
from megatron_lightning.parallel.plain_layers import Border
from megatron_lightning.parallel.random import Normal
from megatron_lightning.parallel.sequence import SequenceInfo

if TYPE_CHECKING:
    from megatron_lightning.layers.backend import LayerBackend

_READ_BYTES = 16
"""What attention kernels read at once: a view of values must begin at a multiple of it (torch looks
at the size of heads, not at where they begin)."""


class HeadInput(nn.Module):
    """What heads read without a projection of their own in front of it: the shared part of the key.

    Tensor parallelism sets `before`, as it does for the projections: the part of the sequence is
    gathered, and gradients of the ranks' heads are summed.
    """

    enters_heads: bool = True
    before: Border | None = None

    def forward(self, x: Tensor) -> Tensor:
        """(S, B, ...) -> the same, of the whole sequence."""
        return x if self.before is None else self.before(x)


class LatentAttention(nn.Module):
    """Compression, norms, projection to heads, rotation of a part, core, output projection.

    The number of heads here is what the weights hold.
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
        latent = config.latent_attention
        assert latent is not None
        self.latent = latent
        heads, hidden = config.num_attention_heads, config.hidden_size

        def linear(in_features: int, out_features: int, std: float) -> nn.Module:
            return backend.linear(
                in_features, out_features, bias=False, initial=Normal(std), device=device
            )

        std = config.init_method_std
        if latent.q_lora_rank:
            self.linear_q_down_proj = linear(hidden, latent.q_lora_rank, std)
            self.q_layernorm = backend.norm(config, latent.q_lora_rank, device=device)
            self.linear_q_up_proj = linear(latent.q_lora_rank, heads * latent.query_dim, std)
        else:
            self.linear_q_proj = linear(hidden, heads * latent.query_dim, std)
        down = latent.kv_lora_rank + latent.qk_pos_emb_head_dim
        self.linear_kv_down_proj = linear(hidden, down, std)
        self.kv_layernorm = backend.norm(config, latent.kv_lora_rank, device=device)
        up = heads * (latent.qk_head_dim + latent.v_head_dim)
        self.linear_kv_up_proj = linear(latent.kv_lora_rank, up, std)
        self.shared_key = HeadInput()
        self.core_attention = backend.core_attention(config, layer)
        self.core_attention.scale *= score_factor(config.rotary)
        self.linear_proj = linear(
            config.attention_size, hidden, std / math.sqrt(2 * config.num_layers)
        )

    def forward(
        self,
        hidden: Tensor,
        rotary: RotaryTables | None = None,
        sequence: SequenceInfo | None = None,
    ) -> Tensor:
        """(S, B, H) -> (S, B, H); parts of queries and keys are rotated by `rotary`.

        `sequence`: the documents that are packed into the samples, None for one a sample.
        """
        assert rotary is not None
        latent = self.latent
        parts = (latent.qk_head_dim, latent.qk_pos_emb_head_dim)
        query = self._queries(hidden).unflatten(-1, (-1, latent.query_dim))  # (S, B, N, Dn + Dr)
        plain, turned = query.split(parts, dim=-1)
        query = torch.cat((plain, rotary.rotate(turned)), dim=-1)

        down = self.linear_kv_down_proj(hidden)  # (S or S/tp, B, R + Dr)
        compressed, shared = down.split((latent.kv_lora_rank, latent.qk_pos_emb_head_dim), dim=-1)
        up = self.linear_kv_up_proj(self.kv_layernorm(compressed))
        up = up.unflatten(-1, (-1, latent.qk_head_dim + latent.v_head_dim))
        plain, value = up.split((latent.qk_head_dim, latent.v_head_dim), dim=-1)
        if latent.qk_head_dim * up.element_size() % _READ_BYTES:
            value = value.contiguous()
        shared = rotary.rotate(self.shared_key(shared).unsqueeze(2))  # (S, B, 1, Dr)
        key = torch.cat((plain, shared.expand(-1, -1, plain.shape[2], -1)), dim=-1)
        return self.linear_proj(self.core_attention(query, key, value, sequence))

    def _queries(self, hidden: Tensor) -> Tensor:
        """(S, B, H) -> (S, B, N * (Dn + Dr))."""
        if not self.latent.q_lora_rank:
            return self.linear_q_proj(hidden)
        return self.linear_q_up_proj(self.q_layernorm(self.linear_q_down_proj(hidden)))


def score_factor(rotary: RotaryConfig) -> float:
    """Factor on the scores: with yarn (0.1 * mscale_all_dim * ln(factor) + 1)^2, else 1."""
    if rotary.scaling != "yarn":
        return 1.0
    return (0.1 * rotary.mscale_all_dim * math.log(rotary.factor) + 1.0) ** 2
