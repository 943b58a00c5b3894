"""What BERT and T5 samples share: which sentences a sample holds, and its own random state."""

import os
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset

from megatron_lightning.data.account import SampleNote
from megatron_lightning.data.cache import Arrays, array_digest, cached_arrays, key_digest
from megatron_lightning.data.indexed import IndexedDataset
from megatron_lightning.data.masked.options import BERTDataConfig, T5DataConfig
from megatron_lightning.data.masked.sentence_index import (
    DocumentCounts,
    build_sentence_index,
    usable_documents,
)

NO_LABEL = -1
"""Label of positions without loss, as in Megatron-Core; the losses here take any negative one."""
_INDEX_VERSION = 1  # part of the cache key: raise it when the index function changes


class SentenceDataset(Dataset[dict[str, Tensor]]):
    """Base of data sets whose samples are runs of whole sentences of one document.

    Args:
        indexed: corpus with a sequence a sentence.
        documents: the documents to draw from (a split).
        num_samples: samples that will be used; None means one pass over the documents.
        seq_length: tokens a sample.
        seed: of target lengths, order and masking, 0 to 2^32 - 1.
        config: options.
        extra_tokens: tokens of `seq_length` that are kept for special ones.
        min_sentences: sentences that a sample needs.
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
        config: BERTDataConfig | T5DataConfig,
        *,
        extra_tokens: int,
        min_sentences: int,
        cache_dir: str | os.PathLike[str] | None = None,
        name: str = "data",
    ) -> None:
        if seq_length < extra_tokens + 2:
            raise ValueError(
                f"seq_length={seq_length} must be at least {extra_tokens + 2} tokens: "
                f"{extra_tokens} are special ones"
            )
        if not 0 <= seed < 2**32:
            raise ValueError(f"seed={seed} must be between 0 and {2**32 - 1}")
        held = len(indexed.document_indices) - 1
        if not 0 <= documents.start <= documents.stop <= held:
            raise ValueError(
                f"documents={documents} is outside of {indexed.prefix}, which has {held} documents"
            )
        self.source_names: Sequence[str] = (name,)
        self._indexed, self._seq_length, self._seed = indexed, seq_length, seed
        boundaries = np.asarray(indexed.document_indices[documents.start : documents.stop + 1])
        lengths = np.asarray(indexed.sequence_lengths)
        self.document_counts: DocumentCounts = usable_documents(
            boundaries, lengths, min_sentences, config.max_sentence_length
        )[1]
        self._key = {
            "what": type(self).__name__,
            "version": _INDEX_VERSION,
            "lengths": array_digest(lengths[boundaries[0] : boundaries[-1]]),
            "boundaries": array_digest(boundaries),
            "num_samples": num_samples,
            "max_length": seq_length - extra_tokens,
            "min_sentences": min_sentences,
            "short_seq_prob": config.short_seq_prob,
            "max_sentence_length": config.max_sentence_length,
            "seed": seed,
        }

        def build() -> Arrays:
            samples, epochs = build_sentence_index(
                boundaries,
                lengths,
                num_samples=num_samples,
                max_length=seq_length - extra_tokens,
                short_seq_prob=config.short_seq_prob,
                seed=seed,
                min_sentences=min_sentences,
                max_sentence_length=config.max_sentence_length,
            )
            return {"sample_index": samples, "epochs": epochs}

        arrays = cached_arrays(cache_dir, self._key, build)
        self.sample_index, self._epochs = arrays["sample_index"], arrays["epochs"]
        self._num_epochs = 1 + int(self._epochs.max(initial=0))
        self._boundaries = boundaries

    @property
    def fingerprint(self) -> str:
        """Digest of what determines the order of the samples."""
        return key_digest(self._key)

    def __len__(self) -> int:
        """Number of samples."""
        return len(self.sample_index)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        """Returns sample `index`, see the class."""
        return self.read(index)[0]

    def read(self, index: int) -> tuple[dict[str, Tensor], SampleNote]:
        """Returns sample `index` and the note about it."""
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of a data set of {len(self)}")
        begin, end, target = self.sample_index[index].tolist()
        sentences = [self._indexed.get(i).astype(np.int64) for i in range(begin, end)]
        random = np.random.RandomState((self._seed + int(index)) % 2**32)
        sample = self._make(index, sentences, target, random)
        document = np.searchsorted(self._boundaries, begin)
        return sample, SampleNote(
            epoch=int(self._epochs[index]),
            epochs=self._num_epochs,
            documents=int(self._boundaries[document] == begin),
            padding=int((sample["padding_mask"] == 0).sum()),
            truncated=int(sample["truncated"]),
        )

    def _make(
        self,
        index: int,
        sentences: list[NDArray[np.int64]],
        target: int,
        random: np.random.RandomState,
    ) -> dict[str, Tensor]:
        """Returns sample `index` from its sentences, with `padding_mask` (1 at tokens) and
        `truncated` among its fields.
        """
        raise NotImplementedError


def padded(tokens: NDArray[np.int64], length: int, fill: int) -> NDArray[np.int64]:
    """Returns the tokens, filled up to `length`."""
    whole = np.full(length, fill, np.int64)
    whole[: len(tokens)] = tokens
    return whole
