"""Writer of the indexed token format (see `format`).

It is atomic: the two files grow under temporary names beside their place, are flushed to disk and
renamed at the end, the index last. An interrupted run leaves no index, hence nothing that could be
taken for a corpus.
"""

import os
import uuid
from array import array
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import BinaryIO

import numpy as np
from numpy.typing import ArrayLike, DTypeLike, NDArray

from megatron_lightning.data.indexed.format import (
    DTYPE_CODES,
    HEADER,
    MAGIC,
    VERSION,
    bin_path,
    idx_path,
)
from megatron_lightning.data.indexed.reader import IndexedDataset

_COPY_BYTES = 16 << 20  # tokens copied at a time from another pair


class IndexedDatasetWriter:
    """Writes documents one after the other; `finalize` makes the pair appear.

    Used as a context manager it finalizes at the end, and removes its temporary file on an
    exception.

    Args:
        prefix: path of the pair without suffix; an existing pair is replaced at the end. The folder
            is made.
        dtype: token type on disk, see `best_dtype`.

    Raises:
        ValueError: the format has no code for `dtype`.
    """

    def __init__(self, prefix: str | os.PathLike[str], dtype: DTypeLike) -> None:
        wanted = np.dtype(dtype).newbyteorder("<")
        codes = [code for code, known in DTYPE_CODES.items() if known == wanted]
        if not codes:
            names = ", ".join(known.name for known in DTYPE_CODES.values())
            raise ValueError(
                f"dtype={wanted.name} has no code in the index format; choose of {names}"
            )
        self._code, self.dtype = codes[0], wanted
        self._prefix = os.fspath(prefix)
        bin_path(prefix).parent.mkdir(parents=True, exist_ok=True)
        self._partial = _temporary(bin_path(prefix))
        self._file: BinaryIO | None = self._partial.open("wb")
        self._lengths = array("i")  # compact: a corpus may have a billion sequences
        self._boundaries = array("q", [0])

    def __enter__(self) -> "IndexedDatasetWriter":
        """Returns the writer itself."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Finalizes, or throws everything away when leaving by an exception."""
        if kind is not None:
            self.abort()
        elif self._file is not None:
            self.finalize()

    def add_document(self, tokens: ArrayLike, lengths: Sequence[int] | None = None) -> None:
        """Appends one document.

        Args:
            tokens: token ids of the document, shape (n,).
            lengths: tokens in each of its sequences, summing to n; None makes one sequence, or none
                when the document is empty (its boundary is written all the same).

        Raises:
            ValueError: an id does not fit the token type, or the lengths do not add up.
        """
        given = np.asarray(tokens)
        if given.ndim != 1:
            raise ValueError(f"tokens has shape {given.shape}, must be one-dimensional")
        lengths = ([len(given)] if len(given) else []) if lengths is None else list(lengths)
        if sum(lengths) != len(given) or any(length < 0 for length in lengths):
            raise ValueError(
                f"lengths={lengths} must sum to the {len(given)} tokens of the document"
            )
        self._append(_convert(given, self.dtype))
        self._lengths.extend(int(length) for length in lengths)
        self._boundaries.append(len(self._lengths))

    def add_encoded(
        self, tokens: bytes, lengths: NDArray[np.int32], sequences: NDArray[np.int64]
    ) -> None:
        """Appends documents that are encoded as they stand in the file.

        Args:
            tokens: of all documents, in the token type of this writer, little-endian.
            lengths: tokens in each sequence of all documents, summing to those given.
            sequences: sequences in each document.

        Raises:
            ValueError: the numbers do not add up.
        """
        size = int(lengths.sum(dtype=np.int64)) * self.dtype.itemsize
        if size != len(tokens) or int(sequences.sum()) != len(lengths):
            raise ValueError(
                f"{len(tokens)} bytes of tokens and {len(lengths)} sequences were given, lengths "
                f"and sequences describe {size} and {int(sequences.sum())}"
            )
        self._open_file().write(tokens)
        ends = np.cumsum(sequences, dtype=np.int64) + len(self._lengths)
        self._lengths.frombytes(lengths.astype(np.intc).tobytes())
        self._boundaries.frombytes(ends.astype("q").tobytes())

    def add_dataset(self, dataset: IndexedDataset, documents: range | None = None) -> None:
        """Appends documents of a finished pair with the same token type.

        Args:
            dataset: the pair.
            documents: a run of its documents; None means all of them.

        Raises:
            ValueError: the token types differ.
        """
        if dataset.dtype != self.dtype:
            raise ValueError(
                f"{dataset.prefix} holds {dataset.dtype.name} tokens, {self._prefix} "
                f"{self.dtype.name}: preprocess one of them again with the other's tokenizer"
            )
        chosen = range(len(dataset.document_indices) - 1) if documents is None else documents
        bounds = dataset.document_indices[chosen.start : chosen.stop + 1].astype(np.int64)
        first, stop = int(bounds[0]), int(bounds[-1])
        lengths = dataset.sequence_lengths[first:stop].astype(np.intc)
        before = int(dataset.sequence_lengths[:first].sum(dtype=np.int64)) * self.dtype.itemsize
        size = int(lengths.sum(dtype=np.int64)) * self.dtype.itemsize
        for at in range(0, size, _COPY_BYTES):
            part = dataset.read_bytes(before + at, min(_COPY_BYTES, size - at))
            self._open_file().write(part.data)
        base = len(self._lengths)
        self._lengths.frombytes(lengths.tobytes())
        self._boundaries.frombytes((bounds[1:] - first + base).astype("q").tobytes())

    def finalize(self) -> None:
        """Writes the index, flushes both files and moves them into place.

        Raises:
            RuntimeError: the writer was finalized or aborted before.
        """
        file = self._open_file()
        index = idx_path(self._prefix)
        partial_index = _temporary(index)
        try:
            with partial_index.open("wb") as out:
                self._write_index(out)
                _flush(out)
            _flush(file)
            file.close()
            # A reader needs both files: with the old index gone first, no crash can pair old with
            # new.
            index.unlink(missing_ok=True)
            self._partial.replace(bin_path(self._prefix))
            partial_index.replace(index)
        except BaseException:
            partial_index.unlink(missing_ok=True)
            self.abort()
            raise
        self._file = None

    def abort(self) -> None:
        """Removes the temporary file; what stood under the prefix before is not touched."""
        if self._file is not None:
            self._file.close()
            self._file = None
        self._partial.unlink(missing_ok=True)

    def _open_file(self) -> BinaryIO:
        if self._file is None:
            raise RuntimeError(f"the writer of {self._prefix} is closed")
        return self._file

    def _append(self, tokens: NDArray) -> None:
        self._open_file().write(tokens.tobytes())

    def _write_index(self, out: BinaryIO) -> None:
        lengths = np.array(self._lengths, dtype="<i4")
        pointers = np.zeros(len(lengths), dtype="<i8")
        np.cumsum(lengths[:-1], dtype=np.int64, out=pointers[1:])
        pointers *= self.dtype.itemsize
        out.write(HEADER.pack(MAGIC, VERSION, self._code, len(lengths), len(self._boundaries)))
        out.write(lengths.tobytes())
        out.write(pointers.tobytes())
        out.write(np.array(self._boundaries, dtype="<i8").tobytes())


def _convert(tokens: NDArray, dtype: np.dtype) -> NDArray:
    """Casts to the type on disk, refusing values that would wrap around."""
    if tokens.dtype == dtype or len(tokens) == 0:
        return tokens.astype(dtype, copy=False)
    if dtype.kind in "iu":
        if tokens.dtype.kind not in "iu":
            raise ValueError(f"tokens are {tokens.dtype.name}, must be integers for {dtype.name}")
        low, high, limit = int(tokens.min()), int(tokens.max()), np.iinfo(dtype)
        if low < limit.min or high > limit.max:
            raise ValueError(
                f"token ids run from {low} to {high}, outside {dtype.name} ({limit.min} to "
                f"{limit.max}): choose the token type with best_dtype(vocab_size)"
            )
    return tokens.astype(dtype)


def _temporary(path: Path) -> Path:
    return path.with_name(f".{path.name}.{os.getpid()}-{uuid.uuid4().hex[:8]}.partial")


def _flush(file: BinaryIO) -> None:
    file.flush()
    os.fsync(file.fileno())
