"""Gemma 3, its language model: Gemma 2 with norms on query and key heads, five sliding layers for
each full one, and rotary frequencies of their own for these.

transformers: `models/gemma3/configuration_gemma3.py`, `modeling_gemma3.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from megatron_lightning.bridge.hf.gemma2 import Gemma2Family
from megatron_lightning.bridge.hf.llama import head_norms
from megatron_lightning.bridge.hf.windows import pattern_of, typed_windows
from megatron_lightning.bridge.mapping import Rule
from megatron_lightning.bridge.source_config import SourceConfig
from megatron_lightning.config.model import GPTConfig
from megatron_lightning.config.rotary import RotaryConfig


class Gemma3TextFamily(Gemma2Family):
    """See the module."""

    model_type: ClassVar[str] = "gemma3_text"
    architecture: ClassVar[str] = "Gemma3ForCausalLM"

    def own(self, source: SourceConfig) -> dict[str, Any]:
        """Norms on heads besides."""
        return {**super().own(source), "qk_layernorm": True}

    def windows(self, source: SourceConfig) -> dict[str, Any]:
        """By `layer_types`, or the period that the file names."""
        names = ("sliding_window_pattern", "_sliding_window_pattern")
        period = next((n for name in names if (n := source.get(name)) is not None), None)
        source.get(names[1])
        if source.get("layer_types") is None and not isinstance(period, int):
            raise source.refuse("layer_types", "missing, and there is no sliding_window_pattern")
        layers = source.need("num_hidden_layers")
        return typed_windows(source, pattern_of(period or 1, layers))

    def rotary(self, source: SourceConfig) -> RotaryConfig:
        """That of full layers."""
        return source.rope("full_attention")

    def local_rotary(self, source: SourceConfig) -> RotaryConfig:
        """That of sliding layers: never stretched in the older spelling."""
        base = source.number("rope_local_base_freq")
        if source.tells_ropes_apart():
            return source.rope("sliding_attention")
        if base is None:
            base = source.need("rope_local_base_freq", (int, float))
        return RotaryConfig(base=float(base))

    def write_own(self, config: GPTConfig) -> dict[str, Any]:
        """In the older spelling, which newer readers know too."""
        local = config.attention.local_rotary or config.rotary
        return {**super().write_own(config), "rope_local_base_freq": local.base}

    def rules(self, config: GPTConfig) -> Sequence[Rule]:
        """Those of Gemma 2 and two norms."""
        return [*super().rules(config), *head_norms()]
