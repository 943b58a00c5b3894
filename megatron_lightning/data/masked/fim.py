"""Fill-in-the-middle samples (https://arxiv.org/abs/2207.14255) made from GPT samples.

The documents within a sample, or their fragments, are cut at two random characters and put in the
order prefix, suffix, middle (PSM) or suffix, prefix, middle (SPM), with a token in front of each
part. The sample keeps its length: what came out longer is cut at its end.

Parts are those of Megatron's `GPTFIMDataset` for the same random state. Its faults are not kept:
there one random state runs on from sample to sample, so that samples depend on the order and the
process in which they are read (here on seed and place alone); end-of-document and split tokens that
follow each other are lost; empty fragments become three tokens around nothing; special tokens
within a part are lost, and text whose first or last character is cut in two is replaced by the
character for unreadable text (here such a part stays as it is).
"""

import os
from collections.abc import Callable, Iterator

import numpy as np
from numpy.typing import NDArray

from megatron_lightning.data.gpt import GPTDataset
from megatron_lightning.data.indexed import IndexedDataset
from megatron_lightning.data.masked.options import FIMConfig
from megatron_lightning.data.masked.vocabulary import FIMTokens
from megatron_lightning.data.tokenizer import Tokenizer

_UNREADABLE = "\ufffd"  # what decoding makes of a character that is not whole

Tokens = NDArray[np.int64]


class FillInMiddle:
    """Puts the documents of a token sequence in the order prefix, suffix, middle.

    Args:
        config: options.
        tokens: ids of the tokens that it names.
        tokenizer: turns tokens into text, which is cut, and back.
    """

    def __init__(self, config: FIMConfig, tokens: FIMTokens, tokenizer: Tokenizer) -> None:
        self._config, self._tokens, self._tokenizer = config, tokens, tokenizer
        self._silent: dict[int, bool] = {}  # whether decoding leaves a token out, as far as known

    def __call__(self, sequence: Tokens, random: np.random.RandomState) -> Tokens:
        """Returns the sequence reordered, of the same length, (S,) -> (S,)."""
        changed = _map_between(
            sequence, self._tokens.eod_id, lambda part: self._document(part, random)
        )
        if len(changed) >= len(sequence):
            return changed[: len(sequence)]
        fill = np.full(len(sequence) - len(changed), self._tokens.pad_id)
        return np.concatenate([changed, fill])

    def _document(self, document: Tokens, random: np.random.RandomState) -> Tokens:
        rate, split_id = self._config.rate, self._tokens.split_id
        if split_id is None or not (document == split_id).any():
            return self._reorder(document, rate, random)
        if not random.binomial(1, rate):
            return document
        share = self._config.fragment_rate
        assert share is not None  # checked with the split token
        return _map_between(document, split_id, lambda part: self._reorder(part, share, random))

    def _reorder(self, part: Tokens, rate: float, random: np.random.RandomState) -> Tokens:
        """Returns a document or fragment in the new order, or with chance 1 - rate as it is."""
        if not random.binomial(1, rate):
            return part
        text = self._tokenizer.decode(part.tolist())
        if self._config.no_prefix is not None and text.startswith(self._config.no_prefix):
            return part
        first, second = np.sort(random.randint(low=0, high=len(text) + 1, size=2)).tolist()
        suffix_first = random.binomial(1, self._config.spm_rate)
        if not text or _UNREADABLE in text or self._loses(part):
            return part
        prefix = self._encode(text[:first])
        middle = self._encode(text[first:second])
        suffix = self._encode(text[second:])
        ids = self._tokens
        if suffix_first:
            order = [[ids.prefix_id, ids.suffix_id], suffix, [ids.middle_id], prefix, middle]
        else:
            order = [[ids.prefix_id], prefix, [ids.suffix_id], suffix, [ids.middle_id], middle]
        return np.concatenate([np.asarray(piece, dtype=np.int64) for piece in order])

    def _loses(self, part: Tokens) -> bool:
        """Whether the part has special tokens, which are not in its text."""
        for token in set(part.tolist()):
            if token not in self._silent:
                # Twice: SentencePiece leaves out a space, but only at the beginning.
                self._silent[token] = self._tokenizer.decode([token, token]) == ""
            if self._silent[token]:
                return True
        return False

    def _encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text) if text else []


class FIMDataset(GPTDataset):
    """GPT samples with fill-in-the-middle; fields and arguments are those of `GPTDataset`.

    Padding carries no loss and is handed out as token 0.

    Args:
        indexed: the corpus.
        sequence_range: the sequences to draw from (a split).
        num_samples: samples that will be used; None means one epoch.
        seq_length: tokens a sample.
        seed: of all shuffling and cutting, 0 to 2^32 - 1.
        tokenizer: that of the corpus.
        tokens: ids of the special tokens.
        config: options.
        eod_mask_loss: see `GPTDataset`.
        reset_position_ids: see `GPTDataset`.
        drop_last: see `GPTDataset`.
        cache_dir: see `GPTDataset`.
        name: see `GPTDataset`.

    Raises:
        ValueError: see `GPTDataset`.
    """

    def __init__(
        self,
        indexed: IndexedDataset,
        sequence_range: range,
        num_samples: int | None,
        seq_length: int,
        seed: int,
        tokenizer: Tokenizer,
        tokens: FIMTokens,
        config: FIMConfig | None = None,
        *,
        eod_mask_loss: bool = False,
        reset_position_ids: bool = False,
        drop_last: bool = True,
        cache_dir: str | os.PathLike[str] | None = None,
        name: str = "data",
    ) -> None:
        self._fill = FillInMiddle(config or FIMConfig(), tokens, tokenizer)
        super().__init__(
            indexed,
            sequence_range,
            num_samples,
            seq_length,
            seed,
            eod_mask_loss=eod_mask_loss,
            reset_position_ids=reset_position_ids,
            eod_id=tokens.eod_id,
            pad_id=tokens.pad_id,
            drop_last=drop_last,
            cache_dir=cache_dir,
            name=name,
        )

    def _read(self, sample: int) -> Tokens:
        """Returns the stream's tokens of a sample, reordered."""
        words = [self._seed, sample % 2**32, sample >> 32]
        return self._fill(super()._read(sample), np.random.RandomState(words))


def _map_between(tokens: Tokens, mark: int, change: Callable[[Tokens], Tokens]) -> Tokens:
    """Applies `change` to what stands between the marks, and leaves them.

    Empty parts are left out; but the last one is given to `change`, whose random draws are then
    those of Megatron.
    """
    pieces: list[Tokens] = []
    for part, end in _parts(tokens, mark):
        pieces += [change(part) if len(part) or len(end) == 0 else part, end]
    return np.concatenate(pieces)


def _parts(tokens: Tokens, mark: int) -> Iterator[tuple[Tokens, Tokens]]:
    """Yields the parts between the marks, each with its closing mark; the last has none."""
    begin = 0
    for place in np.flatnonzero(tokens == mark).tolist():
        yield tokens[begin:place], tokens[place : place + 1]
        begin = place + 1
    yield tokens[begin:], tokens[:0]
