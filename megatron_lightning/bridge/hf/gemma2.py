"""Gemma 2: norms before and after each branch by 1 + weight, scaled embeddings, capped scores and
logits, alternating windows.

transformers: `models/gemma2/configuration_gemma2.py`, `modeling_gemma2.py`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, ClassVar

from megatron_lightning.bridge.hf.llama import LlamaFamily
from megatron_lightning.bridge.hf.windows import pattern_of, typed_windows, write_typed_windows
from megatron_lightning.bridge.mapping import Rule
from megatron_lightning.bridge.source_config import SourceConfig
from megatron_lightning.config.model import GPTConfig
from megatron_lightning.config.rotary import RotaryConfig
from megatron_lightning.config.variants import AttentionConfig, StreamConfig


class Gemma2Family(LlamaFamily):
    """See the module."""

    model_type: ClassVar[str] = "gemma2"
    architecture: ClassVar[str] = "Gemma2ForCausalLM"
    derives_groups: ClassVar[bool] = False
    derives_head_dim: ClassVar[bool] = False
    activation_field: ClassVar[str] = "hidden_activation"
    ties: ClassVar[bool] = True

    def own(self, source: SourceConfig) -> dict[str, Any]:
        """All that isn't Llama."""
        source.only("attention_bias", (False,), "a bias on all of attention and none on the MLP")
        source.only("use_bidirectional_attention", (False,), "attention to later tokens")
        source.get("hidden_act")  # older files have both; transformers reads hidden_activation
        source.get("cache_implementation")
        return {
            **self.windows(source),
            "attention": AttentionConfig(
                scale_dim=source.need("query_pre_attn_scalar"),
                score_cap=float(source.stated("attn_logit_softcapping") or 0.0),
                local_rotary=self.local_rotary(source),
            ),
            "stream": StreamConfig(
                embedding_scale=math.sqrt(source.need("hidden_size")),
                zero_centered_norm=True,
                branch_norm=True,
                logit_cap=float(source.stated("final_logit_softcapping") or 0.0),
            ),
        }

    def windows(self, source: SourceConfig) -> dict[str, Any]:
        """Every second layer is full."""
        return typed_windows(source, pattern_of(2, source.need("num_hidden_layers")))

    def local_rotary(self, source: SourceConfig) -> RotaryConfig | None:
        """The rotation of sliding layers, where it is another one."""
        return None

    def write_own(self, config: GPTConfig) -> dict[str, Any]:
        """All that isn't Llama."""
        cap, logit_cap = config.attention.score_cap, config.stream.logit_cap
        return {
            "attention_bias": False,
            "query_pre_attn_scalar": config.attention.scale_dim or config.head_dim,
            "attn_logit_softcapping": cap or None,
            "final_logit_softcapping": logit_cap or None,
            **write_typed_windows(config),
        }

    def rules(self, config: GPTConfig) -> Sequence[Rule]:
        """Those of Llama, but for what the norms are called."""
        ours, theirs = "decoder.layers.{layer}.", "model.layers.{layer}."
        names = {
            "post_attention_layernorm": "post_attention_layernorm",
            "pre_mlp_layernorm": "pre_feedforward_layernorm",
            "post_mlp_layernorm": "post_feedforward_layernorm",
        }
        llama = [r for r in super().rules(config) if "pre_mlp_layernorm" not in r.ours]
        norms = [
            Rule(f"{ours}{here}.weight", f"{theirs}{there}.weight") for here, there in names.items()
        ]
        return [*llama, *norms]
