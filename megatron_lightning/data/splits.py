"""Split strings such as "969,30,1": which sequences are for training, validation and testing.

Megatron-Core's arithmetic: the numbers found in the string are padded with zeros to three and
normalised; each split is a run of consecutive sequences between rounded cumulative shares. Training
data is therefore a prefix of the corpus, and nothing is shuffled across splits.
"""

import math
import re
from collections.abc import Sequence
from typing import Literal, NamedTuple

DEFAULT_SPLIT = "969,30,1"
Part = Literal["train", "valid", "test"]


class Splits(NamedTuple):
    """Run of sequences of each split."""

    train: range
    valid: range
    test: range


def parse_split(split: str) -> tuple[float, float, float]:
    """Returns the shares of train, valid and test, summing to 1.

    Raises:
        ValueError: no number, more than three, something that is no number, or a sum of zero.
    """
    words = re.findall(r"[.0-9]+", split)
    try:
        numbers = [float(word) for word in words]
    except ValueError:
        numbers = []
    total = math.fsum(numbers)
    if not 1 <= len(numbers) <= 3 or total <= 0 or "-" in split:
        raise ValueError(
            f'split="{split}" must be one to three non-negative numbers for train, valid and test '
            "with "
            'a positive sum, such as "969,30,1"'
        )
    train, valid, test = (number / total for number in [*numbers, 0.0, 0.0][:3])
    return train, valid, test


def split_ranges(split: str, count: int) -> Splits:
    """Returns the runs of `count` elements (sequences) that belong to train, valid and test.

    Raises:
        ValueError: see `parse_split`.
    """
    return Splits(*_runs(parse_split(split), count))


def share_ranges(shares: Sequence[float], count: int) -> list[range]:
    """Returns runs of `count` elements in proportion to any number of shares, by the same
    arithmetic.

    Raises:
        ValueError: no share, a negative or infinite one, or a sum of zero.
    """
    total = math.fsum(shares)
    if not all(math.isfinite(share) and share >= 0 for share in shares) or total <= 0:
        raise ValueError(f"shares={list(shares)} must be finite, not negative, with a positive sum")
    return _runs([share / total for share in shares], count)


def _runs(shares: Sequence[float], count: int) -> list[range]:
    edges, end = [0], 0.0
    for share in shares:
        end += share
        edges.append(int(round(end * float(count))))
    return [range(low, high) for low, high in zip(edges, edges[1:], strict=False)]
