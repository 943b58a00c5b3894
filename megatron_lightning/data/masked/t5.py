"""T5 samples: spans of the text are replaced by sentinels, and the decoder gives the spans back.

Samples are Megatron-Core's, number for number, less its faults (see `spans.py`; and the padding of
the tokens is the padding token). Each sample depends on seed and index alone.
"""

import os
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from megatron_lightning.data.indexed import IndexedDataset
from megatron_lightning.data.masked.options import T5DataConfig
from megatron_lightning.data.masked.sentences import NO_LABEL, SentenceDataset, padded
from megatron_lightning.data.masked.spans import SpanChooser
from megatron_lightning.data.masked.vocabulary import T5Vocabulary


class T5Dataset(SentenceDataset):
    """Samples for an encoder and a decoder.

    The encoder reads `text <0> text <1> text`, the decoder `bos <0> span <1> span`, with the labels
    `<0> span <1> span eos`.

    Items are dicts of int64 tensors: `tokens` (of the encoder) and `padding_mask` of
    `seq_length`; `decoder_tokens`, `decoder_padding_mask` and `labels` (-1 behind the end) of
    `config.decoder_seq_length`; float32 `loss_mask` of the same; and the scalar `truncated`. Masks
    are 1 at tokens, 0 behind the end.

    Args:
        indexed: corpus with a sequence a sentence.
        documents: the documents to draw from (a split).
        num_samples: samples that will be used; None means one pass over the documents.
        seq_length: tokens of an encoder sample.
        seed: of target lengths, order and masking, 0 to 2^32 - 1.
        vocabulary: special tokens, sentinels and word boundaries.
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
        vocabulary: T5Vocabulary,
        config: T5DataConfig | None = None,
        *,
        cache_dir: str | os.PathLike[str] | None = None,
        name: str = "data",
    ) -> None:
        config = config or T5DataConfig()
        super().__init__(
            indexed,
            documents,
            num_samples,
            seq_length,
            seed,
            config,
            extra_tokens=2,
            min_sentences=1,
            cache_dir=cache_dir,
            name=name,
        )
        self._vocabulary, self._decoder_length = vocabulary, config.decoder_seq_length
        self._chooser = SpanChooser(config.masking, vocabulary, contiguous=True)

    def _make(
        self,
        index: int,
        sentences: list[NDArray[np.int64]],
        target: int,
        random: np.random.RandomState,
    ) -> dict[str, Tensor]:
        """Returns the sample.

        Raises:
            ValueError: the sample has more spans than there are sentinels, or its spans don't fit
                into the decoder.
        """
        text = np.concatenate([np.zeros(0, np.int64), *sentences])
        tokens, truncated = text[:target], len(text) > target
        self._vocabulary.check_ids(tokens, self._indexed.prefix)
        spans = sorted(self._chooser.choose(tokens, target, random))
        encoder, decoder = corrupt(tokens, spans, self._vocabulary.sentinel_ids)
        self._check(index, spans, len(decoder))
        inputs = np.concatenate([[self._vocabulary.bos_id], decoder])
        outputs = np.concatenate([decoder, [self._vocabulary.eos_id]])
        length, decoder_length = self._seq_length, self._decoder_length
        pad = self._vocabulary.pad_id
        inside = (np.arange(decoder_length) < len(inputs)).astype(np.int64)
        return {
            "tokens": torch.from_numpy(padded(encoder, length, pad)),
            "padding_mask": torch.from_numpy((np.arange(length) < len(encoder)).astype(np.int64)),
            "decoder_tokens": torch.from_numpy(padded(inputs, decoder_length, pad)),
            "decoder_padding_mask": torch.from_numpy(inside),
            "labels": torch.from_numpy(padded(outputs, decoder_length, NO_LABEL)),
            "loss_mask": torch.from_numpy(inside.astype(np.float32)),
            "truncated": torch.tensor(int(truncated)),
        }

    def _check(self, index: int, spans: list[list[int]], decoder: int) -> None:
        sentinels = len(self._vocabulary.sentinel_ids)
        most = int(self._chooser.limit(self._seq_length - 2, self._seq_length - 2))
        if len(spans) > sentinels:
            raise ValueError(
                f"sample {index} of {self._indexed.prefix} has {len(spans)} spans, but the "
                f"tokenizer has {sentinels} sentinels: give it up to {most} of them, or lower "
                "seq_length or masking.probability"
            )
        if decoder + 1 > self._decoder_length:
            raise ValueError(
                f"decoder_seq_length={self._decoder_length}: the spans of sample {index} of "
                f"{self._indexed.prefix} need {decoder + 1} tokens with their sentinels. "
                f"{2 * most + 1} are enough for every sample of seq_length={self._seq_length}; or "
                "lower masking.probability"
            )


def corrupt(
    tokens: NDArray[np.int64], spans: Sequence[Sequence[int]], sentinel_ids: Sequence[int]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Returns the text with sentinels for spans, and the spans behind their sentinels.

    Args:
        tokens: the text, (S,).
        spans: positions of the tokens of each span, ascending.
        sentinel_ids: as many as there are spans, or more.
    """
    none = np.zeros(0, np.int64)
    encoder, decoder, begin = [none], [none], 0
    for span, sentinel in zip(spans, sentinel_ids, strict=False):
        encoder += [tokens[begin : span[0]], np.array([sentinel])]
        decoder += [np.array([sentinel]), tokens[span[0] : span[-1] + 1]]
        begin = span[-1] + 1
    encoder.append(tokens[begin:])
    return np.concatenate(encoder), np.concatenate(decoder)
