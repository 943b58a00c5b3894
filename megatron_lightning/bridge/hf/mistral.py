"""Mistral: Llama without biases and with a sliding window in every layer, or none.

transformers: `models/mistral/configuration_mistral.py`, `modeling_mistral.py`.
"""

from __future__ import annotations

from typing import Any, ClassVar

from megatron_lightning.bridge.hf.llama import LlamaFamily, one_window, write_one_window
from megatron_lightning.bridge.source_config import SourceConfig
from megatron_lightning.config.model import GPTConfig


class MistralFamily(LlamaFamily):
    """See the module."""

    model_type: ClassVar[str] = "mistral"
    architecture: ClassVar[str] = "MistralForCausalLM"
    derives_groups: ClassVar[bool] = False

    def own(self, source: SourceConfig) -> dict[str, Any]:
        """The window."""
        return one_window(source)

    def write_own(self, config: GPTConfig) -> dict[str, Any]:
        """The window."""
        return write_one_window(config)
