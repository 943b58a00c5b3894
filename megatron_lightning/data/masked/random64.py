"""The 64-bit Mersenne twister of Matsumoto and Nishimura (mt19937-64) in numpy, which has only the
32-bit one. Megatron-Core's helpers shuffle with it (`std::mt19937_64`).
"""

import numpy as np
from numpy.typing import NDArray

from megatron_lightning.data.compiled import COMPILED_FROM
from megatron_lightning.data.masked.compiled import loops

_WORDS = 312
_MATRIX = np.uint64(0xB5026F5AA96619E9)
_UPPER, _LOWER = np.uint64(0xFFFFFFFF80000000), np.uint64(0x7FFFFFFF)
_ONE = np.uint64(1)
_RUNS = (  # words that are replaced, those after them, and those half a turn away
    (slice(0, 156), slice(1, 157), slice(156, 312)),
    (slice(156, 311), slice(157, 312), slice(0, 155)),
    (slice(311, 312), slice(0, 1), slice(155, 156)),
)


def twister64(seed: int, count: int) -> NDArray[np.uint64]:
    """Returns the first `count` numbers of the generator seeded with `seed`, (count,)."""
    state = _seed_state(seed % 2**64)
    blocks = []
    for _ in range(-(-count // _WORDS)):
        _advance(state)
        blocks.append(_temper(state))
    return np.concatenate(blocks)[:count] if blocks else np.zeros(0, np.uint64)


def shuffled_order(count: int, seed: int) -> NDArray[np.int64]:
    """Returns where a Fisher-Yates shuffle from the end, with `twister64(seed)` modulo the places
    left, takes its elements from; (count,).
    """
    left = np.arange(count, 1, -1, dtype=np.uint64)  # places to choose from, in each swap
    others = (twister64(seed, max(count - 1, 0)) % left).astype(np.int64)
    compiled = loops() if count >= COMPILED_FROM else None
    if compiled is not None:
        shuffled = np.arange(count)
        compiled.swap(shuffled, others)
        return shuffled
    order = list(range(count))
    for last, other in zip(range(count - 1, 0, -1), others.tolist(), strict=True):
        order[last], order[other] = order[other], order[last]
    return np.array(order, dtype=np.int64)


def _seed_state(seed: int) -> NDArray[np.uint64]:
    words = [seed]
    for number in range(1, _WORDS):
        mixed = words[-1] ^ (words[-1] >> 62)
        words.append((6364136223846793005 * mixed + number) % 2**64)
    return np.array(words, dtype=np.uint64)


def _advance(state: NDArray[np.uint64]) -> None:
    """Replaces the words by the next ones; in three runs, because the second and third read what
    the one before wrote.
    """
    for run, after, far in _RUNS:
        mixed = (state[run] & _UPPER) | (state[after] & _LOWER)
        twist = (mixed & _ONE) * _MATRIX
        state[run] = state[far] ^ (mixed >> _ONE) ^ twist


def _temper(state: NDArray[np.uint64]) -> NDArray[np.uint64]:
    words = state ^ ((state >> np.uint64(29)) & np.uint64(0x5555555555555555))
    words ^= (words << np.uint64(17)) & np.uint64(0x71D67FFFEDA60000)
    words ^= (words << np.uint64(37)) & np.uint64(0xFFF7EEE000000000)
    return words ^ (words >> np.uint64(43))
