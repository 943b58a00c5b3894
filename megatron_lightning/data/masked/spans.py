"""Choice of masked runs of tokens: Megatron-Core's, draw for draw from the same random state.

Words are visited in random order; at each a run of n words begins, n drawn anew and lowered until
the run fits into what is still to be masked; a run that meets a masked one is dropped.

Departures, each on purpose: other special tokens than the two of BERT are no candidates either; a
sample has one token to mask also where its short target length times the share is below one; the
runs of T5 don't reach over a special token (which would be lost from encoder and decoder);
exchanged tokens are drawn from the sample's random state, not from the global one.
"""

import math
from bisect import bisect_right
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from megatron_lightning.data.masked.options import MaskingConfig
from megatron_lightning.data.masked.vocabulary import MaskedVocabulary

_SPANBERT_P = 0.2  # of the geometric distribution, https://arxiv.org/abs/1907.10529, section 3.1


class Candidates(NamedTuple):
    """Words that may be masked."""

    words: list[list[int]]
    """Positions of the tokens of each word."""
    stops: list[int]
    """For each word, the number of the first word that a run beginning with it can't reach."""


class SpanChooser:
    """Chooses which tokens of a sample are masked.

    Args:
        config: the rules.
        vocabulary: says which tokens are special and which belong to the word before.
        contiguous: a run must not reach over a special token.
    """

    def __init__(
        self, config: MaskingConfig, vocabulary: MaskedVocabulary, *, contiguous: bool
    ) -> None:
        self._config, self._vocabulary, self._contiguous = config, vocabulary, contiguous
        shares = 1.0 / np.arange(1, config.max_ngram + 1)
        shares /= shares.sum()
        if config.longer_ngrams:
            shares = shares[::-1]
        edges = (shares / shares.sum()).cumsum()
        self._edges: list[float] = (edges / edges[-1]).tolist()

    def limit(self, num_tokens: int, target_length: int) -> float:
        """Returns how many tokens of a sample of `num_tokens` are masked at most."""
        share = self._config.probability
        return max(1, min(share * target_length, max(1, int(round(num_tokens * share)))))

    def choose(
        self, tokens: NDArray[np.int64], target_length: int, random: np.random.RandomState
    ) -> "Choice":
        """Begins a choice for the sample `tokens`."""
        candidates = self._candidates(tokens)
        order = np.arange(len(candidates.words))
        random.shuffle(order)
        limit = self.limit(len(tokens), target_length)
        # The limit is no integer. With less than one token left nothing fits any more; going on
        # only draws numbers, which matter to exchanged tokens alone.
        enough = limit if self._config.permute else math.floor(limit)
        return Choice(self, candidates, order, limit, enough, random)

    def draw_length(self, random: np.random.RandomState, *, plain: bool = False) -> int:
        """Returns the number of words of the next run; `plain` ignores `geometric`."""
        if self._config.geometric and not plain:
            return min(int(random.geometric(_SPANBERT_P)), self._config.max_ngram)
        return 1 + bisect_right(self._edges, random.random_sample())

    def _candidates(self, tokens: NDArray[np.int64]) -> Candidates:
        special = self._vocabulary.special[tokens].tolist()
        continues = self._vocabulary.continues_word[tokens].tolist()
        words: list[list[int]] = []
        stops: list[int] = []
        for position, token_is_special in enumerate(special):
            if token_is_special:
                continue
            gap = self._contiguous and position > 0 and special[position - 1]
            if gap:
                stops += [len(words)] * (len(words) - len(stops))
            if continues[position] and self._config.whole_words and words and not gap:
                words[-1].append(position)
            else:
                words.append([position])
        stops += [len(words)] * (len(words) - len(stops))
        return Candidates(words, stops)


class Choice:
    """The runs of one sample, in the order in which they are found.

    Iterating draws one run after the other, so that the caller may draw from the same random state
    in between (as for the replacement of each token).
    """

    def __init__(
        self,
        chooser: SpanChooser,
        candidates: Candidates,
        order: NDArray[np.int64],
        limit: float,
        enough: float,
        random: np.random.RandomState,
    ) -> None:
        self._chooser, self._candidates, self._order = chooser, candidates, order
        self._limit, self._enough, self._random = limit, enough, random
        self.taken: set[int] = set()
        """Positions of all tokens of the runs so far."""

    def __iter__(self) -> "Choice":
        self._next = 0
        return self

    def __next__(self) -> list[int]:
        """Returns the positions of the next run, ascending."""
        while self._next < len(self._order) and len(self.taken) < self._enough:
            word = int(self._order[self._next])
            self._next += 1
            run = self._run(word, self._chooser.draw_length(self._random), len(self.taken))
            if run and self.taken.isdisjoint(run):
                self.taken.update(run)
                return run
        raise StopIteration

    def exchanged(self) -> list[tuple[int, int]]:
        """Draws tokens outside of the runs that change places: (position, where its new token is
        from), ascending.
        """
        random, moved = self._random, set[int]()
        random.shuffle(self._order)
        for word in self._order.tolist():
            if len(moved) >= self._limit:
                break
            run = self._run(word, self._chooser.draw_length(random, plain=True), len(moved))
            if run and self.taken.isdisjoint(run) and moved.isdisjoint(run):
                moved.update(run)
        places = sorted(moved)
        sources = np.array(places, dtype=np.int64)
        random.shuffle(sources)
        return list(zip(places, sources.tolist(), strict=True))

    def _run(self, word: int, length: int, taken: int) -> list[int]:
        """Returns the longest run of up to `length` words that fits, empty when none does."""
        words, stop = self._candidates.words, self._candidates.stops[word]
        while length:
            run = _flatten(words[word : min(word + length, stop)])
            if taken + len(run) <= self._limit:
                return run
            length -= 1
        return []


def _flatten(words: Sequence[Sequence[int]]) -> list[int]:
    return [position for word in words for position in word]
