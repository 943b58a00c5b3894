"""The sequential loops of the sentence index, compiled by numba (extra `data`) when they are long.

numba is imported on first use and is never needed: the plain paths give the same arrays.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray


class Loops(NamedTuple):
    """The compiled loops."""

    cut: Callable[..., tuple[int, int]]
    """`cut_documents`."""
    swap: Callable[..., None]
    """`swap_from_end`."""


@functools.cache
def loops() -> Loops | None:
    """Returns the compiled loops, None without numba."""
    try:
        import numba
    except ImportError:
        return None
    try:
        compiler = numba.njit(cache=True, nogil=True)
        return Loops(compiler(cut_documents), compiler(swap_from_end))
    except RuntimeError:  # no folder that numba could keep its cache in
        compiler = numba.njit(nogil=True)
        return Loops(compiler(cut_documents), compiler(swap_from_end))


def cut_documents(
    begins: NDArray[np.int64],
    ends: NDArray[np.int64],
    lengths: NDArray[np.int32],
    min_sentences: int,
    targets: NDArray[np.int64],
    rows: NDArray[np.int64],
) -> tuple[int, int]:
    """Fills `rows` with first sentence, end and target length of the samples of documents, and
    returns how many rows and how many targets were used.

    Args:
        begins: first sentence of each document.
        ends: end of each document.
        lengths: tokens in each sentence.
        min_sentences: sentences of a sample.
        targets: target lengths in the order in which they are used, enough of them.
        rows: result, (enough, 3).
    """
    row, used = 0, 0
    for document in range(len(begins)):
        first, end = begins[document], ends[document]
        tokens = np.int64(0)
        target = targets[used]
        used += 1
        for sentence in range(first, end):
            tokens += lengths[sentence]
            left, taken = end - sentence - 1, sentence + 1 - first
            if left == 0 or (tokens >= target and left > 1 and taken >= min_sentences):
                rows[row, 0] = first
                rows[row, 1] = sentence + 1
                rows[row, 2] = target
                row += 1
                first, tokens = sentence + 1, np.int64(0)
                target = targets[used]
                used += 1
    return row, used


def swap_from_end(order: NDArray[np.int64], others: NDArray[np.int64]) -> None:
    """Exchanges the last element, then the one before it and so on, with those at `others`.

    Args:
        order: changed in place, (N,).
        others: (N - 1,).
    """
    for number in range(len(others)):
        last, other = len(order) - 1 - number, others[number]
        order[last], order[other] = order[other], order[last]
