"""Writes the corpora of the fields, with counts and digests for their data cards.

All pairs and cards appear at the end, or none: when something goes wrong after the first pair has
appeared, those that have are removed again.
"""

import dataclasses
import hashlib
import os
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np

from megatron_lightning import __version__
from megatron_lightning.data.card import DataCard, card_path, file_digest, write_card
from megatron_lightning.data.indexed import IndexedDataset, IndexedDatasetWriter, bin_path, idx_path
from megatron_lightning.data.preprocessing.encode import EncodedField
from megatron_lightning.data.preprocessing.options import PreprocessOptions
from megatron_lightning.data.tokenizer import Tokenizer

_COPY_BYTES = 16 << 20


@dataclasses.dataclass(kw_only=True)
class Counts:
    """What is in a pair of files."""

    documents: int = 0
    sequences: int = 0
    tokens: int = 0
    empty_documents: int = 0
    bin_bytes: int = 0
    idx_bytes: int = 0
    bin_sha256: str = ""
    idx_sha256: str = ""


def prefixes(prefix: str | os.PathLike[str], options: PreprocessOptions) -> list[str]:
    """Returns the path of each field's corpus without suffix: `prefix` itself for one field, else
    with Megatron's ending `_FIELD_document` or `_FIELD_sentence`.
    """
    if len(options.fields) == 1:
        return [os.fspath(prefix)]
    level = "document" if options.sentences == "whole" else "sentence"
    return [f"{os.fspath(prefix)}_{field}_{level}" for field in options.fields]


class CorporaWriter:
    """A context manager that writes a pair for each of several prefixes; without `finish` nothing
    appears.

    Args:
        prefixes: paths without suffix.
        dtype: token type.
    """

    def __init__(self, prefixes: Sequence[str], dtype: np.dtype) -> None:
        self._prefixes, self._dtype = list(prefixes), dtype
        self.counts = [Counts() for _ in prefixes]
        self._hashes = [hashlib.sha256() for _ in prefixes]
        self._writers: list[IndexedDatasetWriter] = []
        self._stack = ExitStack()

    def __enter__(self) -> "CorporaWriter":
        """Opens the files."""
        with ExitStack() as stack:
            for prefix in self._prefixes:
                writer = IndexedDatasetWriter(prefix, self._dtype)
                stack.callback(writer.abort)  # removes what was not finalized
                self._writers.append(writer)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *failure: object) -> None:
        """Removes the temporary files."""
        self._stack.close()

    def add(self, fields: Sequence[EncodedField]) -> None:
        """Appends documents, one entry a prefix."""
        for writer, counts, digest, field in zip(
            self._writers, self.counts, self._hashes, fields, strict=True
        ):
            lengths = np.frombuffer(field.lengths, np.int32)
            sequences = np.frombuffer(field.sequences, np.int64)
            writer.add_encoded(field.tokens, lengths, sequences)
            digest.update(field.tokens)
            counts.documents += len(sequences)
            counts.sequences += len(lengths)
            counts.tokens += len(field.tokens) // self._dtype.itemsize
            counts.empty_documents += int((sequences == 0).sum())
            counts.bin_bytes += len(field.tokens)

    def copy(self, number: int, part: str, expected: Counts) -> None:
        """Appends a finished pair to prefix `number`.

        Raises:
            ValueError: it is not what it was when it was finished.
        """
        data, digest = IndexedDataset(part), hashlib.sha256()
        size = data.num_tokens * data.dtype.itemsize
        for at in range(0, size, _COPY_BYTES):
            content = data.read_bytes(at, min(_COPY_BYTES, size - at)).data
            digest.update(content)
            self._hashes[number].update(content)
        found = (digest.hexdigest(), file_digest(idx_path(part)))
        if found != (expected.bin_sha256, expected.idx_sha256):
            raise ValueError(
                f"{part}.bin or .idx is not what was written: delete them to make the part again"
            )
        self._writers[number].add_dataset(data)
        counts = self.counts[number]
        counts.documents += expected.documents
        counts.sequences += expected.sequences
        counts.tokens += expected.tokens
        counts.empty_documents += expected.empty_documents
        counts.bin_bytes += expected.bin_bytes

    def finish(self, cards: Sequence[DataCard] | None) -> list[DataCard]:
        """Makes the pairs appear, with their cards.

        Args:
            cards: what is to be said besides the counts; None writes no cards.

        Returns:
            The cards with the counts.
        """
        done: list[str] = []
        finished: list[DataCard] = []
        try:
            for number, prefix in enumerate(self._prefixes):
                card_path(prefix).unlink(missing_ok=True)  # it describes the pair that is replaced
                self._writers[number].finalize()
                done.append(prefix)
                counts = self.counts[number]
                counts.bin_sha256 = self._hashes[number].hexdigest()
                counts.idx_sha256 = file_digest(idx_path(prefix))
                counts.idx_bytes = idx_path(prefix).stat().st_size
            for number, prefix in enumerate(self._prefixes if cards is not None else []):
                assert cards is not None
                card = dataclasses.replace(cards[number], **dataclasses.asdict(self.counts[number]))
                write_card(prefix, card)
                finished.append(card)
        except BaseException:
            for prefix in done:
                for path in (idx_path(prefix), bin_path(prefix), card_path(prefix)):
                    path.unlink(missing_ok=True)
            raise
        return finished


def blank_card(
    tokenizer: Tokenizer,
    options: PreprocessOptions,
    field: str,
    dtype: np.dtype,
    *,
    sources: list[dict[str, Any]],
    skipped: int,
) -> DataCard:
    """Returns a data card without the counts."""
    return DataCard(
        sources=sources,
        tokenizer=tokenizer.name,
        tokenizer_digest=tokenizer.digest,
        vocab_size=tokenizer.vocab_size,
        eod_id=tokenizer.eod_id,
        special_ids=dict(tokenizer.special_ids),
        arguments=options.record() | {"field": field},
        skipped_lines=skipped,
        dtype=dtype.name,
        package_version=__version__,
        **dataclasses.asdict(Counts()),
    )


def write_skipped(prefix: str | os.PathLike[str], places: Sequence[str]) -> None:
    """Writes `prefix.skipped.txt`, a line for each record that was left out; with none, an old list
    is removed.
    """
    path = Path(f"{os.fspath(prefix)}.skipped.txt")
    if not places:
        path.unlink(missing_ok=True)
        return
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    partial.write_text("".join(f"{place}\n" for place in places), encoding="utf-8")
    partial.replace(path)
