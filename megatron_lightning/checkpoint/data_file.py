"""A data file of a checkpoint, and the process that writes such files in the background.

Run as a program, this file reads boxes out of memory that it shares with a rank and writes them,
one request after the other; it never commits anything and takes part in no collective. It needs the
standard library alone, so it starts in a few hundredths of a second and imports no torch. It ends
when its rank does: the kernel kills it with its parent (Linux), and it leaves when its standard
input closes or its parent is another one.

The checksum of a file is put together from those of its boxes (the combination of CRC-32 as in
zlib: multiplication by a power of x modulo the polynomial), so that no byte is read twice.
"""

import ctypes
import functools
import json
import mmap
import os
import signal
import sys
import threading
import time
import zlib
from typing import Any

DATA_HEADER = b"megatron_lightning tensors, version 1\n".ljust(64, b"\0")
"""The first bytes of each data file, so that a file of another kind is noticed whatever its size.
"""
ALIGNMENT = 64
"""Bytes; a box can be mapped or read directly for any dtype."""
BLOCK = 16 * 2**20
"""Bytes written at a time."""
_POLYNOMIAL = 0xEDB88320
_PR_SET_PDEATHSIG = 1


class DataFile:
    """A new data file; boxes are appended one after the other. A context manager."""

    def __init__(self, path: "str | os.PathLike[str]") -> None:
        self._file = open(path, "xb")  # noqa: SIM115 - closed by __exit__
        self.size = 0
        self.crc32 = 0
        self._append_counted(DATA_HEADER)

    def begin_box(self) -> int:
        """Fill up to where a box may begin; returns the position."""
        self._append_counted(bytes(-self.size % ALIGNMENT))
        return self.size

    def end_box(self, start: int, crc32: int) -> None:
        """Add the checksum of a box that has been appended from `start` on to that of the file."""
        self.crc32 = combined_crc32(self.crc32, crc32, self.size - start)

    def _append_counted(self, data: bytes) -> None:
        self._append(data)
        self.crc32 = zlib.crc32(data, self.crc32)

    def _append(self, data: "bytes | memoryview") -> None:
        self._file.write(data)
        self.size += len(data)

    def __enter__(self) -> Any:  # noqa: D105
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        """Close; on success only after the bytes have reached the disk."""
        with self._file:
            if error is None:
                self._file.flush()
                os.fsync(self._file.fileno())


def combined_crc32(first: int, second: int, length: int) -> int:
    """CRC-32 of two pieces one after the other, from theirs; `length` is that of the second."""
    return _product(_power_of_x(length), first) ^ second


@functools.lru_cache(maxsize=4096)
def _power_of_x(length: int) -> int:
    """x^(8 length) modulo the polynomial, reflected."""
    power, square = 1 << 31, 1 << 23  # 1 and x^8
    while length:
        if length & 1:
            power = _product(square, power)
        square = _product(square, square)
        length >>= 1
    return power


def _product(a: int, b: int) -> int:
    product = 0
    for bit in range(31, -1, -1):
        if a >> bit & 1:
            product ^= b
        b = b >> 1 ^ (_POLYNOMIAL if b & 1 else 0)
    return product


# ------------------------------------------------------------------------ the process


def write_file(memory: memoryview, request: "dict[str, Any]", parent: int) -> "dict[str, Any]":
    """Write the boxes of `request`, pairs of position and length in `memory`; says where they lie,
    what the file is like, and how many seconds it took.
    """
    began = time.monotonic()
    boxes = []
    with DataFile(request["path"]) as file:
        for position, length in request["boxes"]:
            start = file.begin_box()
            box = memory[position : position + length]
            check = _Check(box)
            for offset in range(0, length, BLOCK):
                if os.getppid() != parent:
                    os._exit(1)
                file._append(box[offset : offset + BLOCK])
            crc = check.result()
            file.end_box(start, crc)
            boxes.append((start, length, crc))
    seconds = time.monotonic() - began
    return {"boxes": boxes, "size": file.size, "crc32": file.crc32, "seconds": seconds}


class _Check(threading.Thread):
    """The checksum of a box, computed while it is written."""

    def __init__(self, box: memoryview) -> None:
        super().__init__(daemon=True)
        self._box, self._crc = box, 0
        if len(box) > BLOCK:
            self.start()
        else:
            self.run()

    def run(self) -> None:
        self._crc = zlib.crc32(self._box)

    def result(self) -> int:
        if self.ident is not None:
            self.join()
        return self._crc


def main(descriptor: int, parent: int, dies_with_thread: bool) -> None:
    """Serve requests, a line of JSON each, until standard input closes."""
    if sys.platform == "linux" and dies_with_thread:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)
    for name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1", "SIGUSR2"):
        signal.signal(getattr(signal, name), signal.SIG_IGN)  # the rank decides what they mean
    threading.Thread(target=_leave_with, args=(parent,), daemon=True).start()
    for line in sys.stdin.buffer:
        request = json.loads(line)
        try:
            answer = write_file(_shared(descriptor), request, parent)
        except (OSError, MemoryError, ValueError) as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
        sys.stdout.buffer.write(json.dumps(answer).encode() + b"\n")
        sys.stdout.buffer.flush()


def _shared(descriptor: int) -> memoryview:
    """The shared memory as it is now: the rank makes it larger when it has more to write."""
    size = os.fstat(descriptor).st_size
    if size == 0:
        return memoryview(b"")
    return memoryview(mmap.mmap(descriptor, size, access=mmap.ACCESS_READ))


def _leave_with(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(0.5)
    os._exit(1)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3] == "1")
