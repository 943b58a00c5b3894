"""Llama (2, 3, 3.x), and what its relatives share with it.

transformers: `models/llama/configuration_llama.py`, `modeling_llama.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from megatron_lightning.bridge.family import Family, activation_name
from megatron_lightning.bridge.mapping import PackedQKV, Rule, Stacked
from megatron_lightning.bridge.source_config import SourceConfig, write_rope
from megatron_lightning.config.model import GPTConfig
from megatron_lightning.config.rotary import RotaryConfig


class LlamaFamily(Family):
    """Pre-norm decoder with RMS norms, rotary positions, grouped queries and a gated MLP."""

    model_type: ClassVar[str] = "llama"
    architecture: ClassVar[str] = "LlamaForCausalLM"
    derives_groups: ClassVar[bool] = True
    """The format says: without num_key_value_heads there are as many as query heads."""
    derives_head_dim: ClassVar[bool] = True
    """The format says: without head_dim it is hidden_size / num_attention_heads."""

    rotates_part: ClassVar[bool] = False
    """Whether a part of each head may stay unrotated."""
    activation_field: ClassVar[str] = "hidden_act"
    ties: ClassVar[bool] = False
    """What the format says of models without tie_word_embeddings."""

    def read(self, source: SourceConfig) -> GPTConfig:
        """See `Family.read`."""
        fields = {**self.common(source), **self.own(source)}
        source.finish()
        return GPTConfig(**fields)

    def own(self, source: SourceConfig) -> dict[str, Any]:
        """The fields in which relatives differ: biases here."""
        attention, mlp = source.flag("attention_bias", False), source.flag("mlp_bias", False)
        if attention != mlp:
            raise source.refuse(
                "attention_bias" if attention else "mlp_bias",
                "biases on attention (with its output projection) or MLP alone are not supported",
            )
        return {"add_bias_linear": attention}

    def common(self, source: SourceConfig) -> dict[str, Any]:
        """The fields that all of them have."""
        hidden, heads = source.need("hidden_size"), source.need("num_attention_heads")
        head_dim = source.get("head_dim") if self.derives_head_dim else source.need("head_dim")
        if head_dim is None and hidden % heads:
            raise source.refuse("num_attention_heads", f"does not divide hidden_size={hidden}")
        rotary = self.rotary(source)
        if rotary.percent != 1 and not self.rotates_part:
            raise ValueError(
                f"{source.origin}: partial_rotary_factor={rotary.percent}: this architecture"
                " rotates whole heads"
            )
        groups = "num_key_value_heads"
        fields = {
            "vocab_size": source.need("vocab_size"),
            "num_layers": source.need("num_hidden_layers"),
            "hidden_size": hidden,
            "num_attention_heads": heads,
            "num_query_groups": source.get(groups, heads)
            if self.derives_groups
            else source.need(groups),
            "head_dim": hidden // heads if head_dim is None else head_dim,
            "ffn_hidden_size": source.need("intermediate_size"),
            "max_position_embeddings": source.need("max_position_embeddings"),
            "norm_epsilon": source.need("rms_norm_eps", (int, float)),
            "activation": source.activation(self.activation_field),
            "rotary": rotary,
            "tie_word_embeddings": source.flag("tie_word_embeddings", self.ties),
            "attention_dropout": source.number("attention_dropout", 0.0),
        }
        std = source.number("initializer_range")
        return fields if std is None else {**fields, "init_method_std": std}

    def rotary(self, source: SourceConfig) -> RotaryConfig:
        """The rotation of all layers, or of the full ones."""
        return source.rope()

    def write(self, config: GPTConfig) -> dict[str, Any]:
        """See `Family.write`."""
        return {
            "vocab_size": config.vocab_size,
            "num_hidden_layers": config.num_layers,
            "hidden_size": config.hidden_size,
            "num_attention_heads": config.num_attention_heads,
            "num_key_value_heads": config.num_query_groups,
            "head_dim": config.head_dim,
            "intermediate_size": config.ffn_hidden_size,
            "max_position_embeddings": config.max_position_embeddings,
            "rms_norm_eps": config.norm_epsilon,
            self.activation_field: activation_name(config),
            **write_rope(config.rotary),
            "tie_word_embeddings": config.tie_word_embeddings,
            "attention_dropout": config.attention_dropout,
            **self.write_own(config),
        }

    def write_own(self, config: GPTConfig) -> dict[str, Any]:
        """The counterpart of `own`."""
        return {"attention_bias": config.add_bias_linear, "mlp_bias": config.add_bias_linear}

    def rules(self, config: GPTConfig) -> Sequence[Rule]:
        """See `Family.rules`."""
        ours, theirs = "decoder.layers.{layer}.", "model.layers.{layer}."
        rules = [
            Rule("embedding.word_embeddings.weight", self.word_embeddings),
            Rule("decoder.final_layernorm.weight", "model.norm.weight"),
            Rule("output_layer.weight", self.output_layer),
            Rule(f"{ours}input_layernorm.weight", f"{theirs}input_layernorm.weight"),
            Rule(f"{ours}pre_mlp_layernorm.weight", f"{theirs}post_attention_layernorm.weight"),
        ]
        for kind in ("weight", "bias"):
            projections = [
                (f"self_attention.linear_proj.{kind}", f"self_attn.o_proj.{kind}"),
                (f"mlp.linear_fc2.{kind}", f"mlp.down_proj.{kind}"),
            ]
            rules += [Rule(ours + here, theirs + there) for here, there in projections]
            rules += self.joined(config, ours, theirs, kind)
        return rules

    def joined(self, config: GPTConfig, ours: str, theirs: str, kind: str) -> list[Rule]:
        """The projections that are one tensor here."""
        qkv = tuple(f"{theirs}self_attn.{x}_proj.{kind}" for x in "qkv")
        halves = (f"{theirs}mlp.gate_proj.{kind}", f"{theirs}mlp.up_proj.{kind}")
        return [
            Rule(f"{ours}self_attention.linear_qkv.{kind}", qkv, PackedQKV.of(config)),
            Rule(f"{ours}mlp.linear_fc1.{kind}", halves, Stacked(2)),
        ]


def head_norms() -> list[Rule]:
    """Norms of query and key heads."""
    return [
        Rule(
            f"decoder.layers.{{layer}}.self_attention.{x}_layernorm.weight",
            f"model.layers.{{layer}}.self_attn.{x}_norm.weight",
        )
        for x in "qk"
    ]


def one_window(source: SourceConfig) -> dict[str, Any]:
    """A window that all layers have, or none."""
    window = source.number("sliding_window")
    if window is not None and window < 1:
        raise source.refuse("sliding_window", "must be positive, or null for none")
    return {"window_size": window or 0, "window_pattern": "S"}


def write_one_window(config: GPTConfig) -> dict[str, Any]:
    """The counterpart of `one_window`."""
    return {"sliding_window": config.window_of(0) or None}
