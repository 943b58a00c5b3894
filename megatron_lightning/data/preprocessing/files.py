"""Sources that are files of text: lines, plain or compressed, and whole texts.

Every source has a length, about in bytes, and gives what begins in any stretch of it. So inputs can
be cut into parts at any place: a line, row group or file belongs to the part in which it begins.
Compressed files and whole texts are not cut.
"""

import hashlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, Protocol

from megatron_lightning.data.card import file_digest
from megatron_lightning.data.preprocessing.compressed import (
    damage_errors,
    is_compressed,
    unpack,
)
from megatron_lightning.data.preprocessing.records import Block, LineBlock, TextBlock

BLOCK_BYTES = 1 << 19
"""Text handed to a worker at a time."""
LONGEST_LINE_BYTES = 1 << 30
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


class LocalFile:
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


class LineFile(LocalFile):
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


class CompressedLineFile(LocalFile):
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


class TextFile(LocalFile):
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
