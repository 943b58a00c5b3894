"""Reader of the indexed token format: a `.bin` file of tokens and an `.idx` file that describes it.

The layout is Megatron-Core's, so that existing corpora work unchanged. All integers are
little-endian.

`.bin`  the tokens of all sequences, one after the other, no header
`.idx`  header of 34 bytes: magic (9 bytes), version u64 = 1, dtype code u8, sequence count S u64,
        boundary count D u64; then sequence lengths int32[S] in tokens, sequence pointers int64[S]
        in bytes, document boundaries int64[D]

A document is a run of sequences; boundary d is the sequence index at which document d begins, and
the last boundary is S, so that D is the number of documents + 1. The multimodal variant (one more
byte a sequence) is recognised and refused. Nothing in these files is ever unpickled.
"""

import os
import struct
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

MAGIC = b"MMIDIDX\x00\x00"
VERSION = 1
HEADER = struct.Struct("<9sQBQQ")  # magic, version, dtype code, sequences, document boundaries
DTYPE_CODES: dict[int, np.dtype] = {
    1: np.dtype("u1"),
    2: np.dtype("i1"),
    3: np.dtype("<i2"),
    4: np.dtype("<i4"),
    5: np.dtype("<i8"),
    6: np.dtype("<f8"),
    7: np.dtype("<f4"),
    8: np.dtype("<u2"),
}
_CHECK_CHUNK = 1 << 22  # sequences checked at a time when a file is opened


def best_dtype(vocab_size: int) -> np.dtype:
    """Returns the token type Megatron's writer uses: uint16 below 65500 ids, else int32.

    Raises:
        ValueError: `vocab_size` is not positive or does not fit int32.
    """
    if not 0 < vocab_size <= 2**31:
        raise ValueError(f"vocab_size={vocab_size} must be between 1 and {2**31}")
    return DTYPE_CODES[8] if vocab_size < 65500 else DTYPE_CODES[4]


def bin_path(prefix: str | os.PathLike[str]) -> Path:
    """Returns the path of the token file of `prefix` (the path without suffix)."""
    return Path(f"{os.fspath(prefix)}.bin")


def idx_path(prefix: str | os.PathLike[str]) -> Path:
    """Returns the path of the index file of `prefix`."""
    return Path(f"{os.fspath(prefix)}.idx")


def missing_files(prefix: str | os.PathLike[str]) -> list[Path]:
    """Returns those of the two files of `prefix` that do not exist."""
    return [path for path in (bin_path(prefix), idx_path(prefix)) if not path.is_file()]


class IndexedDataset:
    """Memory-mapped, read-only view of a `.bin`/`.idx` pair.

    Args:
        prefix: path of the pair without suffix.

    Raises:
        ValueError: a file is damaged or the two do not belong together; the message names the path
            and both sizes.
        FileNotFoundError: a file is missing.
    """

    def __init__(self, prefix: str | os.PathLike[str]) -> None:
        self.prefix = os.fspath(prefix)
        missing = missing_files(self.prefix)
        if missing:
            names = " and ".join(str(path) for path in missing)
            raise FileNotFoundError(
                f"no {names}: give the path of a .bin/.idx pair without its suffix"
            )
        index = idx_path(self.prefix)
        self._dtype, sequences, boundaries = _read_header(index)
        raw = np.memmap(index, mode="r", dtype=np.uint8)
        at = HEADER.size
        self._lengths = raw[at : at + 4 * sequences].view("<i4")
        at += 4 * sequences
        self._pointers = raw[at : at + 8 * sequences].view("<i8")
        at += 8 * sequences
        self._boundaries = raw[at : at + 8 * boundaries].view("<i8")
        _check_boundaries(index, self._boundaries, sequences)
        tokens = _check_pointers(index, self._lengths, self._pointers, self._dtype.itemsize)
        self._tokens = _map_tokens(bin_path(self.prefix), index, tokens, self._dtype)

    def __len__(self) -> int:
        """Number of sequences."""
        return len(self._lengths)

    def __reduce__(self) -> tuple[type["IndexedDataset"], tuple[str]]:
        """Travels to worker processes as its path; each of them maps the files anew."""
        return IndexedDataset, (self.prefix,)

    @property
    def dtype(self) -> np.dtype:
        """Type of the tokens on disk."""
        return self._dtype

    @property
    def num_tokens(self) -> int:
        """Number of tokens of all sequences."""
        return len(self._tokens)

    @property
    def sequence_lengths(self) -> NDArray[np.int32]:
        """Tokens in each sequence, shape (sequences,)."""
        return self._lengths

    @property
    def document_indices(self) -> NDArray[np.int64]:
        """Sequence index at which each document begins, and the number of sequences; (documents +
        1,).
        """
        return self._boundaries

    def get(self, index: int, offset: int = 0, length: int | None = None) -> NDArray:
        """Returns `length` tokens of sequence `index` from `offset` on, as a read-only view of the
        file.

        Args:
            index: sequence number, 0 to len(self) - 1.
            offset: first token, counted within the sequence.
            length: number of tokens; None means to the end of the sequence.

        Raises:
            IndexError: the sequence does not exist or does not hold the tokens asked for.
        """
        if not 0 <= index < len(self):
            raise IndexError(f"sequence {index} of {self.prefix}, which has {len(self)}")
        held = int(self._lengths[index])
        length = held - offset if length is None else length
        if not 0 <= offset <= offset + length <= held:
            raise IndexError(
                f"tokens {offset} to {offset + length} of sequence {index} of {self.prefix}, "
                f"which has {held} tokens"
            )
        begin = int(self._pointers[index]) // self._dtype.itemsize + offset
        return self._tokens[begin : begin + length]


def _read_header(path: Path) -> tuple[np.dtype, int, int]:
    """Returns dtype, sequence count and boundary count after checking header and file size."""
    size = path.stat().st_size
    if size < HEADER.size:
        raise ValueError(f"{path} has {size} bytes; an index has at least {HEADER.size}")
    with path.open("rb") as file:
        magic, version, code, sequences, boundaries = HEADER.unpack(file.read(HEADER.size))
    if magic != MAGIC:
        raise ValueError(
            f"{path} begins with {magic!r}, an index with {MAGIC!r}: not an index file"
        )
    if version != VERSION:
        raise ValueError(f"{path} has version {version}; version {VERSION} can be read")
    if code not in DTYPE_CODES:
        raise ValueError(f"{path} has dtype code {code}; known are {sorted(DTYPE_CODES)}")
    expected = HEADER.size + 12 * sequences + 8 * boundaries
    if size == expected + sequences and sequences:
        raise ValueError(
            f"{path} has {size} bytes, {sequences} more than its {expected}: it is a multimodal "
            "index (one mode byte a sequence), which is not supported"
        )
    if size != expected:
        raise ValueError(
            f"{path} has {size} bytes, but {sequences} sequences and {boundaries} document "
            f"boundaries need {expected}: the file is damaged; write it again"
        )
    return DTYPE_CODES[code], sequences, boundaries


def _check_boundaries(path: Path, boundaries: NDArray[np.int64], sequences: int) -> None:
    """Refuses document boundaries that do not run from 0 to the number of sequences."""
    if len(boundaries) == 0 or boundaries[0] != 0 or boundaries[-1] != sequences:
        ends = f"{boundaries[0]} to {boundaries[-1]}" if len(boundaries) else "missing"
        raise ValueError(f"{path}: document boundaries are {ends}, must run from 0 to {sequences}")
    if (np.diff(boundaries) < 0).any():
        raise ValueError(f"{path}: document boundaries decrease: the file is damaged")


def _check_pointers(
    path: Path, lengths: NDArray[np.int32], pointers: NDArray[np.int64], itemsize: int
) -> int:
    """Refuses pointers that are not the running sum of lengths; returns the number of tokens."""
    total = 0
    for begin in range(0, len(lengths), _CHECK_CHUNK):
        part = lengths[begin : begin + _CHECK_CHUNK].astype(np.int64)
        if (part < 0).any():
            raise ValueError(f"{path}: negative sequence length: the file is damaged")
        ends = total + np.cumsum(part)
        if not np.array_equal(pointers[begin : begin + _CHECK_CHUNK], (ends - part) * itemsize):
            raise ValueError(
                f"{path}: sequence pointers are not the running sum of the sequence lengths: the "
                "file is damaged"
            )
        total = int(ends[-1])
    return total


def _map_tokens(path: Path, index: Path, tokens: int, dtype: np.dtype) -> NDArray:
    """Maps the token file after checking that its size is what the index describes."""
    size, expected = path.stat().st_size, tokens * dtype.itemsize
    if size != expected:
        raise ValueError(
            f"{path} has {size} bytes, but {index} describes {expected} ({tokens} tokens of "
            f"{dtype.name}): one of them is damaged or they belong to different corpora"
        )
    if size == 0:  # an empty file cannot be mapped
        return np.empty(0, dtype)
    return np.memmap(path, mode="r", dtype=dtype)
