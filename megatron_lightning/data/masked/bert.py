"""BERT samples: masked language model, with or without pairs of segments in random order.

Samples are Megatron-Core's, number for number, less its faults (`spans.py` lists those of masking;
here: token types and the padding mask don't hold the id of the padding token, and special tokens
don't replace masked ones). Each sample depends on seed and index alone.
"""

import os
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from megatron_lightning.data.indexed import IndexedDataset
from megatron_lightning.data.masked.options import BERTDataConfig
from megatron_lightning.data.masked.sentences import NO_LABEL, SentenceDataset, padded
from megatron_lightning.data.masked.spans import SpanChooser
from megatron_lightning.data.masked.vocabulary import BERTVocabulary


class BERTDataset(SentenceDataset):
    """Samples `[CLS] segment [SEP]` or `[CLS] segment A [SEP] segment B [SEP]` with masked tokens.

    Of the masked tokens 80% become the mask token, 10% a random one, 10% stay.

    Items are dicts of int64 tensors of `seq_length`: `tokens`, `token_type_ids` (0, and 1 in
    segment B), `labels` (-1 where nothing is to be predicted), `padding_mask` (1 at tokens, 0
    behind the end); float32 `loss_mask`; and the scalars `is_random` (1: segments are in exchanged
    order; the label of a classification head) and `truncated`.

    Args:
        indexed: corpus with a sequence a sentence.
        documents: the documents to draw from (a split).
        num_samples: samples that will be used; None means one pass over the documents.
        seq_length: tokens a sample, special ones included.
        seed: of target lengths, order and masking, 0 to 2^32 - 1.
        vocabulary: special tokens and word boundaries.
        config: options.
        cache_dir: folder that keeps the index arrays, see `cache`.
        name: of the corpus, in the accounts of batches.

    Raises:
        ValueError: an option is out of range, or samples are asked of documents that give none.
    """

    def __init__(
        self,
        indexed: IndexedDataset,
        documents: range,
        num_samples: int | None,
        seq_length: int,
        seed: int,
        vocabulary: BERTVocabulary,
        config: BERTDataConfig | None = None,
        *,
        cache_dir: str | os.PathLike[str] | None = None,
        name: str = "data",
    ) -> None:
        config = config or BERTDataConfig()
        super().__init__(
            indexed,
            documents,
            num_samples,
            seq_length,
            seed,
            config,
            extra_tokens=3,  # one in front and one after each of two segments
            min_sentences=2 if config.classification_head else 1,
            cache_dir=cache_dir,
            name=name,
        )
        self._vocabulary, self._permute = vocabulary, config.masking.permute
        self._pairs = config.classification_head
        self._chooser = SpanChooser(config.masking, vocabulary, contiguous=False)

    def _make(
        self,
        index: int,
        sentences: list[NDArray[np.int64]],
        target: int,
        random: np.random.RandomState,
    ) -> dict[str, Tensor]:
        vocabulary, length = self._vocabulary, self._seq_length
        first, second, is_random = self._segments(sentences, random)
        held = len(first) + len(second)
        first, second = _trim(first, second, target, random)
        vocabulary.check_ids(np.concatenate([first, second]), self._indexed.prefix)
        start, end = np.array([vocabulary.cls_id]), np.array([vocabulary.sep_id])
        tokens = np.concatenate([start, first, end, second, end[: len(second)]])
        filled = len(tokens)
        labels = np.full(length, NO_LABEL, np.int64)
        masked = self._mask(tokens, target, random, labels)
        types = np.zeros(length, np.int64)
        types[len(first) + 2 : filled] = 1
        mask = np.zeros(length, np.int64)
        mask[:filled] = 1
        return {
            "tokens": torch.from_numpy(padded(masked, length, vocabulary.pad_id)),
            "token_type_ids": torch.from_numpy(types),
            "labels": torch.from_numpy(labels),
            "loss_mask": torch.from_numpy((labels != NO_LABEL).astype(np.float32)),
            "padding_mask": torch.from_numpy(mask),
            "is_random": torch.tensor(int(is_random)),
            "truncated": torch.tensor(int(held > target)),
        }

    def _segments(
        self, sentences: Sequence[NDArray[np.int64]], random: np.random.RandomState
    ) -> tuple[NDArray[np.int64], NDArray[np.int64], bool]:
        """Returns the two segments and whether they are exchanged; without pairs B is empty."""
        none = np.zeros(0, np.int64)
        if not self._pairs:
            return np.concatenate([none, *sentences]), none, False
        pivot = random.randint(low=1, high=len(sentences)) if len(sentences) >= 3 else 1
        exchanged = random.random_sample() < 0.5
        first = np.concatenate([none, *sentences[:pivot]])
        second = np.concatenate([none, *sentences[pivot:]])
        return (second, first, True) if exchanged else (first, second, False)

    def _mask(
        self,
        tokens: NDArray[np.int64],
        target: int,
        random: np.random.RandomState,
        labels: NDArray[np.int64],
    ) -> NDArray[np.int64]:
        """Returns the tokens with masked ones replaced, and writes the labels of those."""
        masked = tokens.copy()
        choice = self._chooser.choose(tokens, target, random)
        for run in choice:
            for position in run:
                labels[position] = tokens[position]
                masked[position] = self._replacement(int(tokens[position]), random)
        if self._permute:
            moved = choice.exchanged()
            for position, source in moved:
                labels[position] = tokens[position]
                masked[position] = tokens[source]
        return masked

    def _replacement(self, token: int, random: np.random.RandomState) -> int:
        """Returns what a masked token becomes."""
        if random.random_sample() < 0.8:
            return self._vocabulary.mask_id
        if random.random_sample() < 0.5:
            return token
        known, special = self._vocabulary.known, self._vocabulary.special
        drawn = random.randint(0, len(known))
        # A special token gives way to the next one that is text: no second draw, so that what
        # follows stays the same.
        for step in range(len(known)):
            other = int(known[(drawn + step) % len(known)])
            if not special[other]:
                return other
        return token


def _trim(
    first: NDArray[np.int64],
    second: NDArray[np.int64],
    target: int,
    random: np.random.RandomState,
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Takes tokens from the longer segment, at either end by chance, down to `target` in all."""
    begins, ends = [0, 0], [len(first), len(second)]
    excess = len(first) + len(second) - target
    for draw in random.random_sample(max(excess, 0)).tolist():
        longer = 0 if ends[0] - begins[0] > ends[1] - begins[1] else 1
        if draw < 0.5:
            begins[longer] += 1
        else:
            ends[longer] -= 1
    return first[begins[0] : ends[0]], second[begins[1] : ends[1]]
