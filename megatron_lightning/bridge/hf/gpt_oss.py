"""GPT-OSS: experts in every layer, biases everywhere, attention sinks, alternating windows, YaRN,
and a clamped gated unit. Experts are one tensor [E, in, out] there, gate and up in turns.

transformers: `models/gpt_oss/configuration_gpt_oss.py`, `modeling_gpt_oss.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from megatron_lightning.bridge.hf.experts import balancing, num_experts, write_balancing
from megatron_lightning.bridge.hf.llama import LlamaFamily
from megatron_lightning.bridge.hf.windows import pattern_of, typed_windows, write_typed_windows
from megatron_lightning.bridge.mapping import Rearranged, Rule
from megatron_lightning.bridge.source_config import SourceConfig
from megatron_lightning.config.model import GPTConfig
from megatron_lightning.config.moe import MoEConfig, expert_width
from megatron_lightning.config.variants import AttentionConfig, ClampConfig


class GptOssFamily(LlamaFamily):
    """See the module."""

    model_type: ClassVar[str] = "gpt_oss"
    architecture: ClassVar[str] = "GptOssForCausalLM"
    derives_groups: ClassVar[bool] = False
    derives_head_dim: ClassVar[bool] = False

    def own(self, source: SourceConfig) -> dict[str, Any]:
        """All that isn't Llama."""
        balancing(source)
        if not source.flag("attention_bias", True):
            raise source.refuse("attention_bias", "biases on experts alone are not supported")
        source.get("initial_context_length")  # of the rotary embedding, which has its own
        topk = source.need("num_experts_per_tok")
        source.only("experts_per_token", (topk,), f"another number than num_experts_per_tok={topk}")
        types = pattern_of(2, source.need("num_hidden_layers"))
        return {
            "add_bias_linear": True,
            **typed_windows(source, types),
            "attention": AttentionConfig(sinks=True),
            # The format says what they are where the file does not.
            "clamp": ClampConfig(
                alpha=source.number("swiglu_alpha", 1.702),
                limit=source.number("swiglu_limit", 7.0),
            ),
            "moe": MoEConfig(
                num_experts=num_experts(source, "num_local_experts", "num_experts"),
                router_topk=topk,
                router_bias=True,
            ),
        }

    def write_own(self, config: GPTConfig) -> dict[str, Any]:
        """All that isn't Llama."""
        moe, clamp = config.moe, config.clamp
        if moe is None or clamp is None:
            return {}
        return {
            "attention_bias": config.add_bias_linear,
            **write_typed_windows(config),
            **write_balancing(),
            "intermediate_size": expert_width(config),
            "num_local_experts": moe.num_experts,
            "num_experts_per_tok": moe.router_topk,
            "swiglu_alpha": clamp.alpha,
            "swiglu_limit": clamp.limit,
        }

    def rules(self, config: GPTConfig) -> Sequence[Rule]:
        """Those of Llama, sinks, router and experts."""
        ours, theirs = "decoder.layers.{layer}.", "model.layers.{layer}."
        experts, names = f"{ours}mlp.experts.", f"{theirs}mlp.experts."
        in_turns = Rearranged(((0,), (3,), (2, 1)))  # [E, 2, F, H] as [E, H, 2F]
        return [
            *super().rules(config),
            Rule(f"{ours}self_attention.sinks", f"{theirs}self_attn.sinks"),
            Rule(f"{ours}mlp.router.weight", f"{theirs}mlp.router.weight"),
            Rule(f"{ours}mlp.router.bias", f"{theirs}mlp.router.bias"),
            Rule(f"{experts}linear_fc1.weight", f"{names}gate_up_proj", in_turns),
            Rule(
                f"{experts}linear_fc1.bias", f"{names}gate_up_proj_bias", Rearranged(((0,), (2, 1)))
            ),
            Rule(
                f"{experts}linear_fc2.weight", f"{names}down_proj", Rearranged(((0,), (2,), (1,)))
            ),
            Rule(f"{experts}linear_fc2.bias", f"{names}down_proj_bias"),
        ]
