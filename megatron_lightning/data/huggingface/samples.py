"""Samples of documents: one document each, or windows of a stream of documents."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset

from megatron_lightning.data.account import SampleNote
from megatron_lightning.data.cache import key_digest
from megatron_lightning.data.huggingface.sources import RowTokens, fingerprint

Sample = dict[str, Tensor]


def token_sample(text: NDArray[np.int64], seq_length: int) -> tuple[Sample, int]:
    """Returns the sample of up to seq_length + 1 tokens, inputs and labels shifted by one, and the
    inputs that only fill it up; these, and the last token when it has no successor, have no loss.
    """
    filled = min(len(text), seq_length + 1)
    whole = np.zeros(seq_length + 1, np.int64)
    whole[:filled] = text[:filled]
    loss_mask = np.zeros(seq_length, np.float32)
    loss_mask[: max(filled - 1, 0)] = 1.0
    sample = {
        "tokens": torch.from_numpy(whole[:-1].copy()),
        "labels": torch.from_numpy(whole[1:].copy()),
        "loss_mask": torch.from_numpy(loss_mask),
        "position_ids": torch.arange(seq_length),
    }
    return sample, max(seq_length - filled, 0)


def document_sample(text: NDArray[np.int64], seq_length: int) -> tuple[Sample, SampleNote]:
    """Returns the sample of one document, cut off where it is too long."""
    sample, padding = token_sample(text, seq_length)
    return sample, SampleNote(padding=padding, truncated=int(len(text) > seq_length + 1))


class DocumentDataset(Dataset[Sample]):
    """One row a sample, tokenized when it is read.

    Args:
        dataset: a `datasets.Dataset`.
        rows: makes its tokens.
        row_range: the rows that belong to it (a split).
        seq_length: tokens a sample; longer rows are cut off.
        name: in the accounts of batches.
    """

    def __init__(
        self, dataset: Any, rows: RowTokens, row_range: range, seq_length: int, name: str
    ) -> None:
        self._dataset, self._rows, self._range = dataset, rows, row_range
        self._seq_length = seq_length
        self.source_names: Sequence[str] = (name,)

    @property
    def fingerprint(self) -> str:
        """Digest of what determines the order of the samples."""
        place = [self._range.start, self._range.stop, self._seq_length]
        return key_digest([fingerprint(self._dataset), self._rows.identity, place])

    def __len__(self) -> int:
        """Number of samples."""
        return len(self._range)

    def __getitem__(self, index: int) -> Sample:
        """Returns `tokens`, `labels`, `position_ids` (int64), `loss_mask` (float32), each (S,)."""
        return self.read(index)[0]

    def read(self, index: int) -> tuple[Sample, SampleNote]:
        """Returns the sample and the note about it."""
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of a data set of {len(self)}")
        value = self._dataset[self._range[index]][self._rows.column]
        return document_sample(self._rows([value])[0], self._seq_length)
