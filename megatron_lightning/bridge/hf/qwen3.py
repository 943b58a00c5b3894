"""Qwen3: Llama with norms on query and key heads, and windows in upper layers.

transformers: `models/qwen3/configuration_qwen3.py`, `modeling_qwen3.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from megatron_lightning.bridge.hf.llama import LlamaFamily, head_norms
from megatron_lightning.bridge.hf.qwen2 import layer_windows, write_layer_windows
from megatron_lightning.bridge.mapping import Rule
from megatron_lightning.bridge.source_config import SourceConfig
from megatron_lightning.config.model import GPTConfig


class Qwen3Family(LlamaFamily):
    """See the module."""

    model_type: ClassVar[str] = "qwen3"
    architecture: ClassVar[str] = "Qwen3ForCausalLM"
    derives_groups: ClassVar[bool] = False
    derives_head_dim: ClassVar[bool] = False

    def own(self, source: SourceConfig) -> dict[str, Any]:
        """Norms and windows."""
        source.only("attention_bias", (False,), "a bias on all of attention and none on the MLP")
        return {"qk_layernorm": True, **layer_windows(source)}

    def write_own(self, config: GPTConfig) -> dict[str, Any]:
        """Windows."""
        return {"attention_bias": False, **write_layer_windows(config)}

    def rules(self, config: GPTConfig) -> Sequence[Rule]:
        """Those of Llama and two norms."""
        return [*super().rules(config), *head_norms()]
