"""GPT-2: learned positions, layer norms, biases; linear weights are stored transposed.

transformers: `models/gpt2/configuration_gpt2.py`, `modeling_gpt2.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from megatron_lightning.bridge.family import Family, activation_name
from megatron_lightning.bridge.mapping import Fused, PackedQKV, Rule, Same, Transposed
from megatron_lightning.bridge.source_config import SourceConfig
from megatron_lightning.config.model import GPTConfig

_SUMMARY = ("type", "use_proj", "activation", "proj_to_labels", "first_dropout")


class GPT2Family(Family):
    """See the module."""

    model_type: ClassVar[str] = "gpt2"
    architecture: ClassVar[str] = "GPT2LMHeadModel"
    prefix: ClassVar[str] = "transformer."
    ignored: ClassVar[tuple[str, ...]] = ("*h.*.attn.bias", "*h.*.attn.masked_bias")
    word_embeddings: ClassVar[str] = "transformer.wte.weight"

    def read(self, source: SourceConfig) -> GPTConfig:
        """See `Family.read`."""
        source.only("scale_attn_weights", (True,), "attention without a scale")
        source.only("scale_attn_by_inverse_layer_idx", (False,), "a scale for each layer")
        source.only("add_cross_attention", (False,), "cross-attention")
        source.get("reorder_and_upcast_attn")  # float32 scores, which ours are in any case
        source.get("n_ctx")  # the same number as n_positions
        for name in _SUMMARY:
            source.get(f"summary_{name}")  # a head for classification, not in this model
        hidden = source.need("n_embd")
        embedding = source.need("embd_pdrop", (int, float))
        if embedding != source.need("resid_pdrop", (int, float)):
            raise source.refuse("embd_pdrop", "must equal resid_pdrop")
        config = GPTConfig(
            vocab_size=source.need("vocab_size"),
            num_layers=source.need("n_layer"),
            hidden_size=hidden,
            num_attention_heads=source.need("n_head"),
            ffn_hidden_size=source.get("n_inner", 4 * hidden),
            max_position_embeddings=source.need("n_positions"),
            norm="layernorm",
            norm_epsilon=source.need("layer_norm_epsilon", (int, float)),
            activation=source.activation("activation_function"),
            gated_linear_unit=False,
            add_bias_linear=True,
            position_embedding="learned",
            tie_word_embeddings=source.flag("tie_word_embeddings", True),
            attention_dropout=source.need("attn_pdrop", (int, float)),
            hidden_dropout=embedding,
            init_method_std=source.number("initializer_range", 0.02),
        )
        source.finish()
        return config

    def write(self, config: GPTConfig) -> dict[str, Any]:
        """See `Family.write`."""
        return {
            "vocab_size": config.vocab_size,
            "n_layer": config.num_layers,
            "n_embd": config.hidden_size,
            "n_head": config.num_attention_heads,
            "n_inner": config.ffn_hidden_size,
            "n_positions": config.max_position_embeddings,
            "layer_norm_epsilon": config.norm_epsilon,
            "activation_function": activation_name(config),
            "tie_word_embeddings": config.tie_word_embeddings,
            "attn_pdrop": config.attention_dropout,
            "embd_pdrop": config.hidden_dropout,
            "resid_pdrop": config.hidden_dropout,
        }

    def rules(self, config: GPTConfig) -> Sequence[Rule]:
        """See `Family.rules`."""
        rules = [
            Rule("embedding.word_embeddings.weight", self.word_embeddings),
            Rule("embedding.position_embeddings.weight", "transformer.wpe.weight"),
            Rule("output_layer.weight", self.output_layer),
        ]
        for kind in ("weight", "bias"):
            # Reversing the dims of a bias changes nothing.
            forms = {"linear": Transposed(), "norm": Same()}
            rules.append(Rule(f"decoder.final_layernorm.{kind}", f"transformer.ln_f.{kind}"))
            for here, there, form in (
                ("input_layernorm", "ln_1", forms["norm"]),
                ("pre_mlp_layernorm", "ln_2", forms["norm"]),
                (
                    "self_attention.linear_qkv",
                    "attn.c_attn",
                    Transposed(Fused(PackedQKV.of(config))),
                ),
                ("self_attention.linear_proj", "attn.c_proj", forms["linear"]),
                ("mlp.linear_fc1", "mlp.c_fc", forms["linear"]),
                ("mlp.linear_fc2", "mlp.c_proj", forms["linear"]),
            ):
                rules.append(
                    Rule(
                        f"decoder.layers.{{layer}}.{here}.{kind}",
                        f"transformer.h.{{layer}}.{there}.{kind}",
                        form,
                    )
                )
        return rules
