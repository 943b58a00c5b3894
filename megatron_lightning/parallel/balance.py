"""Cuts a row of costs into contiguous parts so that the dearest part is as cheap as possible.

The classical linear partition problem: the smallest possible maximum is found by bisection over the
sums of all segments with a greedy test; among all cuts that reach it, dynamic programming takes the
most even one.
"""

from bisect import bisect_left
from collections.abc import Sequence
from itertools import accumulate

_TOLERANCE = (
    1e-9  # sums of costs that differ by less are equal (costs are scaled to a largest of 1)
)


def cut_evenly(
    costs: Sequence[float], parts: int, counts: Sequence[int] | None = None
) -> list[int]:
    """Sizes (at least 1) of ``parts`` contiguous parts of ``costs``; there must be enough of them.

    Minimises the largest part's cost, then the sum of squares. Ties: numbers of items as equal as
    possible, where an item counts as ``counts`` says (default: all as 1), then more in earlier
    parts.
    """
    assert 1 <= parts <= len(costs)
    assert min(costs) >= 0
    scale = max(costs) or 1.0
    prefix = [0.0, *accumulate(cost / scale for cost in costs)]
    numbers = [0, *accumulate([1] * len(costs) if counts is None else counts)]
    return _most_even(prefix, numbers, parts, _smallest_maximum(prefix, parts))


def _smallest_maximum(prefix: Sequence[float], parts: int) -> float:
    count = len(prefix)
    sums = sorted({prefix[j] - prefix[i] for i in range(count) for j in range(i + 1, count)})
    return sums[bisect_left(sums, True, key=lambda limit: _fits(prefix, parts, limit))]


def _fits(prefix: Sequence[float], parts: int, limit: float) -> bool:
    """Whether at most ``parts`` parts can keep within ``limit`` (finer cuts then do, too)."""
    start, used = 0, 1
    for end in range(1, len(prefix)):
        if prefix[end] - prefix[end - 1] > limit + _TOLERANCE:
            return False
        if prefix[end] - prefix[start] > limit + _TOLERANCE:
            start, used = end - 1, used + 1
    return used <= parts


def _most_even(
    prefix: Sequence[float], numbers: Sequence[int], parts: int, limit: float
) -> list[int]:
    """Dynamic programming; ``best[end]``: squares of costs and of numbers, and the negated sizes,
    of the parts so far, which reach ``end``.
    """
    count = len(prefix) - 1
    best: dict[int, tuple[float, int, list[int]]] = {0: (0.0, 0, [])}
    for part in range(parts):
        extended: dict[int, tuple[float, int, list[int]]] = {}
        for end in range(part + 1, count - (parts - part - 1) + 1):
            for start in range(end - 1, part - 1, -1):
                cost = prefix[end] - prefix[start]
                if cost > limit + _TOLERANCE:
                    break
                if start not in best:
                    continue
                squares, even, sizes = best[start]
                even += (numbers[end] - numbers[start]) ** 2
                found = (round(squares + cost * cost, 9), even, [*sizes, start - end])
                if end not in extended or found < extended[end]:
                    extended[end] = found
        best = extended
    return [-size for size in best[count][2]]
