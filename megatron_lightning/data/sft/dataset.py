"""Samples of packed documents: tokens, shifted labels, loss mask, positions, and boundaries.

Labels are shifted within each document, so its last token has none: no loss crosses a boundary.
What is left of a sample is padding, a document of its own outside of the loss.
"""

import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset

from megatron_lightning.data.account import SampleNote
from megatron_lightning.data.cache import Arrays, cached_arrays, key_digest
from megatron_lightning.data.sft.documents import Documents
from megatron_lightning.data.sft.packing import Packing, Packs, pack

Truncation = Literal["right", "drop", "fail"]
TRUNCATIONS = ("right", "drop", "fail")
IGNORED_LABEL = -100

_VERSION = 1  # part of the cache key: raise it when a plan comes out otherwise


@dataclass(frozen=True, kw_only=True)
class PackingStatistics:
    """What became of the documents of a data set."""

    documents: int
    """Documents in the samples."""
    samples: int
    """Samples (packs)."""
    tokens: int
    """Tokens in the samples, without padding."""
    loss_tokens: int
    """Tokens with a loss."""
    padding_tokens: int
    """Tokens that only fill up samples."""
    truncated_documents: int
    """Documents that lost their end."""
    truncated_tokens: int
    """Tokens that were cut off."""
    dropped_documents: int
    """Documents left out: too long, or without a token to learn within the length."""
    dropped_tokens: int
    """Tokens of those."""
    skipped_examples: int
    """Examples that could not be read."""

    @property
    def fill_rate(self) -> float:
        """Share of the samples' tokens that is no padding."""
        return self.tokens / max(1, self.tokens + self.padding_tokens)

    def __str__(self) -> str:
        """One line for a log."""
        return (
            f"{self.documents} documents in {self.samples} samples, {self.fill_rate:.1%} filled;"
            f" {self.tokens} tokens, {self.loss_tokens} with a loss; truncated:"
            f" {self.truncated_documents} documents by {self.truncated_tokens} tokens; dropped:"
            f" {self.dropped_documents} documents of {self.dropped_tokens} tokens; unreadable:"
            f" {self.skipped_examples}"
        )


class PackedDataset(Dataset[dict[str, Tensor]]):
    """Documents packed into samples of `seq_length` tokens.

    Args:
        documents: what to pack.
        seq_length: tokens a sample.
        packing: how documents share samples; "none" gives each its own.
        truncation: what becomes of a longer document: "right" cuts off its end, "drop" leaves it
            out, "fail" stops.
        document_multiple: documents take up a multiple of so many tokens; 2 x
            context_parallel_size keeps context parallelism from making samples longer.
        chosen: documents to use (a split); None: all.
        pad_id: token that fills up.
        name: of the source, for the account of tokens.
        cache_dir: folder that keeps the plan; None makes it in memory.

    Raises:
        ValueError: an option is out of range, or a document is too long and `truncation` is "fail".
    """

    def __init__(
        self,
        documents: Documents,
        seq_length: int,
        *,
        packing: Packing = "first_fit_decreasing",
        truncation: Truncation = "right",
        document_multiple: int = 1,
        chosen: range | None = None,
        pad_id: int = 0,
        name: str = "data",
        cache_dir: str | os.PathLike[str] | None = None,
    ) -> None:
        if truncation not in TRUNCATIONS:
            raise ValueError(
                f"truncation={truncation!r} is unknown: choose one of {', '.join(TRUNCATIONS)}"
            )
        if document_multiple < 1 or seq_length % document_multiple:
            raise ValueError(
                f"document_multiple={document_multiple} must divide seq_length={seq_length}"
            )
        self._documents, self.seq_length = documents, seq_length
        self._packing: Packing = packing
        self._truncation: Truncation = truncation
        self._multiple, self._pad_id, self._name = document_multiple, pad_id, name
        self._chosen = range(len(documents)) if chosen is None else chosen
        self._key: dict[str, Any] = {
            "what": "sft packs",
            "version": _VERSION,
            "documents": documents.key,
            "chosen": [self._chosen.start, self._chosen.stop],
            "seq_length": seq_length,
            "packing": packing,
            "truncation": truncation,
            "document_multiple": document_multiple,
        }
        plan = cached_arrays(cache_dir, self._key, self._plan)
        self._packs = Packs(plan["documents"], plan["offsets"])
        counts = np.diff(self._packs.offsets)
        self._boundaries = int(counts.max(initial=0)) + 2  # begin, ends, end of the padding
        self.statistics = PackingStatistics(
            **dict(zip(_COUNTED, plan["statistics"].tolist(), strict=True))
        )

    @property
    def fingerprint(self) -> str:
        """Digest of what determines the order of the samples."""
        return key_digest(self._key)

    def _plan(self) -> Arrays:
        first, stop = self._chosen.start, self._chosen.stop
        offsets = self._documents.offsets[first : stop + 1]
        starts, whole = offsets[:-1], np.diff(offsets)
        too_long = whole > self.seq_length
        if self._truncation == "fail" and too_long.any():
            number = int(too_long.argmax())
            raise ValueError(
                f"document {first + number} has {whole[number]} tokens, more than seq_length="
                f"{self.seq_length} (so have {int(too_long.sum())}): raise seq_length, or set"
                ' truncation to "right" or "drop"'
            )
        lengths = np.minimum(whole, self.seq_length)
        loss = _loss_tokens(self._documents.learned, starts, lengths)
        kept = loss > 0
        if self._truncation == "drop":
            kept &= ~too_long
        used = np.flatnonzero(kept)
        sizes = -(-lengths[used] // self._multiple) * self._multiple
        packs = pack(sizes, self.seq_length, self._packing)
        samples, tokens = len(packs.offsets) - 1, int(lengths[used].sum())
        statistics = PackingStatistics(
            documents=len(used),
            samples=samples,
            tokens=tokens,
            loss_tokens=int(loss[used].sum()),
            padding_tokens=samples * self.seq_length - tokens,
            truncated_documents=int((too_long & kept).sum()),
            truncated_tokens=int((whole - lengths)[used].sum()),
            dropped_documents=int((~kept).sum()),
            dropped_tokens=int(whole[~kept].sum()),
            skipped_examples=self._documents.skipped,
        )
        return {
            "documents": first + used[packs.documents],
            "offsets": packs.offsets,
            "statistics": np.array(list(asdict(statistics).values()), np.int64),
        }

    def __len__(self) -> int:
        """Number of samples."""
        return len(self._packs.offsets) - 1

    def document_numbers(self, index: int) -> NDArray[np.int64]:
        """Returns which documents sample `index` holds, in order."""
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of a data set of {len(self)}")
        begin, end = self._packs.offsets[index : index + 2]
        return np.asarray(self._packs.documents[begin:end])

    @property
    def source_names(self) -> Sequence[str]:
        """Name of the one source, for the account of tokens."""
        return (self._name,)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        """Returns `tokens`, `labels`, `position_ids` (int64), `loss_mask` (float32), each (S,); and
        unless packing is "none" `cu_seqlens` int32: where each document begins, where padding
        begins, then S, repeated to a width that all samples share.
        """
        return self.read(index)[0]

    def read(self, index: int) -> tuple[dict[str, Tensor], SampleNote]:
        """Returns sample `index`, and how many documents, padding tokens and truncated documents it
        holds.
        """
        length = self.seq_length
        tokens = np.full(length, self._pad_id, np.int64)
        labels = np.full(length, IGNORED_LABEL, np.int64)
        loss_mask = np.zeros(length, np.float32)
        boundaries = [0]
        filled = truncated = 0
        numbers = self.document_numbers(index).tolist()
        for number in numbers:
            begin = boundaries[-1]
            ids, learned, is_cut = self._document(number)
            end = begin + len(ids)
            tokens[begin:end] = ids
            labels[begin : end - 1] = np.where(learned[1:], ids[1:], IGNORED_LABEL)
            loss_mask[begin : end - 1] = learned[1:]
            boundaries.append(begin + -(-len(ids) // self._multiple) * self._multiple)
            filled, truncated = filled + len(ids), truncated + is_cut
        sample = {"tokens": tokens, "labels": labels, "loss_mask": loss_mask}
        if self._packing == "none":
            sample["position_ids"] = np.arange(length, dtype=np.int64)
        else:
            boundaries += [length] * (self._boundaries - len(boundaries))
            sample["position_ids"] = _positions(boundaries)
            sample["cu_seqlens"] = np.array(boundaries, np.int32)
        note = SampleNote(documents=len(numbers), padding=length - filled, truncated=truncated)
        return {name: torch.from_numpy(array) for name, array in sample.items()}, note

    def _document(self, number: int) -> tuple[NDArray[np.int64], NDArray[np.bool_], bool]:
        """Tokens of a document within the length, which are learned, and whether others were cut
        off.
        """
        begin, stop = self._documents.offsets[number : number + 2].tolist()
        end = min(stop, begin + self.seq_length)
        ids = self._documents.tokens[begin:end].astype(np.int64)
        return ids, np.asarray(self._documents.learned[begin:end]), end < stop


_COUNTED = tuple(PackingStatistics.__dataclass_fields__)


def _loss_tokens(
    learned: NDArray[np.bool_], starts: NDArray[np.int64], lengths: NDArray[np.int64]
) -> NDArray[np.int64]:
    """Tokens with a loss in the first `lengths` tokens of each document: those that are learned and
    have a token before them. (documents,)
    """
    before = np.concatenate([[0], np.cumsum(learned, dtype=np.int64)])
    ends = starts + lengths
    return before[ends] - before[np.minimum(starts + 1, ends)]


def _positions(boundaries: Sequence[int]) -> NDArray[np.int64]:
    """Position of each token within its document; (S,)."""
    starts = np.array(boundaries[:-1], np.int64)
    lengths = np.diff(boundaries)
    return np.arange(boundaries[-1], dtype=np.int64) - np.repeat(starts, lengths)
