"""Sources that are files: lines (plain or compressed), whole texts, and Parquet tables.

Every source has a length, about in bytes, and gives what begins in any stretch of it. So inputs can
be cut into parts at any place: a line, row group or file belongs to the part in which it begins.
Compressed files and whole texts are not cut.
"""

import hashlib
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO, Protocol

from megatron_lightning.data.card import file_digest
from megatron_lightning.data.preprocessing.compressed import (
    damage_errors,
    is_compressed,
    unpack,
)
from megatron_lightning.data.preprocessing.records import Block, LineBlock, TableBlock, TextBlock

BLOCK_BYTES = 1 << 19
"""Text handed to a worker at a time."""
LONGEST_LINE_BYTES = 1 << 30
_ROWS = 256  # of a table, handed to a worker at a time
_READ_BYTES = 16 << 20


class Source(Protocol):
    """Something that documents are read from."""

    name: str
    size: int
    """Length, about in bytes."""

    def blocks(self, begin: int, end: int) -> Iterator[Block]:
        """Yields what begins in this stretch of the source, in order.

        Raises:
            ValueError: the source is damaged; the message names it and the place.
        """
        ...

    def place(self, begin: int, number: int) -> str:
        """Returns file and line number, or row, of record `number` of `blocks(begin, ...)`."""
        ...

    def fingerprint(self, begin: int, end: int) -> str:
        """Returns the digest of what `blocks` reads there."""
        ...

    def describe(self) -> list[dict[str, Any]]:
        """Returns the entries of the data card: `path`, `bytes` and digest of each file."""
        ...


class _File:
    """What all files have in common."""

    def __init__(self, path: Path) -> None:
        self.path, self.name = path, str(path)
        self._found = _identity(path)
        self.size = self._found[0]

    def place(self, begin: int, number: int) -> str:
        """Returns file and line number."""
        return f"{self.name}:{number}"

    def fingerprint(self, begin: int, end: int) -> str:
        """Returns the digest of the file, which is read whole or not at all."""
        return self._digest()

    def describe(self) -> list[dict[str, Any]]:
        """Returns path, size and digest.

        Raises:
            ValueError: the file is not the one any more that was opened.
        """
        return [{"path": self.name, "bytes": self._found[0], "sha256": self._digest()}]

    def _digest(self) -> str:
        digest = file_digest(self.path)
        if _identity(self.path) != self._found:
            raise ValueError(f"{self.name} was changed while it was read: run again")
        return digest


class LineFile(_File):
    """A plain file with a document a line.

    Args:
        path: the file.
        json: whether a line is a JSON object, or else a text.
    """

    def __init__(self, path: Path, *, json: bool) -> None:
        super().__init__(path)
        self._json = json
        self._lines_before = {0: 0}

    def blocks(self, begin: int, end: int) -> Iterator[Block]:
        """Yields the lines whose first byte is in [begin, end)."""
        with self.path.open("rb") as file:
            first, stop = _line_start(file, begin), _line_start(file, end)
            file.seek(first)
            yield from _line_blocks(file, self.name, self._json, stop - first)

    def place(self, begin: int, number: int) -> str:
        """Returns file and line number, counting the lines before `begin`."""
        if begin not in self._lines_before:
            with self.path.open("rb") as file:
                stop = _line_start(file, begin)
                file.seek(0)
                lines = sum(content.count(b"\n") for content in _pieces(file, stop))
            self._lines_before[begin] = lines
        return f"{self.name}:{self._lines_before[begin] + number}"

    def fingerprint(self, begin: int, end: int) -> str:
        """Returns the digest of these lines."""
        digest = hashlib.sha256()
        with self.path.open("rb") as file:
            first, stop = _line_start(file, begin), _line_start(file, end)
            file.seek(first)
            for content in _pieces(file, stop - first):
                digest.update(content)
        return digest.hexdigest()


class CompressedLineFile(_File):
    """A gzip or Zstandard file with a document a line; it is read from its beginning."""

    def __init__(self, path: Path, *, json: bool) -> None:
        super().__init__(path)
        self._json = json

    def blocks(self, begin: int, end: int) -> Iterator[Block]:
        """Yields all lines if the beginning of the file is asked for."""
        if begin > 0:
            return
        lines, before = 1, 0
        try:
            with self.path.open("rb") as packed, unpack(self.path, packed) as file:
                for block in _line_blocks(file, self.name, self._json, None):
                    at = packed.tell()
                    yield block._replace(length=at - before)
                    lines, before = block.first + block.content.count(b"\n"), at
        except damage_errors() as error:
            raise ValueError(
                f"{self.name}: it cannot be unpacked from about line {lines} on ({error})"
            ) from error


class TextFile(_File):
    """A file that is one document, which may be empty; compressed or not."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.size = max(self.size, 1)  # so that it begins somewhere

    def blocks(self, begin: int, end: int) -> Iterator[Block]:
        """Yields the text if the beginning of the file is asked for."""
        if begin > 0:
            return
        if not is_compressed(self.path):
            yield TextBlock(self.path.read_bytes(), self.size)
            return
        try:
            with self.path.open("rb") as packed, unpack(self.path, packed) as file:
                yield TextBlock(file.read(), self.size)
        except damage_errors() as error:
            raise ValueError(f"{self.name}: it cannot be unpacked ({error})") from error


class ParquetFile(_File):
    """A Parquet table; a row group belongs to the part in which it begins.

    Args:
        path: the file.
        fields: the fields that will be read, see `PreprocessOptions`.

    Raises:
        ValueError: it is no Parquet file, or lacks the column of a field.
    """

    def __init__(self, path: Path, fields: Sequence[str]) -> None:
        super().__init__(path)
        import pyarrow
        from pyarrow import parquet

        self._errors: tuple[type[Exception], ...] = (pyarrow.ArrowException, OSError)
        try:
            with parquet.ParquetFile(path) as table:
                meta, schema = table.metadata, table.schema_arrow
                rows = [meta.row_group(i).num_rows for i in range(meta.num_row_groups)]
        except self._errors as error:
            raise ValueError(f"{path} is no Parquet file: {error}") from error
        self._columns = columns_of(fields, schema.names, self.name)
        self._first_rows = [sum(rows[:i]) for i in range(len(rows))]
        self._rows = sum(rows)

    def blocks(self, begin: int, end: int) -> Iterator[Block]:
        """Yields the rows of the row groups that begin there."""
        from pyarrow import parquet

        groups = [
            number
            for number, first in enumerate(self._first_rows)
            if begin <= self.size * first // max(self._rows, 1) < end
        ]
        at = self._first_rows[groups[0]] if groups else 0
        try:
            with parquet.ParquetFile(self.path) as table:
                for batch in table.iter_batches(
                    _ROWS, row_groups=groups, columns=self._columns, use_threads=False
                ):
                    columns = dict(zip(batch.schema.names, batch.columns, strict=True))
                    yield TableBlock(
                        columns, batch.num_rows, at, self.size * batch.num_rows // self._rows
                    )
                    at += batch.num_rows
        except self._errors as error:
            raise ValueError(
                f"{self.name}: it cannot be read from row {at} on ({error})"
            ) from error

    def place(self, begin: int, number: int) -> str:
        """Returns file and row, counted from 0."""
        return f"{self.name}, row {number}"


def columns_of(fields: Sequence[str], known: Sequence[str], name: str) -> list[str]:
    """Returns the columns of a table that hold the fields: of the same name, or its first part.

    Raises:
        ValueError: there is no such column.
    """
    columns = [field if field in known else field.split(".")[0] for field in fields]
    if missing := [f for f, column in zip(fields, columns, strict=True) if column not in known]:
        raise ValueError(
            f'{name} has no column for the field "{missing[0]}"; it has {", ".join(known)}'
        )
    return list(dict.fromkeys(columns))


def _identity(path: Path) -> tuple[int, int]:
    found = os.stat(path)
    return found.st_size, found.st_mtime_ns


def _line_start(file: BinaryIO, at: int) -> int:
    """Returns where the first line begins that begins at byte `at` or behind it."""
    if at == 0:
        return 0
    file.seek(at - 1)
    while content := file.readline(_READ_BYTES):
        if content.endswith(b"\n"):
            break
    return file.tell()


def _pieces(file: BinaryIO, size: int) -> Iterator[bytes]:
    """Yields the next `size` bytes."""
    while size > 0 and (content := file.read(min(size, _READ_BYTES))):
        size -= len(content)
        yield content


def _line_blocks(file: BinaryIO, name: str, json: bool, size: int | None) -> Iterator[LineBlock]:
    """Yields the lines of the next `size` bytes (None: to the end), numbered from 1."""
    first, left = 1, size
    while left is None or left > 0:
        content = file.read(BLOCK_BYTES if left is None else min(BLOCK_BYTES, left))
        if not content:
            return
        pieces = [content]
        while not pieces[-1].endswith(b"\n") and (rest := file.readline(_READ_BYTES)):
            pieces.append(rest)
            if sum(map(len, pieces)) > LONGEST_LINE_BYTES:
                line = first + content.count(b"\n")
                raise ValueError(
                    f"{name}:{line}: the line is longer than {LONGEST_LINE_BYTES:,} bytes: is "
                    "this a file of text lines?"
                )
        whole = b"".join(pieces)
        block = LineBlock(whole, first, json, len(whole))
        first += block.content.count(b"\n")
        left = None if left is None else left - len(block.content)
        yield block
