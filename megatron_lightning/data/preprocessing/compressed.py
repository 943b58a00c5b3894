"""Opening compressed files for reading: gzip and, if there is a library for it, Zstandard."""

import gzip
import io
import zlib
from pathlib import Path
from types import ModuleType
from typing import Any, BinaryIO, cast

SUFFIXES = (".gz", ".zst")
_PACKED_BYTES = 1 << 14  # unpacked at a time: it may grow a thousandfold


def is_compressed(path: Path) -> bool:
    """Returns whether the name says that the file is compressed."""
    return path.suffix in SUFFIXES


def unpack(path: Path, packed: BinaryIO) -> BinaryIO:
    """Returns the content of a compressed file; one that was cut off ends with an error, not early.

    Args:
        path: its name, which tells the compression.
        packed: the opened file.

    Raises:
        ImportError: nothing is installed that reads it.
    """
    if path.suffix == ".gz":
        return cast(BinaryIO, gzip.GzipFile(fileobj=packed, mode="rb"))
    library = zstandard()
    if library is None:
        raise ImportError(missing_library(path))
    if library.__name__ == "zstandard":
        return cast(BinaryIO, io.BufferedReader(_ZstandardFile(packed, library), 1 << 17))
    return cast(BinaryIO, library.open(packed, "rb"))


def damage_errors() -> tuple[type[Exception], ...]:
    """Returns the errors that reading a damaged file ends with."""
    errors: list[type[Exception]] = [gzip.BadGzipFile, EOFError, zlib.error]
    if (library := zstandard()) is not None:
        errors.append(library.ZstdError)
    return tuple(errors)


def missing_library(path: Path) -> str:
    """Returns the message for a .zst file that nothing can read."""
    return f"{path}: pip install megatron-lightning[zstd], or unpack it first"


def zstandard() -> ModuleType | None:
    """Returns the standard library's module (Python 3.14), else the package, else None."""
    try:
        from compression import zstd  # pyright: ignore[reportMissingImports]

        return zstd
    except ImportError:
        pass
    try:
        import zstandard as package

        return package
    except ImportError:
        return None


class _ZstandardFile(io.RawIOBase):
    """All frames of a file, by the `zstandard` package.

    Its own reader stops after the first frame, and takes the end of a file that was cut off for
    the end of the data.
    """

    def __init__(self, packed: BinaryIO, library: ModuleType) -> None:
        self._file, self._library = packed, library
        self._frame: Any = None
        self._packed, self._ready = b"", b""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any, /) -> int:
        while not self._ready:
            self._packed = self._packed or self._file.read(_PACKED_BYTES)
            if not self._packed:
                if self._frame is not None:
                    raise EOFError("the file ends within a frame")
                return 0
            self._frame = self._frame or self._library.ZstdDecompressor().decompressobj()
            self._ready = self._frame.decompress(self._packed)
            self._packed = b""
            if self._frame.eof:
                self._packed, self._frame = self._frame.unused_data, None
        size = min(len(buffer), len(self._ready))
        buffer[:size] = self._ready[:size]
        self._ready = self._ready[size:]
        return size
