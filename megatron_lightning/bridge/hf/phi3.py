"""Phi-3 and Phi-4: Llama with queries, keys and values in one tensor, and both halves of the MLP.

transformers: `models/phi3/configuration_phi3.py`, `modeling_phi3.py`.
"""

from __future__ import annotations

from typing import Any, ClassVar

from megatron_lightning.bridge.hf.llama import LlamaFamily, one_window, write_one_window
from megatron_lightning.bridge.mapping import Fused, PackedQKV, Rule, Stacked
from megatron_lightning.bridge.source_config import SourceConfig
from megatron_lightning.config.model import GPTConfig


class Phi3Family(LlamaFamily):
    """See the module."""

    model_type: ClassVar[str] = "phi3"
    architecture: ClassVar[str] = "Phi3ForCausalLM"
    rotates_part: ClassVar[bool] = True

    def own(self, source: SourceConfig) -> dict[str, Any]:
        """The window, and dropout."""
        source.only("attention_bias", (False,), "a bias on attention alone")
        source.get("original_max_position_embeddings")  # for kinds of rope that need it
        embedding = source.number("embd_pdrop", 0.0)
        residual = source.number("resid_pdrop", 0.0)
        if embedding != residual:
            raise source.refuse("embd_pdrop", f"must equal resid_pdrop={residual}")
        return {**one_window(source), "hidden_dropout": residual}

    def write_own(self, config: GPTConfig) -> dict[str, Any]:
        """The window, and dropout."""
        dropout = config.hidden_dropout
        return {**write_one_window(config), "embd_pdrop": dropout, "resid_pdrop": dropout}

    def joined(self, config: GPTConfig, ours: str, theirs: str, kind: str) -> list[Rule]:
        """The projections that are one tensor on both sides, in different orders."""
        return [
            Rule(
                f"{ours}self_attention.linear_qkv.{kind}",
                f"{theirs}self_attn.qkv_proj.{kind}",
                Fused(PackedQKV.of(config)),
            ),
            Rule(
                f"{ours}mlp.linear_fc1.{kind}",
                f"{theirs}mlp.gate_up_proj.{kind}",
                Fused(Stacked(2)),
            ),
        ]
