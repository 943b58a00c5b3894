"""Settings of FP8 casts and searches that `fp8_casts.py` compares, and which of them are best."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from megatron_lightning.precision.kernels import choices
from megatron_lightning.precision.kernels.choices import Spans, Tiles

COMPILED = "compiled code, of each row"
"""The name of what is compared with settings of searches."""
PASSES = {"a": 32, "b": 16}
"""Layers times micro-batches of a step."""
MATRICES = {
    "a": {
        "o and fc2 gradient, qkv, o and fc1 input": (16384, 2048, 5),
        "qkv gradient": (16384, 3072, 1),
        "fc1 gradient": (16384, 16384, 1),
        "fc2 input": (16384, 8192, 1),
    },
    "b": {
        "o and fc2 gradient, qkv, o and fc1 input": (8192, 4096, 5),
        "qkv gradient": (8192, 6144, 1),
        "fc1 gradient": (8192, 28672, 1),
        "fc2 input": (8192, 14336, 1),
    },
}
"""Rows and columns of what is cast, and how often in a layer's forward and backward pass."""
FOREIGN = {"a": {(16384, 2048): 2, (16384, 3072): 1}, "b": {(8192, 4096): 2, (8192, 6144): 1}}
"""Of these, what compiled code doesn't write: attention's output, gradients of qkv and fc2."""
GATES = {"a": (16384, 8192), "b": (8192, 14336)}
"""Rows and width of the gradient of SwiGLU's product."""
TINY = {"tiny": {"a matrix": (64, 128, 1), "another": (48, 256, 1)}}

PLAIN = Tiles(height=64, width=128, warps=4, words=False)
"""Of a cast whose results the others must give."""


def unique(settings: Iterable[Any]) -> list[Any]:
    """Each once, in order."""
    return list(dict.fromkeys(settings))


# Present choices come first, then those that the kernels began with, which may be the same.
CASTS: list[Tiles] = unique(
    [
        choices.CAST,
        PLAIN,
        *(
            Tiles(height=height, width=width, warps=warps, words=True)
            for height, width, warps in (
                (64, 128, 4),
                (128, 64, 4),
                (64, 128, 8),
                (128, 128, 8),
                (64, 64, 4),
                (128, 64, 8),
                (32, 128, 4),
            )
        ),
        replace(PLAIN, words=True, by_columns=False, backwards=False),
        replace(PLAIN, height=128, width=128, warps=8),
        replace(PLAIN, height=64, width=64),
    ]
)
GATE_CASTS: list[Tiles] = unique(
    [
        choices.GATE_CAST,
        *(
            Tiles(height=height, width=width, warps=warps, words=words)
            for height, width, warps, words in (
                (64, 64, 4, False),
                (64, 64, 4, True),
                (64, 64, 8, True),
                (64, 128, 8, True),
                (128, 64, 8, True),
                (64, 64, 8, False),
                (64, 128, 8, False),
            )
        ),
    ]
)
GATE_SPANS: list[Spans] = unique(
    [
        choices.GATE_LARGEST,
        Spans(block=1024, warps=4, programs=2112),
        Spans(block=1024, warps=4, programs=8448),
        Spans(block=2048, warps=4, programs=1056),
        Spans(block=2048, warps=8, programs=1056),
    ]
)
SPANS: list[Spans] = unique(
    [
        choices.LARGEST,
        Spans(block=8192, warps=8, programs=1024),
        Spans(block=4096, warps=8, programs=1056),
        Spans(block=4096, warps=8, programs=528),
        Spans(block=2048, warps=4, programs=2112),
        Spans(block=8192, warps=16, programs=264),
    ]
)


def name_of(setting: Any) -> str:
    """A setting in few letters."""
    if isinstance(setting, Spans):
        return f"{setting.block} x {setting.programs}, {setting.warps} warps"
    if not isinstance(setting, Tiles):
        return str(setting)
    told = f"{setting.height} x {setting.width}, {setting.warps} warps"
    told += ", words" if setting.words else ""
    if (setting.by_columns, setting.backwards) != (True, True):
        told += f", by columns {setting.by_columns}, backwards {setting.backwards}"
    return told


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
    passes = PASSES.get(shape, 1)
    best, saved = best_over(found["casts"], CASTS, passes)
    if found["weights"]:
        yield f"CAST = {best}  # {saved:+.2f} ms a step less"
    else:
        yield f"CAST = {PLAIN}  # weights cast together are WRONG with {name_of(best)}"
    best, saved = best_over(found["searches"], SPANS, passes)
    yield f"LARGEST = {best}  # {saved:+.2f} ms a step less, were all searched so"
    name = name_of(best)
    rows = list(found["searches"].values())
    if all(COMPILED in row["times"] and name in row["times"] for row in rows):
        saved = sum((row["times"][COMPILED] - row["times"][name]) * row["count"] for row in rows)
        yield f"SEARCHES_FOREIGN = {saved > 0}  # {saved * passes:+.2f} ms a step less"
    gate = found["gates"]
    if "whole" not in gate:
        yield "GATE_CASTS = False  # casts of what is computed are WRONG"
        return
    of_parts, of_casts = gate["largest"], gate["cast"]
    saved = (gate["whole"]["written"] - gate["whole"]["cast as it is computed"]) * passes
    yield f"GATE_CASTS = {saved > 0}  # {saved:+.2f} ms a step less"
    tiles = next(
        each for each in GATE_CASTS if name_of(each) == min(of_casts, key=of_casts.__getitem__)
    )
    spans = next(
        each for each in GATE_SPANS if name_of(each) == min(of_parts, key=of_parts.__getitem__)
    )
    yield f"GATE_CAST = {tiles}"
    yield f"GATE_LARGEST = {spans}"


def write(lines: Iterable[str], path: Path) -> None:
    """Put lines of settings into their file."""
    text = path.read_text()
    for line in lines:
        name, value = line.split("  #")[0].split(" = ", 1)
        text, count = re.subn(rf"^{name} = .*$", f"{name} = {value}", text, flags=re.MULTILINE)
        assert count == 1, name
    path.write_text(text)
