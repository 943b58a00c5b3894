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
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from megatron_lightning.data.masked.random64 import shuffled_order

_DRAWS = 1 << 14  # target lengths drawn at a time


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
    documents = list(
        zip(boundaries[:-1][usable].tolist(), boundaries[1:][usable].tolist(), strict=True)
    )
    begin, end = documents[0][0], documents[-1][1]
    # Tokens before each sentence, from the first one used on: element access must be cheap.
    before = array("q", np.cumsum(lengths[begin:end], dtype=np.int64).tobytes())
    before.insert(0, 0)
    targets = _target_lengths(max_length, short_seq_prob, seed)
    rows, passes = array("q"), [0]  # passes: samples after each of them
    while passes[-1] < max(num_samples or 0, 1):
        for first, last in documents:
            _cut_document(first - begin, last - begin, before, min_sentences, targets, rows)
        passes.append(len(rows) // 3)
    found = np.frombuffer(rows, dtype=np.int64).reshape(-1, 3) + [begin, begin, 0]
    epochs = np.repeat(np.arange(len(passes) - 1, dtype=np.int32), np.diff(passes))
    order = shuffled_order(len(found), seed + 1)
    return SentenceIndex(found[order].astype(dtype), epochs[order])


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


def _target_lengths(max_length: int, short_seq_prob: float, seed: int) -> Iterator[int]:
    """Yields target lengths; numpy's RandomState draws the 32-bit words of `std::mt19937`."""
    ratio = math.floor(1 / short_seq_prob + 0.5) if short_seq_prob > 0 else 0
    random = np.random.RandomState(seed)
    while True:
        if ratio == 0:
            yield max_length
            continue
        words = random.randint(0, 2**32, size=_DRAWS, dtype=np.uint32).astype(np.int64)
        short = 2 + words % (max_length - 1)
        yield from np.where(words % ratio == 0, short, max_length).tolist()
