"""How much a program of a kernel works on, by how many warps: what only a measurement can tell.

`benchmarks/fp8_casts.py` times these and others on a GPU, and prints which are best there.
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
    words: bool
    """True: each value is cast once, and threads change words of four rows; False: threads change
    numbers of 16 bits, which are cast twice."""
    by_columns: bool = True
    """True: tiles beside each other are cast one after the other, else those below each other."""
    backwards: bool = True
    """From the last tile on, whose values have just been written, or searched for the largest."""


@dataclass(frozen=True, kw_only=True)
class Spans:
    """Of kernels that find the largest value of what they pass over."""

    block: int
    """Numbers that a program works on at a time."""
    warps: int
    """Of 32 threads each."""
    programs: int
    """They share out all numbers; each finds one largest value."""


CAST = Tiles(height=64, width=128, warps=4, words=False)
"""Of matrices in memory."""
LARGEST = Spans(block=8192, warps=8, programs=1024)
"""Of a search for the largest value of a matrix in memory."""
SEARCHES_FOREIGN = False
"""Whether what compiled code doesn't write is searched so for its largest value; else compiled code
finds that of each row, in a pass of its own too."""
GATE_CASTS = False
"""Whether a gated MLP casts the gradient of what enters its unit right where it computes it, and
computes it twice: once for the largest value, without writing it."""
GATE_CAST = Tiles(height=64, width=64, warps=4, words=False)
"""Of that gradient."""
GATE_LARGEST = Spans(block=1024, warps=4, programs=2112)
"""Of the pass that finds its largest value: 16 programs for each of 132 multiprocessors."""
