"""Sliding windows as configs of transformers say them: by `layer_types`, or before 4.53 by a period
that the architecture knows.
"""

from __future__ import annotations

from typing import Any

from megatron_lightning.bridge.source_config import SourceConfig
from megatron_lightning.config.model import GPTConfig

_LETTERS = {"full_attention": "F", "sliding_attention": "S"}


def pattern_of(period: int, layers: int) -> list[str]:
    """Types of the layers, every `period`-th of which is full."""
    return [
        "sliding_attention" if (layer + 1) % period else "full_attention" for layer in range(layers)
    ]


def typed_windows(source: SourceConfig, types: list[str]) -> dict[str, Any]:
    """Windows by `layer_types`; `types` where the file has none."""
    types = source.get("layer_types", types)
    window, layers = source.number("sliding_window"), source.need("num_hidden_layers")
    if set(types) - set(_LETTERS) or len(types) != layers:
        raise source.refuse("layer_types", f"one of {sorted(_LETTERS)} for each layer is supported")
    pattern = "".join(_LETTERS[kind] for kind in types)
    if window is None and "S" in pattern:
        raise source.refuse("sliding_window", "there are sliding layers, so it must be a number")
    if "S" not in pattern:
        return {"window_size": 0, "window_pattern": "S"}
    return {"window_size": window, "window_pattern": pattern}


def write_typed_windows(config: GPTConfig) -> dict[str, Any]:
    """The counterpart of `typed_windows`."""
    windows = [config.window_of(layer) for layer in range(config.num_layers)]
    return {
        "sliding_window": max(windows) or None,
        "layer_types": ["sliding_attention" if w else "full_attention" for w in windows],
    }
