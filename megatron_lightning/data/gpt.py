"""Samples of fixed length from an indexed corpus, in Megatron-Core's order (see `gpt_index`).

End-of-document tokens are part of the corpus and not inserted here. Attention masks are not made:
attention over packed documents takes their boundaries.
"""

import os
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset

from megatron_lightning.data.account import SampleNote
from megatron_lightning.data.cache import Arrays, array_digest, cached_arrays, key_digest
from megatron_lightning.data.gpt_index import (
    build_document_index,
    build_sample_index,
    build_shuffle_index,
    plan_epochs,
)
from megatron_lightning.data.token_store import TokenStore

_INDEX_VERSION = 1  # part of the cache key: raise it when an index function changes


class GPTDataset(Dataset[dict[str, Tensor]]):
    """Language-model samples: inputs, labels shifted by one, loss mask and positions.

    The data set is as long as the epochs that `num_samples` needs, so usually longer than asked
    for.

    Args:
        indexed: the corpus.
        sequence_range: the sequences to draw from (a split).
        num_samples: samples that will be used; None means one epoch.
        seq_length: tokens a sample.
        seed: of all shuffling, 0 to 2^32 - 1.
        eod_mask_loss: no loss where the input token is an end of document (its label is another
            document's).
        reset_position_ids: positions begin at 0 after each end of document.
        eod_id: end-of-document token; needed by the two options above.
        pad_id: token whose labels carry no loss, and which is handed out as 0.
        add_extra_token: read one token more than `seq_length`, so that the last label is real.
        drop_last: leave out a last sample that is not full (else it is filled up, outside the
            loss).
        cache_dir: folder that keeps the index arrays, see `cache`.
        name: of the corpus, in the accounts of batches.

    Raises:
        ValueError: an option is out of range, or samples are asked of an empty split.
    """

    def __init__(
        self,
        indexed: TokenStore,
        sequence_range: range,
        num_samples: int | None,
        seq_length: int,
        seed: int,
        *,
        eod_mask_loss: bool = False,
        reset_position_ids: bool = False,
        reset_attention_mask: bool = False,
        eod_id: int | None = None,
        pad_id: int | None = None,
        add_extra_token: bool = True,
        drop_last: bool = True,
        cache_dir: str | os.PathLike[str] | None = None,
        name: str = "data",
    ) -> None:
        if seq_length < 1:
            raise ValueError(f"seq_length={seq_length} must be at least 1 token")
        if not 0 <= seed < 2**32:
            raise ValueError(f"seed={seed} must be between 0 and {2**32 - 1}")
        if (eod_mask_loss or reset_position_ids or reset_attention_mask) and eod_id is None:
            raise ValueError(
                "eod_id is needed by eod_mask_loss, reset_position_ids and reset_attention_mask: "
                "give a tokenizer or a data card that knows the end-of-document token"
            )
        if not 0 <= sequence_range.start <= sequence_range.stop <= len(indexed):
            raise ValueError(
                f"sequence_range={sequence_range} is outside {indexed.prefix}, which has "
                f"{len(indexed)} sequences"
            )
        self._indexed = indexed
        self._seq_length, self._extra = seq_length, int(add_extra_token)
        self._eod_id, self._pad_id = eod_id, pad_id
        self._eod_mask_loss, self._reset_position_ids = eod_mask_loss, reset_position_ids
        self._reset_attention_mask = reset_attention_mask
        lengths = indexed.sequence_lengths[sequence_range.start : sequence_range.stop]
        self.tokens_per_epoch = int(lengths.sum(dtype=np.int64))
        if num_samples and self.tokens_per_epoch == 0:
            raise ValueError(
                f"num_samples={num_samples} samples asked of {indexed.prefix}, whose sequences "
                f"{sequence_range.start} to {sequence_range.stop} hold no token: give it a larger "
                "split"
            )
        self.epoch_plan = plan_epochs(self.tokens_per_epoch, num_samples, seq_length, self._extra)
        self._key = {
            "what": "gpt",
            "version": _INDEX_VERSION,
            "lengths": array_digest(lengths),
            "begin": sequence_range.start,
            "plan": list(self.epoch_plan),
            "seq_length": seq_length,
            "extra": self._extra,
            "drop_last": drop_last,
            "seed": seed,
        }
        self.source_names: Sequence[str] = (name,)
        self._range, self._seed, self._drop_last = sequence_range, seed, drop_last
        arrays = cached_arrays(cache_dir, self._key, self._build)
        self.document_index = arrays["document_index"]
        self.sample_index = arrays["sample_index"]
        self.shuffle_index = arrays["shuffle_index"]

    @property
    def fingerprint(self) -> str:
        """Digest of what determines the order of the samples."""
        return key_digest(self._key)

    def _build(self) -> Arrays:
        random = np.random.RandomState(self._seed)
        documents = build_document_index(self._range, self.epoch_plan, random)
        lengths = self._indexed.sequence_lengths
        samples = build_sample_index(
            lengths,
            documents,
            self._seq_length,
            extra=self._extra,
            drop_last=self._drop_last,
            tokens=self.tokens_per_epoch * self.epoch_plan.num_epochs,
        )
        shuffle = build_shuffle_index(len(samples) - 1, self.epoch_plan, random)
        return {"document_index": documents, "sample_index": samples, "shuffle_index": shuffle}

    def __len__(self) -> int:
        """Number of samples."""
        return len(self.shuffle_index)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        """Returns `tokens`, `labels`, `position_ids` (int64), `loss_mask` (float32), each (S,);
        with `reset_attention_mask` also `cu_seqlens` (S + 1,) int32: where documents begin, then S.
        """
        return self.read(index)[0]

    def read(self, index: int) -> tuple[dict[str, Tensor], SampleNote]:
        """Returns the sample and the note about it: documents that begin among its inputs, and its
        epoch by its place in the stream of all epochs.
        """
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of a data set of {len(self)}")
        sample = int(self.shuffle_index[index])
        text = self._read(sample)
        length = self._seq_length
        filled = len(text)
        if filled < length + 1:  # a partial last sample, or no extra token for the last label
            text = np.concatenate([text, np.zeros(length + 1 - filled, np.int64)])
        tokens, labels = text[:-1].copy(), text[1:].copy()
        loss_mask = np.ones(length, np.float32)
        loss_mask[max(filled - 1, 0) :] = 0.0
        if self._eod_mask_loss:
            loss_mask[tokens == self._eod_id] = 0.0
        if self._pad_id is not None:
            loss_mask[labels == self._pad_id] = 0.0
        positions = _positions(tokens, self._eod_id if self._reset_position_ids else None)
        boundaries = _boundaries(tokens, self._eod_id) if self._reset_attention_mask else None
        padding = max(length - filled, 0)
        if self._pad_id is not None:
            padding += int(np.count_nonzero(tokens[:filled] == self._pad_id))
            tokens[tokens == self._pad_id] = 0
            labels[labels == self._pad_id] = 0
        fields = {
            "tokens": torch.from_numpy(tokens),
            "labels": torch.from_numpy(labels),
            "loss_mask": torch.from_numpy(loss_mask),
            "position_ids": torch.from_numpy(positions),
        }
        if boundaries is not None:
            fields["cu_seqlens"] = torch.from_numpy(boundaries)
        return fields, self._note(sample, padding)

    def _note(self, sample: int, padding: int) -> SampleNote:
        (first, offset), (last, stop) = self.sample_index[sample : sample + 2].tolist()
        epochs = self.epoch_plan.num_epochs
        return SampleNote(
            epoch=min(sample * self._seq_length // self.tokens_per_epoch, epochs - 1),
            epochs=epochs,
            documents=last - first + (offset == 0) - (stop == 0),
            padding=padding,
        )

    def _read(self, sample: int) -> NDArray[np.int64]:
        """Returns the stream's tokens from sample `sample` to the next, and the extra one."""
        (first, offset), (last, stop) = self.sample_index[sample : sample + 2].tolist()
        sequences = self.document_index[first : last + 1].tolist()
        parts = []
        for number, sequence in enumerate(sequences):
            begin = offset if number == 0 else 0
            length = None if number < last - first else stop + self._extra - begin
            parts.append(self._indexed.get(sequence, begin, length))
        text = np.concatenate(parts)
        if text.dtype.kind not in "iu":
            raise ValueError(
                f"{self._indexed.prefix} holds {text.dtype.name}, not token ids: its index is "
                "damaged or it is no text corpus"
            )
        return text.astype(np.int64)


def _positions(tokens: NDArray[np.int64], eod_id: int | None) -> NDArray[np.int64]:
    """Returns 0, 1, 2, ..., beginning again after each end-of-document token when one is given."""
    positions = np.arange(len(tokens), dtype=np.int64)
    if eod_id is None:
        return positions
    starts = np.zeros(len(tokens), np.int64)
    after = np.flatnonzero(tokens[:-1] == eod_id) + 1
    starts[after] = after
    return positions - np.maximum.accumulate(starts)


def _boundaries(tokens: NDArray[np.int64], eod_id: int | None) -> NDArray[np.int32]:
    """Returns where the documents of (S,) tokens begin, then S to the width S + 1."""
    after = np.flatnonzero(tokens[:-1] == eod_id) + 1
    boundaries = np.full(len(tokens) + 1, len(tokens), np.int32)
    boundaries[0] = 0
    boundaries[1 : 1 + len(after)] = after
    return boundaries
