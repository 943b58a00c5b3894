"""Which documents share a sample: first-fit decreasing, in order, or one each.

First-fit decreasing (D. S. Johnson, 1973) takes the documents from the longest to the shortest,
ties in the order of the data, and puts each into the first pack that still has room; it needs at
most 11/9 of the best possible number of packs, plus one. Documents of one length are placed
together: the packs that can take one are found from left to right in a tree of free space whose
nodes hold the largest of 64 children, and each is filled with as many as it takes, which is what
placing them one by one gives. So a length that n documents share costs O(n log packs) array
elements and a dozen numpy calls.
"""

from collections.abc import Callable
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

Packing = Literal["first_fit_decreasing", "in_order", "none"]
PACKINGS: tuple[Packing, ...] = ("first_fit_decreasing", "in_order", "none")

_WIDTH = 64  # children of a node


class Packs(NamedTuple):
    """Documents of each pack: pack p holds `documents[offsets[p] : offsets[p + 1]]`, in that
    order.
    """

    documents: NDArray[np.int64]
    """(documents,) their numbers."""
    offsets: NDArray[np.int64]
    """(packs + 1,)"""


def pack(lengths: NDArray[np.integer], capacity: int, how: Packing) -> Packs:
    """Deals documents of `lengths` (documents,) tokens to packs of at most `capacity` tokens.

    Each document is in exactly one pack; the result depends on the arguments alone.

    Raises:
        ValueError: a document is empty or longer than a pack, or `how` is unknown.
    """
    if how not in _METHODS:
        raise ValueError(f"packing={how!r} is unknown: choose one of {', '.join(_METHODS)}")
    lengths = np.asarray(lengths, np.int64)
    if len(lengths) and not 0 < lengths.min() <= lengths.max() <= capacity:
        wrong = lengths.max() if lengths.max() > capacity else lengths.min()
        raise ValueError(
            f"a document of {wrong} tokens doesn't fit a pack of {capacity}: truncate or leave out "
            "such documents first"
        )
    return _METHODS[how](lengths, capacity)


def _first_fit_decreasing(lengths: NDArray[np.int64], capacity: int) -> Packs:
    order = np.argsort(-lengths, kind="stable")
    # Any two packs together hold more than one pack's worth, which bounds their number.
    tree = _FreeSpace(2 * int(lengths.sum()) // max(capacity, 1) + 1)
    place = np.empty(len(lengths), np.int64)  # pack of each document, in `order`
    sizes, counts = np.unique(lengths, return_counts=True)
    done = 0
    for size, count in zip(sizes[::-1].tolist(), counts[::-1].tolist(), strict=True):
        filled = tree.fill(size, count)
        place[done : done + len(filled)] = filled
        new = tree.open(capacity, size, count - len(filled))
        place[done + len(filled) : done + count] = new
        done += count
    by_pack = np.argsort(place, kind="stable")  # within a pack the longest comes first
    return Packs(order[by_pack], _offsets(np.bincount(place, minlength=tree.packs)))


class _FreeSpace:
    """Free tokens of every pack, as the lowest level of a tree of maxima."""

    def __init__(self, most_packs: int) -> None:
        self.packs = 0
        size = -(-max(most_packs, 1) // _WIDTH) * _WIDTH
        self._levels = [np.zeros(size, np.int64)]
        while size > _WIDTH:
            size = -(-(size // _WIDTH) // _WIDTH) * _WIDTH
            self._levels.append(np.zeros(size, np.int64))

    def fill(self, size: int, count: int) -> NDArray[np.int64]:
        """Places up to `count` documents of `size` tokens into open packs; the pack of each."""
        nodes = np.arange(len(self._levels[-1]), dtype=np.int64)
        for number, level in reversed(list(enumerate(self._levels))):
            nodes = nodes[level[nodes] >= size][:count]  # each leads to at least one pack
            if number:
                nodes = (nodes[:, None] * _WIDTH + np.arange(_WIDTH)).ravel()
        free = self._levels[0]
        before = np.cumsum(free[nodes] // size)
        nodes = nodes[: np.searchsorted(before, count) + 1]
        taken = np.diff(np.minimum(before[: len(nodes)], count), prepend=0)
        free[nodes] -= taken * size
        self._update(nodes)
        return np.repeat(nodes, taken)

    def open(self, capacity: int, size: int, count: int) -> NDArray[np.int64]:
        """Places `count` documents of `size` tokens into new packs; the pack of each."""
        each = capacity // size
        new = np.arange(self.packs, self.packs - (-count // each), dtype=np.int64)
        self.packs += len(new)
        places = np.repeat(new, each)[:count]
        np.add.at(self._levels[0], new, capacity)
        np.subtract.at(self._levels[0], places, size)
        self._update(new)
        return places

    def _update(self, nodes: NDArray[np.int64]) -> None:
        for low, high in zip(self._levels, self._levels[1:], strict=False):
            nodes = np.unique(nodes // _WIDTH)
            high[nodes] = low.reshape(-1, _WIDTH)[nodes].max(axis=1)


def _in_order(lengths: NDArray[np.int64], capacity: int) -> Packs:
    """Closes a pack when the next document doesn't fit; the order of the data is kept."""
    ends = np.cumsum(lengths)
    offsets, begin = [0], 0
    while offsets[-1] < len(lengths):
        offsets.append(int(np.searchsorted(ends, begin + capacity, side="right")))
        begin = int(ends[offsets[-1] - 1])
    return Packs(np.arange(len(lengths), dtype=np.int64), np.array(offsets, np.int64))


def _one_each(lengths: NDArray[np.int64], capacity: int) -> Packs:
    numbers = np.arange(len(lengths) + 1, dtype=np.int64)
    return Packs(numbers[:-1], numbers)


def _offsets(counts: NDArray[np.integer]) -> NDArray[np.int64]:
    return np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)


_METHODS: dict[str, Callable[[NDArray[np.int64], int], Packs]] = {
    "first_fit_decreasing": _first_fit_decreasing,
    "in_order": _in_order,
    "none": _one_each,
}
