"""Safetensors files by byte ranges: headers, reads of boxes, and writes of boxes in place.

The format is that of https://github.com/huggingface/safetensors: 8 bytes of header length, JSON
with dtype, shape and place of each tensor, then row-major values without holes. Files are read with
`pread` and not mapped: what a rank doesn't need is not touched, and nothing is shared when ranks
fork.
"""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from megatron_lightning.checkpoint.boxes import Box, row_major_strides
from megatron_lightning.checkpoint.manifest import pickle_note

DTYPES: Mapping[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
}
BLOCK = 16 * 2**20
"""Bytes in memory at once, beside the tensor that is filled or written."""
_LONG_RUN = 512
"""Bytes from which on consecutive elements are read alone; gaps between shorter ones are read
along."""
_CALL = 2**20
"""Bytes of one call of the system: larger ones were measured to be two to eight times slower."""
_OPEN_FILES = 4
_LONGEST_HEADER = 100 * 2**20


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor in a file."""

    file: str
    """Path."""
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    """Position of the first byte in the file."""

    def seen_as(self, view: tuple[int, ...] | None) -> StoredTensor:
        """The same bytes as a tensor of another shape; None: of its own."""
        return self if view is None else replace(self, shape=view)

    def read(self, reader: FileReader, box: Box, target: Tensor) -> None:
        """Fill `target` with a box of it."""
        reader.read(self, box, target)

    @property
    def num_bytes(self) -> int:
        """Size in the file."""
        return Box.whole(self.shape).numel * self.dtype.itemsize


def read_header(path: Path) -> dict[str, StoredTensor]:
    """The tensors of a file, after its size has been compared with them. ValueError names what is
    wrong.
    """
    size = path.stat().st_size
    with open(path, "rb") as file:
        beginning = file.read(8)
        length = int.from_bytes(beginning, "little")
        if len(beginning) < 8 or length > min(_LONGEST_HEADER, size - 8):
            note = pickle_note(beginning[:4])
            raise ValueError(f"{path} ({size} bytes) is no safetensors file{note}")
        text = file.read(length)
    try:
        header: Any = json.loads(text)
        entries = {name: entry for name, entry in header.items() if name != "__metadata__"}
        found = {name: _stored(path, 8 + length, entry) for name, entry in entries.items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path}: its header is damaged: {error!r}") from error
    end = max((t.start + t.num_bytes for t in found.values()), default=8 + length)
    if end != size:
        raise ValueError(f"{path} has {size} bytes, its header speaks of {end}; get it again")
    return found


def _stored(path: Path, base: int, entry: Mapping[str, Any]) -> StoredTensor:
    if entry["dtype"] not in DTYPES:
        raise ValueError(f"dtype {entry['dtype']} is not known")
    begin, end = entry["data_offsets"]
    shape = tuple(int(size) for size in entry["shape"])
    found = StoredTensor(str(path), DTYPES[entry["dtype"]], shape, base + begin)
    if found.num_bytes != end - begin or begin < 0:
        raise ValueError(f"{list(shape)} {entry['dtype']} in {end - begin} bytes")
    return found


class FileReader:
    """Reads boxes of tensors; opens files when they are first needed, and keeps the last few open.
    Travels by pickle closed.
    """

    def __init__(self) -> None:
        self._open: dict[str, BinaryIO] = {}
        self.bytes_read = 0

    def __getstate__(self) -> dict[str, Any]:
        """Without what is open."""
        return {"_open": {}, "bytes_read": 0}

    def blocks(self, stored: StoredTensor, box: Box) -> Iterator[tuple[Box, Tensor]]:
        """The box in parts of at most `BLOCK` bytes: (box, values of it on the CPU)."""
        for part in _parts(stored, box):
            yield part, self._read(stored, part, torch.empty(part.sizes, dtype=stored.dtype))

    def read(self, stored: StoredTensor, box: Box, target: Tensor) -> None:
        """Fill `target` (the box's sizes; any dtype, device and strides) with the box."""
        for part in _parts(stored, box):
            view = target[part.shift(box.offsets, sign=-1).slices()]
            if (view.device.type, view.dtype) == ("cpu", stored.dtype) and view.is_contiguous():
                self._read(stored, part, view)
            else:
                buffer = torch.empty(part.sizes, dtype=stored.dtype)
                view.copy_(self._read(stored, part, buffer))

    def _read(self, stored: StoredTensor, box: Box, out: Tensor) -> Tensor:
        """Fill a contiguous tensor with a part of at most `BLOCK` bytes."""
        if not box.numel:
            return out
        strides = row_major_strides(stored.shape)
        runs = list(byte_runs(stored.shape, box, stored.dtype.itemsize))
        first, length = runs[0]
        if len(runs) == 1 or length >= _LONG_RUN:
            data, position = _bytes_of(out), 0
            for start, size in runs:
                self._fill(stored, data[position : position + size], start)
                position += size
            return out
        span = runs[-1][0] + length - first
        buffer = torch.empty(span, dtype=torch.uint8)
        self._fill(stored, buffer.numpy().data, first)
        return out.copy_(buffer.view(stored.dtype).as_strided(box.sizes, strides))

    def _fill(self, stored: StoredTensor, data: memoryview, start: int) -> None:
        file = self._file(stored.file)
        position = stored.start + start
        while data:
            count = os.preadv(file.fileno(), [data[:_CALL]], position)
            if count == 0:
                raise ValueError(f"{stored.file} has become shorter: it ends at byte {position}")
            self.bytes_read += count
            data, position = data[count:], position + count

    def _file(self, path: str) -> BinaryIO:
        if path not in self._open:
            if len(self._open) >= _OPEN_FILES:
                self._open.pop(next(iter(self._open))).close()
            self._open[path] = open(path, "rb", buffering=0)  # noqa: SIM115 - see close
        return self._open[path]

    def close(self) -> None:
        """Close all files."""
        for file in self._open.values():
            file.close()
        self._open.clear()


def write_box(descriptor: int, stored: StoredTensor, box: Box, values: Tensor) -> None:
    """Write the values of a box to its places in an open file, `BLOCK` bytes at a time. Others may
    write other boxes at the same time.
    """
    itemsize = stored.dtype.itemsize
    for part in _parts(stored, box):
        inside = values[part.shift(box.offsets, sign=-1).slices()]
        data, position = _bytes_of(inside.to("cpu", stored.dtype).contiguous()), 0
        for start, size in byte_runs(stored.shape, part, itemsize):
            _write(descriptor, data[position : position + size], stored.start + start)
            position += size


def _write(descriptor: int, data: memoryview, position: int) -> None:
    while data:
        count = os.pwrite(descriptor, data[:_CALL], position)
        data, position = data[count:], position + count


def byte_runs(shape: tuple[int, ...], box: Box, itemsize: int) -> Iterator[tuple[int, int]]:
    """(first byte, bytes) of the consecutive parts of a box, in row-major order. All have the same
    length.
    """
    if not box.numel:
        return
    strides = row_major_strides(shape)
    # The last dims that the box has whole, and the one before them, are consecutive.
    dim = len(shape)
    while dim > 0 and box.sizes[dim - 1] == shape[dim - 1]:
        dim -= 1
    outer = max(0, dim - 1)
    length = itemsize
    for size in box.sizes[outer:]:
        length *= size
    first = sum(o * s for o, s in zip(box.offsets, strides, strict=True))
    for index in itertools.product(*(range(size) for size in box.sizes[:outer])):
        start = first + sum(i * stride for i, stride in zip(index, strides, strict=False))
        yield start * itemsize, length


def _parts(stored: StoredTensor, box: Box) -> Iterator[Box]:
    """The box in parts that take at most `BLOCK` bytes with what is read along."""
    itemsize = stored.dtype.itemsize
    pieces = box.cut(2) if max(box.numel * itemsize, _span(stored, box)) > BLOCK else [box]
    if len(pieces) == 1:
        yield box
        return
    for piece in pieces:
        yield from _parts(stored, piece)


def _span(stored: StoredTensor, box: Box) -> int:
    """Bytes from the first to the last of a box of short runs; 0 for long ones."""
    if not box.numel or next(byte_runs(stored.shape, box, stored.dtype.itemsize))[1] >= _LONG_RUN:
        return 0
    strides = row_major_strides(stored.shape)
    reach = sum((size - 1) * stride for size, stride in zip(box.sizes, strides, strict=True))
    return (reach + 1) * stored.dtype.itemsize


def _bytes_of(tensor: Tensor) -> memoryview:
    flat = tensor.reshape(-1)
    flat = flat.as_strided(flat.shape, (1,))  # a single element may have had another stride
    return flat.view(torch.uint8).numpy().data
