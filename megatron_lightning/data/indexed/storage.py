"""Ways to read the two files of a corpus: mapped into memory, by plain reads, or from a remote file
system through a folder of cached blocks. All give the same bytes.

A reader belongs to one process. `IndexedDataset` opens anew in worker processes, also in forked
ones: a file position or a network connection must not be shared.
"""

import os
from pathlib import Path
from typing import Literal, Protocol

import numpy as np
from numpy.typing import NDArray

Access = Literal["mmap", "file"]


class ByteSource(Protocol):
    """The content of a file."""

    @property
    def size(self) -> int:
        """Bytes in the file."""
        ...

    def read(self, begin: int, size: int) -> NDArray[np.uint8]:
        """Returns `size` bytes from byte `begin` on, shape (size,), not to be written to.

        Raises:
            ValueError: the file has become shorter.
        """
        ...


class MappedFile:
    """A local file mapped into memory: nothing is copied, the system keeps what is used often."""

    def __init__(self, path: Path) -> None:
        self.size = path.stat().st_size
        # An empty file cannot be mapped.
        self._bytes = np.memmap(path, mode="r", dtype=np.uint8) if self.size else _empty()

    def read(self, begin: int, size: int) -> NDArray[np.uint8]:
        """Returns a view of the file."""
        return self._bytes[begin : begin + size]


class PlainFile:
    """A local file read piece by piece: for file systems on which mapping is slow or not allowed,
    and where mapped pages would count against a memory limit.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = path.open("rb", buffering=0)  # closed with this object
        self.size = os.fstat(self._file.fileno()).st_size

    def read(self, begin: int, size: int) -> NDArray[np.uint8]:
        """Returns a copy of the bytes."""
        target = np.empty(size, np.uint8)
        view, done = target.data, 0
        while done < size:  # one call reads at most 2 GiB
            count = os.preadv(self._file.fileno(), [view[done:]], begin + done)
            if count == 0:
                raise ValueError(
                    f"{self._path} ended at byte {begin + done}, it had {self.size} bytes when it "
                    "was opened: somebody writes to it; restart when the file is complete"
                )
            done += count
        target.flags.writeable = False
        return target


def open_local(path: Path, access: Access) -> ByteSource:
    """Returns the reader of a local file."""
    return MappedFile(path) if access == "mmap" else PlainFile(path)


def _empty() -> NDArray[np.uint8]:
    return np.empty(0, np.uint8)
