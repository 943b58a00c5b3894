"""Which sentences make up each sample of a sentence-split corpus: Megatron-Core's mapping, number
for number.

A sample takes sentences of one document until its target length is reached, but leaves no single
sentence over at the end of the document. The target is `max_length`, or with probability
1 / round(1 / short_seq_prob) a number from 2 to `max_length`. Passes over the documents are
repeated until there are enough samples, and all of them are shuffled together. The end of a sample
is found by bisection, without a step for each sentence.
"""

import math
from array import array
from bisect import bisect_left
from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from megatron_lightning.data.compiled import COMPILED_FROM
from megatron_lightning.data.masked.compiled import Loops, loops
from megatron_lightning.data.masked.random64 import shuffled_order


class SentenceIndex(NamedTuple):
    """The samples of a split, in their shuffled order."""

    samples: NDArray[np.unsignedinteger]
    """(samples, 3): first sentence, end (exclusive), target length in tokens; uint32 where it
    fits."""
    epochs: NDArray[np.int32]
    """Pass over the documents that each sample is from, (samples,)."""


class DocumentCounts(NamedTuple):
    """What became of the documents of a split."""

    used: int
    """Documents that give samples."""
    empty: int
    """Documents without a sentence."""
    short: int
    """Documents with sentences, but fewer than a sample needs."""
    long: int
    """Documents left out because one of their sentences is too long."""


def usable_documents(
    boundaries: NDArray[np.int64],
    lengths: NDArray[np.int32],
    min_sentences: int,
    max_sentence_length: int,
) -> tuple[NDArray[np.bool_], DocumentCounts]:
    """Returns which documents give samples, (documents,), and counts of the others.

    A document of one sentence is never left out for its length: that sentence is cut.

    Args:
        boundaries: sentence at which each document begins, and the end; (documents + 1,).
        lengths: tokens of each sentence of the corpus.
        min_sentences: sentences that a sample needs.
        max_sentence_length: tokens of the longest sentence that a document may have.
    """
    sentences = np.diff(boundaries)
    first = int(boundaries[0]) if len(boundaries) else 0
    last = int(boundaries[-1]) if len(boundaries) else 0
    too_long = first + np.flatnonzero(lengths[first:last] > max_sentence_length)
    inside = np.diff(np.searchsorted(too_long, boundaries))  # long sentences of each document
    empty, short = sentences == 0, (sentences > 0) & (sentences < min_sentences)
    long = ~empty & ~short & (sentences > 1) & (inside > 0)
    usable = ~(empty | short | long)
    return usable, DocumentCounts(
        int(usable.sum()), int(empty.sum()), int(short.sum()), int(long.sum())
    )


def build_sentence_index(
    boundaries: NDArray[np.int64],
    lengths: NDArray[np.int32],
    *,
    num_samples: int | None,
    max_length: int,
    short_seq_prob: float,
    seed: int,
    min_sentences: int = 1,
    max_sentence_length: int = 512,
) -> SentenceIndex:
    """Returns the shuffled samples.

    Args:
        boundaries: sentence at which each document begins, and the end; (documents + 1,).
        lengths: tokens of each sentence of the corpus.
        num_samples: samples needed at least; passes are always whole. None means one pass.
        max_length: tokens of a sample that is not short, at least 2.
        short_seq_prob: share of samples that are short.
        seed: of target lengths and order.
        min_sentences: sentences that a sample needs.
        max_sentence_length: see `usable_documents`.

    Raises:
        ValueError: samples are asked of documents that give none.
    """
    usable, counts = usable_documents(boundaries, lengths, min_sentences, max_sentence_length)
    dtype = np.uint32 if len(lengths) < 2**32 else np.uint64
    if counts.used == 0:
        if num_samples:
            raise ValueError(
                f"num_samples={num_samples} samples asked of {len(usable)} documents that give "
                f"none: {counts.empty} are empty, {counts.short} have fewer than {min_sentences} "
                f"sentences, {counts.long} have a sentence of more than {max_sentence_length} "
                "tokens. Give a larger split, or a corpus that is split into sentences"
            )
        return SentenceIndex(np.zeros((0, 3), dtype), np.zeros(0, np.int32))
    begins, ends = boundaries[:-1][usable], boundaries[1:][usable]
    targets = _TargetLengths(max_length, short_seq_prob, seed)
    sentences = int((ends - begins).sum())
    compiled = max(sentences, num_samples or 0) >= COMPILED_FROM
    cut = _cutter(begins, ends, lengths, min_sentences, loops() if compiled else None)
    passes: list[NDArray[np.int64]] = []
    counts = [0]  # samples after each pass
    while counts[-1] < max(num_samples or 0, 1):
        rows, used = cut(targets.coming(len(begins) + sentences))
        targets.skip(used)
        passes.append(rows)
        counts.append(counts[-1] + len(rows))
    epochs = np.repeat(np.arange(len(passes), dtype=np.int32), np.diff(counts))
    order = shuffled_order(counts[-1], seed + 1)
    return SentenceIndex(np.concatenate(passes)[order].astype(dtype), epochs[order])


Cutter = Callable[[NDArray[np.int64]], tuple[NDArray[np.int64], int]]
"""From target lengths to the samples of one pass, (samples, 3), and how many lengths were used."""


def _cutter(
    begins: NDArray[np.int64],
    ends: NDArray[np.int64],
    lengths: NDArray[np.int32],
    min_sentences: int,
    compiled: Loops | None,
) -> Cutter:
    if compiled is not None:
        rows = np.empty((int((ends - begins).sum()), 3), np.int64)

        def cut_all(targets: NDArray[np.int64]) -> tuple[NDArray[np.int64], int]:
            count, used = compiled.cut(begins, ends, lengths, min_sentences, targets, rows)
            return rows[:count].copy(), used

        return cut_all
    first = int(begins[0])
    # Tokens before each sentence, from the first one used on: element access must be cheap.
    before = array("q", [0])
    before.frombytes(np.cumsum(lengths[first : ends[-1]], dtype=np.int64).tobytes())
    documents = list(zip((begins - first).tolist(), (ends - first).tolist(), strict=True))

    def cut_each(targets: NDArray[np.int64]) -> tuple[NDArray[np.int64], int]:
        coming, found = iter(targets.tolist()), array("q")
        for begin, end in documents:
            _cut_document(begin, end, before, min_sentences, coming, found)
        rows = np.frombuffer(found, dtype=np.int64).reshape(-1, 3) + [first, first, 0]
        return rows, len(documents) + len(rows)

    return cut_each


def _cut_document(
    begin: int,
    end: int,
    before: "array[int]",
    min_sentences: int,
    targets: Iterator[int],
    rows: "array[int]",
) -> None:
    """Appends first sentence, end and target of every sample of a document to `rows`."""
    target = next(targets)
    while begin < end:
        stop = bisect_left(before, before[begin] + target, begin + 1, end)
        stop = max(stop, begin + min_sentences)
        if end - stop <= 1:  # no sentence is left over alone
            stop = end
        rows.extend((begin, stop, target))
        begin, target = stop, next(targets)


class _TargetLengths:
    """The stream of target lengths: numpy's RandomState draws the 32-bit words of
    `std::mt19937`.
    """

    def __init__(self, max_length: int, short_seq_prob: float, seed: int) -> None:
        self._max_length = max_length
        self._ratio = math.floor(1 / short_seq_prob + 0.5) if short_seq_prob > 0 else 0
        self._random = np.random.RandomState(seed)
        self._drawn = np.zeros(0, np.int64)

    def coming(self, count: int) -> NDArray[np.int64]:
        """Returns the next `count` lengths or more, without using them up."""
        missing = count - len(self._drawn)
        if missing > 0:
            self._drawn = np.concatenate([self._drawn, self._draw(missing)])
        return self._drawn

    def skip(self, count: int) -> None:
        """Uses up `count` lengths."""
        self._drawn = self._drawn[count:]

    def _draw(self, count: int) -> NDArray[np.int64]:
        if self._ratio == 0:
            return np.full(count, self._max_length)
        words = self._random.randint(0, 2**32, size=count, dtype=np.uint32).astype(np.int64)
        short = 2 + words % (self._max_length - 1)
        return np.where(words % self._ratio == 0, short, self._max_length)
