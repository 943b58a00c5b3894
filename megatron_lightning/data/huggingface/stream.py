"""Samples of a data set that can only be read from its beginning on, in exact order.

A place in the stream is a document and an offset in it:
a run continues there after skipping documents, without tokenizing them again.
"""

from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from megatron_lightning.data.account import SampleNote
from megatron_lightning.data.huggingface.samples import Sample, document_sample, token_sample
from megatron_lightning.data.huggingface.sources import RowTokens

_DOCUMENTS_AT_ONCE = 64  # tokenized together
Wanted = Callable[[int], bool]
_Part = tuple[int, int, NDArray[np.int64]]
"""Document, offset in it, and its tokens from there on."""


class Place(NamedTuple):
    """Where in the stream of an epoch the next sample begins."""

    document: int = 0
    """Number of the document."""
    offset: int = 0
    """Tokens of it that are used up."""


class Item(NamedTuple):
    """A sample, or its absence where it was not wanted."""

    sample: tuple[Sample, SampleNote] | None
    after: Place


def _first(parts: Sequence[_Part], count: int) -> NDArray[np.int64]:
    """The first `count` tokens of some parts."""
    found: list[NDArray[np.int64]] = []
    for _, _, rest in parts:
        found.append(rest[:count])
        count -= len(found[-1])
        if count == 0:
            break
    return np.concatenate(found)


class SampleStream:
    """The samples of each epoch in order.

    Args:
        dataset: a `datasets.IterableDataset`.
        rows: makes its tokens.
        seq_length: tokens a sample.
        packed: fill samples with one document after the other; else one document a sample.
        shuffle_buffer_size: shuffle within so many documents, in each epoch anew; 0 keeps the
            order.
        seed: of the shuffling.
        keep_rest: the last tokens of an epoch make a sample too, filled up outside of the loss.
    """

    def __init__(
        self,
        dataset: Any,
        rows: RowTokens,
        seq_length: int,
        *,
        packed: bool,
        shuffle_buffer_size: int = 0,
        seed: int = 0,
        keep_rest: bool = False,
    ) -> None:
        self._dataset, self._rows, self._seq_length = dataset, rows, seq_length
        self._packed, self._keep_rest = packed, keep_rest
        self._buffer, self._seed = shuffle_buffer_size, seed

    def blank(self) -> Sample:
        """Returns a sample that only fills up a batch."""
        return token_sample(np.zeros(0, np.int64), self._seq_length)[0]

    def read(self, epoch: int, place: Place, wanted: Wanted) -> Iterator[Item]:
        """Yields the samples from `place` on; those whose running number (from 0) is not wanted
        without content.
        """
        return (self._windows if self._packed else self._documents)(epoch, place, wanted)

    def _values(self, epoch: int, skip: int) -> Iterator[Any]:
        column = self._rows.column
        if not self._buffer:
            return (row[column] for row in (self._dataset.skip(skip) if skip else self._dataset))
        values = (row[column] for row in self._dataset)
        random = np.random.default_rng([self._seed, epoch])
        return islice(_shuffled(values, self._buffer, random), skip, None)

    def _documents(self, epoch: int, place: Place, wanted: Wanted) -> Iterator[Item]:
        for number, value in enumerate(self._values(epoch, place.document)):
            sample = None
            if wanted(number):
                sample = document_sample(self._rows([value])[0], self._seq_length)
            yield Item(sample, Place(place.document + number + 1))

    def _windows(self, epoch: int, place: Place, wanted: Wanted) -> Iterator[Item]:
        length = self._seq_length
        held: list[_Part] = []
        available, number = 0, 0
        for document, tokens in self._tokens(epoch, place):
            offset = place.offset if document == place.document else 0
            if len(tokens) > offset:
                held.append((document, offset, tokens[offset:]))
                available += len(tokens) - offset
            while available > length:  # the last label is the first token of the next sample
                text = _first(held, length + 1)
                begun, left = 0, length
                while left >= len(held[0][2]):
                    left -= len(held[0][2])
                    begun += held.pop(0)[1] == 0
                if left:
                    first, offset, rest = held[0]
                    begun += offset == 0
                    held[0] = (first, offset + left, rest[left:])
                available -= length
                sample = None
                if wanted(number):
                    sample = token_sample(text, length)[0], SampleNote(documents=begun)
                number += 1
                yield Item(sample, Place(held[0][0], held[0][1]))
        if self._keep_rest and available > 1:
            sample, padding = token_sample(_first(held, available), length)
            begun = sum(offset == 0 for _, offset, _ in held)
            note = SampleNote(documents=begun, padding=padding)
            yield Item((sample, note) if wanted(number) else None, Place(held[-1][0] + 1))

    def _tokens(self, epoch: int, place: Place) -> Iterator[tuple[int, NDArray[np.int64]]]:
        values, document = self._values(epoch, place.document), place.document
        while some := list(islice(values, _DOCUMENTS_AT_ONCE)):
            yield from enumerate(self._rows(some), document)
            document += len(some)


def _shuffled(values: Iterator[Any], size: int, random: np.random.Generator) -> Iterator[Any]:
    """The values in an order that a buffer of `size` of them allows.

    Not the shuffling of `datasets`: its order in a worker process is another one, and depends on
    what was read before.
    """
    buffer = list(islice(values, size))
    for value in values:
        place = int(random.integers(size))
        buffer[place], value = value, buffer[place]
        yield value
    for place in random.permutation(len(buffer)).tolist():
        yield buffer[place]


class StreamedSet:
    """A stream in place of a data set.

    Attributes:
        stream: the samples.
        samples: samples in a pass; None: an epoch of the stream, of unknown length.
        fingerprint: digest of what determines the order, as far as it is known.
    """

    def __init__(self, stream: SampleStream, samples: int | None, fingerprint: str) -> None:
        self.stream, self.samples, self.fingerprint = stream, samples, fingerprint

    def __len__(self) -> int:
        """Samples in a pass; 1 where that is unknown: it is not known to be empty."""
        return 1 if self.samples is None else self.samples

    def __getitem__(self, index: int) -> Sample:
        """Raises TypeError: a stream is read in order."""
        raise TypeError(f"sample {index}: a stream has no access by number")
