"""Settings of FP8 casts and searches that `fp8_casts.py` compares, and which of them are best."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

from megatron_lightning.precision.kernels import choices
from megatron_lightning.precision.kernels.choices import Spans, Tiles

PASSES = {"a": 32, "b": 16}
"""Layers times micro-batches of a step."""
MATRICES = {
    "a": {
        "o and fc2 gradient, qkv, o and fc1 input": (16384, 2048, 5),
        "qkv gradient": (16384, 3072, 1),
        "fc2 input": (16384, 8192, 1),
    },
    "b": {
        "o and fc2 gradient, qkv, o and fc1 input": (8192, 4096, 5),
        "qkv gradient": (8192, 6144, 1),
        "fc2 input": (8192, 14336, 1),
    },
    "tiny": {"a matrix": (64, 128, 1), "another": (48, 256, 1)},
}
"""Rows and columns of what is cast, and how often in a layer's forward and backward pass."""
FOREIGN = {
    "a": {"fc2 gradient, o input": (16384, 2048, 2), "qkv gradient": (16384, 3072, 1)},
    "b": {"fc2 gradient, o input": (8192, 4096, 2), "qkv gradient": (8192, 6144, 1)},
    "tiny": {"a matrix": (64, 128, 1)},
}
"""Of these, what compiled code doesn't write, so that it is searched."""
GATES = {"a": (16384, 8192), "b": (8192, 14336), "tiny": (48, 128)}
"""Rows and width of the gradient of SwiGLU's product."""


def tiles(*sizes: tuple[int, int, int]) -> list[Tiles]:
    """Of (height, width, warps)."""
    return [Tiles(height=height, width=width, warps=warps) for height, width, warps in sizes]


def spans(*sizes: tuple[int, int, int]) -> list[Spans]:
    """Of (block, programs, warps)."""
    return [Spans(block=block, programs=programs, warps=warps) for block, programs, warps in sizes]


_OTHERS: dict[str, list[Any]] = {
    "CAST": tiles(
        (64, 128, 4), (128, 128, 8), (64, 64, 4), (64, 128, 8), (128, 64, 4), (32, 128, 4)
    ),
    "LARGEST": spans(
        (4096, 528, 8), (8192, 1024, 8), (4096, 1056, 8), (2048, 2112, 4), (8192, 264, 16)
    ),
    "GATE_CAST": tiles((64, 64, 4), (64, 64, 8), (64, 128, 8), (32, 64, 4), (32, 128, 4)),
    "GATE_LARGEST": spans(
        (1024, 8448, 4), (1024, 2112, 4), (2048, 1056, 4), (2048, 1056, 8), (1024, 16896, 4)
    ),
}
SETTINGS: dict[str, list[Any]] = {
    name: list(dict.fromkeys([getattr(choices, name), *others])) for name, others in _OTHERS.items()
}
"""Of each name in `choices.py`, the present one first."""


def name_of(setting: Tiles | Spans) -> str:
    """A setting in few letters."""
    if isinstance(setting, Spans):
        return f"{setting.block} x {setting.programs}, {setting.warps} warps"
    return f"{setting.height} x {setting.width}, {setting.warps} warps"


def best_over(rows: Mapping[str, Any], settings: list[Any], passes: int) -> tuple[Any, float]:
    """The setting that is best over a step, and the milliseconds that it saves: not a number if the
    present one is wrong. ValueError if none was timed in every row.
    """
    sums = {}
    for setting in settings:
        name = name_of(setting)
        if all(name in row["times"] for row in rows.values()):
            sums[name] = sum(row["times"][name] * row["count"] for row in rows.values()) * passes
    if not sums:
        raise ValueError(f"none of {len(settings)} settings was timed in all rows: more --seconds")
    name = min(sums, key=sums.__getitem__)
    best = next(each for each in settings if name_of(each) == name)
    return best, sums.get(name_of(settings[0]), math.nan) - sums[name]


def advice(shape: str, found: Mapping[str, Any]) -> Iterator[str]:
    """Lines of `choices.py` that are best for a shape, and what they save of a step."""
    for name, settings in SETTINGS.items():
        best, saved = best_over(found[name], settings, PASSES.get(shape, 1))
        yield f"{name} = {best}  # {saved:+.2f} ms a step less"
