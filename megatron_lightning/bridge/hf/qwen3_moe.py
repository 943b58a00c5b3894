"""Qwen3 with experts in all layers or in some.

transformers: `models/qwen3_moe/configuration_qwen3_moe.py`, `modeling_qwen3_moe.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from megatron_lightning.bridge.hf.experts import (
    balancing,
    expert_rules,
    num_experts,
    write_balancing,
)
from megatron_lightning.bridge.hf.llama import LlamaFamily, head_norms, one_window, write_one_window
from megatron_lightning.bridge.mapping import Rule
from megatron_lightning.bridge.source_config import SourceConfig
from megatron_lightning.config.model import GPTConfig
from megatron_lightning.config.moe import MoEConfig, expert_width


class Qwen3MoeFamily(LlamaFamily):
    """See the module."""

    model_type: ClassVar[str] = "qwen3_moe"
    architecture: ClassVar[str] = "Qwen3MoeForCausalLM"
    derives_groups: ClassVar[bool] = False
    derives_head_dim: ClassVar[bool] = False

    def own(self, source: SourceConfig) -> dict[str, Any]:
        """Norms, windows and experts."""
        source.only("attention_bias", (False,), "a bias on all of attention and none on the MLP")
        source.get("max_window_layers")  # of no effect in this architecture
        balancing(source)
        normalise = source.flag("norm_topk_prob", False)
        moe = MoEConfig(
            num_experts=num_experts(source, "num_experts", "num_local_experts"),
            router_topk=source.need("num_experts_per_tok"),
            ffn_hidden_size=source.need("moe_intermediate_size"),
            layer_pattern=self.pattern(source),
            router_pre_softmax=not normalise,  # over the chosen ones alone is the same as divided
            router_normalize_topk=normalise,
        )
        windows = one_window(source) if source.flag("use_sliding_window", False) else {}
        source.get("sliding_window")
        return {"qk_layernorm": True, "moe": moe, **windows}

    def pattern(self, source: SourceConfig) -> str:
        """Which layers have experts."""
        step, dense = source.need("decoder_sparse_step"), source.get("mlp_only_layers", [])
        layers = source.need("num_hidden_layers")
        sparse = ["E" if (i + 1) % step == 0 and i not in dense else "D" for i in range(layers)]
        return "E" if "D" not in sparse else "".join(sparse)

    def write_own(self, config: GPTConfig) -> dict[str, Any]:
        """Norms, windows and experts."""
        moe = config.moe
        if moe is None:
            return {}
        dense = [i for i in range(config.num_layers) if not config.is_moe_layer(i)]
        return {
            "attention_bias": False,
            **write_one_window(config),
            "use_sliding_window": bool(config.window_of(0)),
            **write_balancing(),
            "decoder_sparse_step": 1,
            "mlp_only_layers": dense,
            "moe_intermediate_size": expert_width(config),
            "norm_topk_prob": moe.router_normalize_topk,
            "num_experts": moe.num_experts,
            "num_experts_per_tok": moe.router_topk,
        }

    def rules(self, config: GPTConfig) -> Sequence[Rule]:
        """Those of Llama, norms on heads, and experts."""
        experts = expert_rules(config, "mlp", gate="gate_proj", up="up_proj", down="down_proj")
        return [*super().rules(config), *head_norms(), *experts]
