"""The sequential index loops, compiled by numba (extra `data`) when they are long.

numba is imported on first use and is never needed: the plain paths beside each call give the same
arrays, bit for bit, and are tested against these. Importing and compiling takes about a second,
half of it when numba finds its own cache, so that short loops are left to the plain paths.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

COMPILED_FROM = 100_000
"""Steps of the inner loop from which on the compiled path is taken."""


class Kernels(NamedTuple):
    """The compiled loops."""

    draw: Callable[..., None]
    """`draw_sources`."""
    cut: Callable[..., None]
    """`cut_stream`."""


@functools.cache
def kernels() -> Kernels | None:
    """Returns the compiled loops, None without numba."""
    try:
        import numba
    except ImportError:
        return None
    # nnan, nsz: there is no NaN, and the sign of a zero does not matter. They let the maximum use
    # vector instructions; sums and products stay exactly those of float64.
    draw = {"nogil": True, "fastmath": {"nnan", "nsz"}}
    try:
        return Kernels(
            numba.njit(cache=True, **draw)(draw_sources),
            numba.njit(cache=True, nogil=True)(cut_stream),
        )
    except RuntimeError:  # no folder that numba could keep its cache in
        return Kernels(numba.njit(**draw)(draw_sources), numba.njit(nogil=True)(cut_stream))


def draw_sources(
    shares: NDArray[np.float64],
    ends: NDArray[np.float64],
    labels: NDArray[np.integer],
    chosen: NDArray[np.integer],
    number: NDArray[np.int64],
) -> None:
    """Draws `len(chosen)` samples: each from the source that is furthest behind its share.

    Args:
        shares: of the sources, summing to 1, (sources,).
        ends: draws after which a source is used up, infinite for never, (sources,).
        labels: what is written for each source, (sources,).
        chosen: result, the label of each sample's source.
        number: result, the running number within the source.
    """
    sources = len(shares)
    counts = np.zeros(sources, np.float64)  # infinite when used up
    behind = np.empty(sources, np.float64)
    for sample in range(len(chosen)):
        scale = float(max(sample, 1))
        furthest = -np.inf
        for source in range(sources):
            behind[source] = shares[source] * scale - counts[source]
            furthest = max(furthest, behind[source])
        best = 0
        while behind[best] != furthest:
            best += 1
        chosen[sample] = labels[best]
        number[sample] = np.int64(counts[best])
        counts[best] += 1.0
        if counts[best] == ends[best]:
            counts[best] = np.inf


def cut_stream(
    lengths: NDArray[np.int32],
    document_index: NDArray[np.int32],
    seq_length: int,
    extra: int,
    rows: NDArray[np.integer],
) -> None:
    """Fills rows 1 and on of a sample index with the positions at which windows of `seq_length`
    tokens end.

    Args:
        lengths: tokens in each sequence of the corpus.
        document_index: sequence numbers in stream order.
        seq_length: tokens a sample.
        extra: tokens that a sample shares with the next.
        rows: result, (samples + 1, 2), for as many samples as are full.
    """
    end, row, samples = 0, 1, len(rows) - 1
    stop = seq_length + extra  # stream position that sample `row` reaches
    for position in range(len(document_index)):
        begin = end
        end += lengths[document_index[position]]
        while stop <= end and row <= samples:
            rows[row, 0] = position
            rows[row, 1] = stop - extra - begin
            row += 1
            stop += seq_length
