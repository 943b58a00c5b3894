"""Qwen2 and Qwen2.5: Llama with biases on queries, keys and values, and windows in upper layers.

transformers: `models/qwen2/configuration_qwen2.py`, `modeling_qwen2.py`.
"""

from __future__ import annotations

from typing import Any, ClassVar

from megatron_lightning.bridge.hf.llama import LlamaFamily
from megatron_lightning.bridge.source_config import SourceConfig
from megatron_lightning.config.model import GPTConfig

_LETTERS = {"full_attention": "F", "sliding_attention": "S"}


class Qwen2Family(LlamaFamily):
    """See the module."""

    model_type: ClassVar[str] = "qwen2"
    architecture: ClassVar[str] = "Qwen2ForCausalLM"
    derives_groups: ClassVar[bool] = False

    def own(self, source: SourceConfig) -> dict[str, Any]:
        """Biases and windows."""
        return {"add_qkv_bias": True, **layer_windows(source)}

    def write_own(self, config: GPTConfig) -> dict[str, Any]:
        """Windows."""
        return write_layer_windows(config)


def layer_windows(source: SourceConfig) -> dict[str, Any]:
    """Windows by `layer_types`, or of the layers from `max_window_layers` on."""
    used, window = source.flag("use_sliding_window", False), source.number("sliding_window")
    first, types = source.number("max_window_layers"), source.get("layer_types")
    layers = source.need("num_hidden_layers")
    if not used or window is None:
        if types is not None and "sliding_attention" in types:
            raise source.refuse("layer_types", "sliding layers without use_sliding_window")
        return {"window_size": 0, "window_pattern": "S"}
    if types is None:
        first = source.need("max_window_layers")
        types = ["full_attention" if i < first else "sliding_attention" for i in range(layers)]
    unknown = sorted(set(types) - set(_LETTERS))
    if unknown or len(types) != layers:
        raise source.refuse("layer_types", f"one of {sorted(_LETTERS)} for each layer is supported")
    return {"window_size": window, "window_pattern": "".join(_LETTERS[kind] for kind in types)}


def write_layer_windows(config: GPTConfig) -> dict[str, Any]:
    """The counterpart of `layer_windows`: by `max_window_layers` if that is enough, since older
    readers know nothing else, and by `layer_types`.
    """
    windows = [config.window_of(layer) for layer in range(config.num_layers)]
    full = next((i for i, window in enumerate(windows) if window), config.num_layers)
    sliding = max(windows)
    return {
        "use_sliding_window": bool(sliding),
        "sliding_window": sliding or None,
        "max_window_layers": full,
        "layer_types": ["sliding_attention" if w else "full_attention" for w in windows],
    }
