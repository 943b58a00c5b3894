"""Mixtral: Mistral with experts in place of the MLP.

transformers: `models/mixtral/configuration_mixtral.py`, `modeling_mixtral.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from megatron_lightning.bridge.hf.experts import balancing, expert_rules, write_balancing
from megatron_lightning.bridge.hf.mistral import MistralFamily
from megatron_lightning.bridge.mapping import Rule
from megatron_lightning.bridge.source_config import SourceConfig
from megatron_lightning.config.model import GPTConfig
from megatron_lightning.config.moe import MoEConfig, expert_width


class MixtralFamily(MistralFamily):
    """See the module."""

    model_type: ClassVar[str] = "mixtral"
    architecture: ClassVar[str] = "MixtralForCausalLM"

    def own(self, source: SourceConfig) -> dict[str, Any]:
        """The experts."""
        balancing(source)
        source.only("router_jitter_noise", (0.0,), "noise on what experts see")
        moe = MoEConfig(
            num_experts=source.need("num_local_experts"),
            router_topk=source.need("num_experts_per_tok"),
        )
        return {**super().own(source), "moe": moe}

    def write_own(self, config: GPTConfig) -> dict[str, Any]:
        """The experts."""
        if config.moe is None:
            return super().write_own(config)
        return {
            **super().write_own(config),
            **write_balancing(),
            "intermediate_size": expert_width(config),
            "num_local_experts": config.moe.num_experts,
            "num_experts_per_tok": config.moe.router_topk,
        }

    def rules(self, config: GPTConfig) -> Sequence[Rule]:
        """Those of Mistral and of the experts."""
        experts = expert_rules(config, "block_sparse_moe", gate="w1", up="w3", down="w2")
        return [*super().rules(config), *experts]
