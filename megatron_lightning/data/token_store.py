"""What a GPT data set needs of a corpus, and a corpus that is made up.

The mock corpus has documents of many lengths whose tokens follow a simple rule, so that a model's
loss falls on it. Every document is a function of seed and number: nothing is stored.
"""

from typing import Protocol

import numpy as np
from numpy.typing import NDArray


class TokenStore(Protocol):
    """Sequences of tokens by number."""

    @property
    def prefix(self) -> str:
        """What errors call it."""
        ...

    @property
    def sequence_lengths(self) -> NDArray[np.int32]:
        """Tokens in each sequence."""
        ...

    def __len__(self) -> int: ...

    def get(self, index: int, offset: int = 0, length: int | None = None, /) -> NDArray[np.integer]:
        """Returns `length` tokens of a sequence (None: the rest) from `offset` on."""
        ...


class MockCorpus:
    """Documents that count upwards in steps, modulo the vocabulary, and end with `eod_id`.

    Args:
        vocab_size: number of token ids.
        eod_id: end-of-document token.
        documents: how many.
        seed: of lengths and tokens.
    """

    prefix = "mock data"

    def __init__(self, vocab_size: int, eod_id: int, documents: int = 4096, seed: int = 0) -> None:
        self._vocab_size, self._eod_id, self._seed = vocab_size, eod_id, seed
        random = np.random.default_rng(seed)
        self.sequence_lengths: NDArray[np.int32] = random.integers(
            16, 2048, documents, dtype=np.int32
        )

    def __len__(self) -> int:
        """Number of documents."""
        return len(self.sequence_lengths)

    def get(self, index: int, offset: int = 0, length: int | None = None) -> NDArray[np.int64]:
        """Returns `length` tokens of a document (None: the rest) from `offset` on."""
        whole = int(self.sequence_lengths[index])
        first, step = np.random.default_rng([self._seed, index]).integers(1, 64, 2)
        tokens = (first + step * np.arange(whole, dtype=np.int64)) % self._vocab_size
        tokens[-1] = self._eod_id
        return tokens[offset : None if length is None else offset + length]
