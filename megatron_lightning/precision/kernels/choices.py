"""How much a program of a kernel works on, by how many warps: what only a measurement can tell.

`benchmarks/fp8_casts.py` times these and others on a GPU, and prints which are best there. These
are those of an H200.
"""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Tiles:
    """Of kernels that write a matrix and its transpose."""

    height: int
    """Rows that one program casts."""
    width: int
    """Columns that one program casts."""
    warps: int
    """Of 32 threads each."""


@dataclass(frozen=True, kw_only=True)
class Spans:
    """Of kernels that find the largest value of what they pass over."""

    block: int
    """Numbers that a program works on at a time."""
    warps: int
    """Of 32 threads each."""
    programs: int
    """They share out all numbers; each finds one largest value."""


CAST = Tiles(height=64, width=128, warps=4)
"""Of matrices in memory."""
LARGEST = Spans(block=4096, warps=8, programs=528)
"""Of a search for the largest value of a matrix in memory: 4 programs for each of 132
multiprocessors."""
GATE_CAST = Tiles(height=64, width=64, warps=4)
"""Of the gradient of what enters a gated MLP's unit, cast as it is computed."""
GATE_LARGEST = Spans(block=1024, warps=4, programs=8448)
"""Of the pass that finds that gradient's largest value: 64 programs for each multiprocessor."""
