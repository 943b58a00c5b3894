"""Corpora in object storage or any other file system that fsspec knows (s3://, gs://, memory://).

A token file is read in blocks, which are kept in a local folder; an index file is copied there
whole. The folder may be shared by all ranks of a node and by several runs: an entry is written
aside and renamed, its name holds the version of the remote file, and one rank fetches a block that
several ask for at once. Its size is bounded, the entries not used for longest are removed. A folder
that cannot be written is done without.
"""

import hashlib
import logging
import os
import tempfile
import time
import uuid
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from megatron_lightning.data.files import open_file_system
from megatron_lightning.data.indexed.storage import MappedFile
from megatron_lightning.data.locks import folder_lock

logger = logging.getLogger(__name__)

_LOCKS = 64  # lock files of a folder; blocks share them by their name's checksum
_WAIT_SECONDS = 60.0  # for another rank's fetch, before fetching as well
_TOUCH_SECONDS = 60.0  # how exactly the last use of a block is recorded
_STALE_SECONDS = 3600.0  # age at which an unfinished entry is taken for a dead process's


@dataclass(frozen=True, kw_only=True)
class BlockCache:
    """Local folder for blocks of remote corpora."""

    folder: str | None = None
    """The folder; None means one of this user in the system's folder for temporary files."""
    max_bytes: int = 32 << 30
    """Size at which the entries not used for longest are removed, in bytes."""
    block_bytes: int = 4 << 20
    """Bytes fetched at a time: larger for few, long reads, smaller where bandwidth is dear."""

    def __post_init__(self) -> None:
        if self.block_bytes < 1 or self.max_bytes < 2 * self.block_bytes:
            raise ValueError(
                f"BlockCache: max_bytes={self.max_bytes} must hold at least two blocks of "
                f"block_bytes={self.block_bytes} (at least 1)"
            )


class RemoteFile:
    """A remote file, read in blocks through a local folder.

    Args:
        url: of the file, with its protocol.
        cache: the folder.

    Raises:
        FileNotFoundError: there is no such file.
        ImportError: the package for this protocol is missing; the message names it.
    """

    def __init__(self, url: str, cache: BlockCache) -> None:
        self._url, self._block_bytes = url, cache.block_bytes
        self._files, self._path = open_file_system(url)
        self.size = int(self._files.info(self._path)["size"])
        version = [url, self._files.ukey(self._path), self.size, cache.block_bytes]
        self._key = hashlib.sha256(repr(version).encode()).hexdigest()[:32]
        self._folder = BlockFolder(cache)

    def read(self, begin: int, size: int) -> NDArray[np.uint8]:
        """Returns a copy of the bytes, fetching the blocks that are not in the folder."""
        if size == 0:
            return np.empty(0, np.uint8)
        first, last = begin // self._block_bytes, (begin + size - 1) // self._block_bytes
        parts = []
        for number in range(first, last + 1):
            start = number * self._block_bytes
            low, high = max(begin, start), min(begin + size, start + self._block_bytes)
            parts.append(self._from_block(number, low - start, high - low))
        joined = parts[0] if len(parts) == 1 else np.concatenate(parts)
        joined.flags.writeable = False
        return joined

    def mapped(self) -> MappedFile | None:
        """Returns a whole local copy, mapped into memory; None when the folder cannot hold it."""
        starts = range(0, self.size, self._block_bytes)
        chunks = (self._fetch(at, min(at + self._block_bytes, self.size)) for at in starts)
        return self._folder.mapped(f"{self._key}-whole", self.size, chunks)

    def _from_block(self, number: int, begin: int, size: int) -> NDArray[np.uint8]:
        start = number * self._block_bytes
        stop = min(start + self._block_bytes, self.size)
        return self._folder.read(
            f"{self._key}-{number}", stop - start, begin, size, lambda: self._fetch(start, stop)
        )

    def _fetch(self, start: int, stop: int) -> bytes:
        content = self._files.cat_file(self._path, start=start, end=stop) if stop > start else b""
        if len(content) != stop - start:
            raise ValueError(
                f"{self._url} gave {len(content)} bytes for bytes {start} to {stop} of "
                f"{self.size}: it was replaced while it is read; restart with the new file"
            )
        return content


class BlockFolder:
    """The folder of cached entries of one process's view; other processes use it too."""

    def __init__(self, cache: BlockCache) -> None:
        self._path = Path(cache.folder) if cache.folder is not None else _own_folder()
        self._max_bytes = cache.max_bytes
        self._until_scan = 0  # bytes that may be added before the folder is measured again
        self._told = False

    def read(
        self, name: str, whole: int, begin: int, size: int, fetch: Callable[[], bytes]
    ) -> NDArray[np.uint8]:
        """Returns `size` bytes from `begin` on of the entry `name`, which has `whole` bytes."""
        path = self._path / name
        part = _read_entry(path, whole, begin, size)
        if part is not None:
            return part
        content: bytes | None = None
        with self._lock(name):
            part = _read_entry(path, whole, begin, size)  # another rank may have been faster
            if part is None:
                content = fetch()
                self._add(path, whole, [content])
        if content is None:
            assert part is not None  # read above
            return part
        return np.frombuffer(content, np.uint8)[begin : begin + size].copy()

    def mapped(self, name: str, whole: int, chunks: Iterable[bytes]) -> MappedFile | None:
        """Returns the entry mapped into memory, None when it cannot be kept."""
        path = self._path / name
        with self._lock(name):
            if _read_entry(path, whole, 0, 0) is None:
                self._add(path, whole, chunks)
            try:
                found = MappedFile(path)
            except OSError:  # not stored, or removed again already
                return None
        return found if found.size == whole else None

    def _lock(self, name: str) -> AbstractContextManager[bool]:
        try:
            self._path.mkdir(parents=True, exist_ok=True, mode=0o700)
        except OSError as error:
            self._tell(error)
        number = zlib.crc32(name.encode()) % _LOCKS
        return folder_lock(self._path / f".lock-{number}", _WAIT_SECONDS, keep=True)

    def _add(self, path: Path, whole: int, chunks: Iterable[bytes]) -> None:
        """Writes an entry aside and renames it into place; without room or rights, does nothing.
        An error of `chunks` itself, which come from the remote file, is passed on.
        """
        partial = path.with_name(f".{path.name}.{os.getpid()}-{uuid.uuid4().hex[:8]}.partial")
        try:
            self._make_room(whole)
            with partial.open("wb") as out:
                for chunk in _apart(chunks):
                    out.write(chunk)
            partial.replace(path)
        except OSError as error:
            self._tell(error)
        except _RemoteError as error:
            raise error.cause from None
        finally:
            with suppress(OSError):
                partial.unlink(missing_ok=True)

    def _make_room(self, size: int) -> None:
        self._until_scan -= size
        if self._until_scan >= 0:
            return
        with folder_lock(self._path / ".lock-trim", 0.0, keep=True) as held:
            total = _trim(self._path, self._max_bytes - size, remove=held)
        # Up to 16 ranks may each add this much before any of them looks again.
        self._until_scan = max(self._max_bytes - size - total, 0) // 16

    def _tell(self, error: OSError) -> None:
        if not self._told:
            logger.warning(
                "block cache %s cannot be written (%s): blocks are fetched again each time; name "
                "another folder or make room",
                self._path,
                error,
            )
            self._told = True


def _read_entry(path: Path, whole: int, begin: int, size: int) -> NDArray[np.uint8] | None:
    """Returns a piece of an entry and records its use; None when it is missing or not whole."""
    try:
        with path.open("rb", buffering=0) as file:
            status = os.fstat(file.fileno())
            if status.st_size != whole:
                return None
            if time.time() - status.st_mtime > _TOUCH_SECONDS:
                with suppress(OSError):  # a read-only folder
                    os.utime(file.fileno())
            piece = np.empty(size, np.uint8)
            return piece if os.preadv(file.fileno(), [piece.data], begin) == size else None
    except OSError:  # not there, or removed between two calls
        return None


def _trim(folder: Path, limit: int, *, remove: bool) -> int:
    """Removes the entries not used for longest while all are larger than `limit` bytes, down to
    nine tenths of it; returns what is left.
    """
    entries: list[tuple[float, int, str]] = []
    for entry in os.scandir(folder):
        with suppress(FileNotFoundError):
            status = entry.stat()
            stale = time.time() - status.st_mtime > _STALE_SECONDS
            if not entry.name.startswith(".") or (entry.name.endswith(".partial") and stale):
                entries.append((status.st_mtime, status.st_size, entry.path))
    total = sum(size for _, size, _ in entries)
    if total <= limit or not remove:
        return total
    for _, size, path in sorted(entries):
        Path(path).unlink(missing_ok=True)
        total -= size
        if total <= limit * 9 // 10:
            break
    return total


class _RemoteError(Exception):
    """Carries an error of the remote file past the handling of local ones."""

    def __init__(self, cause: Exception) -> None:
        super().__init__(str(cause))
        self.cause = cause


def _apart(chunks: Iterable[bytes]) -> Iterator[bytes]:
    try:
        yield from chunks
    except Exception as error:
        raise _RemoteError(error) from error


def _own_folder() -> Path:
    return Path(tempfile.gettempdir()) / f"megatron-lightning-blocks-{os.getuid()}"
