"""The indexed token format: a `.bin` file of tokens and an `.idx` file that describes it.

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
from typing import NamedTuple

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
_AGAIN = "the file is damaged: copy it again, or write the pair again"


class Index(NamedTuple):
    """The checked content of an `.idx` file."""

    dtype: np.dtype
    """Type of the tokens."""
    lengths: NDArray[np.int32]
    """Tokens in each sequence, (S,)."""
    boundaries: NDArray[np.int64]
    """Sequence index at which each document begins, and S; (documents + 1,)."""
    pointers: NDArray[np.int64]
    """Byte at which each sequence begins, (S,)."""
    num_tokens: int
    """Tokens of all sequences."""


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


def parse_index(name: str, raw: NDArray[np.uint8]) -> Index:
    """Returns the content of an index file as views of its bytes, after checking all of it.

    Args:
        name: of the file, for errors.
        raw: its bytes, shape (size,).

    Raises:
        ValueError: the bytes are no index, or contradict each other.
    """
    dtype, sequences, boundary_count = _parse_header(name, raw)
    at = HEADER.size
    lengths = raw[at : at + 4 * sequences].view("<i4")
    at += 4 * sequences
    pointers = raw[at : at + 8 * sequences].view("<i8")
    at += 8 * sequences
    boundaries = raw[at : at + 8 * boundary_count].view("<i8")
    _check_boundaries(name, boundaries, sequences)
    tokens = _check_pointers(name, lengths, pointers, dtype.itemsize)
    return Index(dtype, lengths, boundaries, pointers, tokens)


def check_pair(bin_name: str, bin_size: int, idx_name: str, index: Index) -> None:
    """Refuses a token file whose size is not what the index describes.

    Raises:
        ValueError: with both sizes.
    """
    expected = index.num_tokens * index.dtype.itemsize
    if bin_size != expected:
        raise ValueError(
            f"{bin_name} has {bin_size} bytes, but {idx_name} describes {expected} "
            f"({index.num_tokens} tokens of {index.dtype.name}): one of them is damaged or cut "
            "short, or they belong to different corpora; copy or write both again"
        )


def _parse_header(name: str, raw: NDArray[np.uint8]) -> tuple[np.dtype, int, int]:
    """Returns dtype, sequence count and boundary count after checking header and file size."""
    size = len(raw)
    if size < HEADER.size:
        raise ValueError(f"{name} has {size} bytes; an index has at least {HEADER.size}; {_AGAIN}")
    magic, version, code, sequences, boundaries = HEADER.unpack(raw[: HEADER.size].tobytes())
    if magic != MAGIC:
        raise ValueError(
            f"{name} begins with {magic!r}, an index with {MAGIC!r}: not an index file; give the "
            "path of a .bin/.idx pair without suffix"
        )
    if version != VERSION:
        raise ValueError(
            f"{name} has version {version}; version {VERSION} can be read: write it again with "
            "`megatron-lightning preprocess` or Megatron's own tools"
        )
    if code not in DTYPE_CODES:
        raise ValueError(f"{name} has dtype code {code}; known are {sorted(DTYPE_CODES)}; {_AGAIN}")
    expected = HEADER.size + 12 * sequences + 8 * boundaries
    if size == expected + sequences and sequences:
        raise ValueError(
            f"{name} has {size} bytes, {sequences} more than its {expected}: it is a multimodal "
            "index (one mode byte a sequence), which is not supported; use a text corpus"
        )
    if size != expected:
        raise ValueError(
            f"{name} has {size} bytes, but {sequences} sequences and {boundaries} document "
            f"boundaries need {expected}: {_AGAIN}"
        )
    return DTYPE_CODES[code], sequences, boundaries


def _check_boundaries(name: str, boundaries: NDArray[np.int64], sequences: int) -> None:
    """Refuses document boundaries that do not run from 0 to the number of sequences."""
    if len(boundaries) == 0 or boundaries[0] != 0 or boundaries[-1] != sequences:
        ends = f"{boundaries[0]} to {boundaries[-1]}" if len(boundaries) else "missing"
        raise ValueError(
            f"{name}: document boundaries are {ends}, must run from 0 to {sequences}: {_AGAIN}"
        )
    # Compared, not subtracted: a difference of damaged values may wrap around.
    falls = np.flatnonzero(boundaries[1:] < boundaries[:-1])
    if len(falls):
        at = int(falls[0])
        raise ValueError(
            f"{name}: document boundaries decrease from {boundaries[at]} to {boundaries[at + 1]} "
            f"at document {at}: {_AGAIN}"
        )


def _check_pointers(
    name: str, lengths: NDArray[np.int32], pointers: NDArray[np.int64], itemsize: int
) -> int:
    """Refuses pointers that are not the running sum of lengths; returns the number of tokens."""
    total = 0
    for begin in range(0, len(lengths), _CHECK_CHUNK):
        part = lengths[begin : begin + _CHECK_CHUNK].astype(np.int64)
        given = pointers[begin : begin + _CHECK_CHUNK]
        if (part < 0).any():
            at = int(np.argmax(part < 0))
            raise ValueError(
                f"{name}: negative sequence length {part[at]} of sequence {begin + at}: {_AGAIN}"
            )
        ends = total + np.cumsum(part)
        due = (ends - part) * itemsize
        if not np.array_equal(given, due):
            at = int(np.argmax(given != due))
            raise ValueError(
                f"{name}: sequence pointers are not the running sum of the sequence lengths: "
                f"sequence {begin + at} points to byte {given[at]}, must be {due[at]}: {_AGAIN}"
            )
        total = int(ends[-1])
    return total
