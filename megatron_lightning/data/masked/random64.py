"""The 64-bit Mersenne twister of Matsumoto and Nishimura (mt19937-64) in numpy, which has only the
32-bit one. Megatron-Core's helpers shuffle with it (`std::mt19937_64`).
"""

import numpy as np
from numpy.typing import NDArray

_WORDS, _SHIFT = 312, 156
_MATRIX = np.uint64(0xB5026F5AA96619E9)
_UPPER, _LOWER = np.uint64(0xFFFFFFFF80000000), np.uint64(0x7FFFFFFF)
_ONE = np.uint64(1)


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
    order = list(range(count))
    left = np.arange(count, 1, -1, dtype=np.uint64)  # places to choose from, in each swap
    swaps = (twister64(seed, max(count - 1, 0)) % left).tolist()
    for last, other in zip(range(count - 1, 0, -1), swaps, strict=True):
        order[last], order[other] = order[other], order[last]
    return np.array(order, dtype=np.int64)


def _seed_state(seed: int) -> NDArray[np.uint64]:
    words = [seed]
    for number in range(1, _WORDS):
        mixed = words[-1] ^ (words[-1] >> 62)
        words.append((6364136223846793005 * mixed + number) % 2**64)
    return np.array(words, dtype=np.uint64)


def _advance(state: NDArray[np.uint64]) -> None:
    """Replaces the words by the next ones; three runs, because the second reads what the first
    wrote.
    """
    for begin, end in ((0, _SHIFT), (_SHIFT, _WORDS - 1), (_WORDS - 1, _WORDS)):
        after = np.take(state, range(begin + 1, end + 1), mode="wrap")
        far = np.take(state, range(begin + _SHIFT, end + _SHIFT), mode="wrap")
        mixed = (state[begin:end] & _UPPER) | (after & _LOWER)
        state[begin:end] = far ^ (mixed >> _ONE) ^ np.where(mixed & _ONE, _MATRIX, np.uint64(0))


def _temper(state: NDArray[np.uint64]) -> NDArray[np.uint64]:
    words = state ^ ((state >> np.uint64(29)) & np.uint64(0x5555555555555555))
    words ^= (words << np.uint64(17)) & np.uint64(0x71D67FFFEDA60000)
    words ^= (words << np.uint64(37)) & np.uint64(0xFFF7EEE000000000)
    return words ^ (words >> np.uint64(43))
