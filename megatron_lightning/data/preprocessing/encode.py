"""From blocks of records to token bytes, as they stand in the file. This runs in the workers."""

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import numpy as np

from megatron_lightning.data.preprocessing.options import PreprocessOptions
from megatron_lightning.data.preprocessing.records import Block, Complaint, texts_of
from megatron_lightning.data.preprocessing.sentences import splitter
from megatron_lightning.data.preprocessing.word_cache import (
    Encode,
    WordCache,
    cuts_words,
)
from megatron_lightning.data.tokenizer import ByteTokenizer, FileTokenizer, Tokenizer

_TEXTS = 64  # encoded at a time; more would leave the processor's cache


class Job(NamedTuple):
    """A block, and where it comes from."""

    block: Block
    source: int
    begin: int
    """Beginning of the stretch of the source that its records are numbered in."""


class EncodedField(NamedTuple):
    """The documents of one field."""

    tokens: bytes
    lengths: bytes
    """int32, tokens of each sequence."""
    sequences: bytes
    """int64, sequences of each document."""


class Encoded(NamedTuple):
    """What became of a `Job`."""

    source: int
    begin: int
    fields: list[EncodedField]
    complaints: list[tuple[int, str]]
    """Number of each bad record, and what is wrong with it."""


class BlockEncoder:
    """Tokenizes blocks.

    Args:
        tokenizer: the tokenizer.
        options: how texts become a corpus.
        dtype: token type of the corpus.
    """

    def __init__(self, tokenizer: Tokenizer, options: PreprocessOptions, dtype: np.dtype) -> None:
        self._options, self._dtype = options, dtype
        self._encode = raw_encoder(tokenizer, dtype)
        self._eod = np.array(tokenizer.eod_id, dtype).tobytes() if options.append_eod else b""
        self._split = (
            None
            if options.sentences == "whole"
            else splitter(options.sentences, options.language, keep_newlines=options.keep_newlines)
        )

    def __call__(self, job: Job) -> Encoded:
        """Returns the documents of a block, or of its beginning when a bad record ends the run."""
        complaints: list[tuple[int, str]] = []
        documents: list[list[list[str]]] = [[] for _ in self._options.fields]
        for number, record in job.block.records():
            found = [texts_of(record, field) for field in self._options.fields]
            bad = next((entry for entry in found if isinstance(entry, Complaint)), None)
            if bad is not None:
                complaints.append((number, bad.reason))
                if self._options.on_bad_line == "fail":
                    break
                continue
            for field, entry in zip(documents, found, strict=True):
                assert not isinstance(entry, Complaint)
                field.append(self._sentences(entry))
        fields = [self._encode_field(field) for field in documents]
        return Encoded(job.source, job.begin, fields, complaints)

    def _sentences(self, texts: list[str]) -> list[str]:
        """Splits a text; what comes as a list is split already."""
        return texts if self._split is None or len(texts) != 1 else self._split(texts[0])

    def _encode_field(self, documents: list[list[str]]) -> EncodedField:
        encoded = iter(self._encode([text for texts in documents for text in texts]))
        tokens: list[bytes] = []
        lengths: list[int] = []
        sequences: list[int] = []
        for texts in documents:
            found = [raw for raw in (next(encoded) for _ in texts) if raw]
            if found:
                found[-1] += self._eod
            tokens += found
            lengths += map(len, found)
            sequences.append(len(found))
        return EncodedField(
            b"".join(tokens),
            (np.array(lengths, np.int64) // self._dtype.itemsize).astype(np.int32).tobytes(),
            np.array(sequences, np.int64).tobytes(),
        )


def raw_encoder(tokenizer: Tokenizer, dtype: np.dtype) -> Encode:
    """Returns the fastest function from texts to token bytes with the ids of this tokenizer."""
    if isinstance(tokenizer, ByteTokenizer):
        return partial(_encode_bytes, dtype)
    plain = partial(_encode_plain, tokenizer, dtype)
    if isinstance(tokenizer, FileTokenizer):
        description = tokenizer.description()
        if cuts_words(description):
            return WordCache(plain, [token["content"] for token in description["added_tokens"]])
    return plain


def _encode_bytes(dtype: np.dtype, texts: Sequence[str]) -> list[bytes]:
    return [np.frombuffer(text.encode(), np.uint8).astype(dtype).tobytes() for text in texts]


def _encode_plain(tokenizer: Tokenizer, dtype: np.dtype, texts: Sequence[str]) -> list[bytes]:
    found: list[bytes] = []
    for at in range(0, len(texts), _TEXTS):
        batch = tokenizer.encode_batch(texts[at : at + _TEXTS])
        found += [np.array(ids, dtype).tobytes() for ids in batch]
    return found
