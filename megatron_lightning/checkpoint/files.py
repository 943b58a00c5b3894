"""Bytes in and out: data files with a checksum for each box, and reads of parts of a stored box.

The checksum is CRC-32: it finds any burst of wrong bits up to 32 long and all but one in 2^32 other
damages, at about four times the speed of BLAKE2b. It guards against rot and truncation, not against
forgery: who can write the files can write the checksums.
"""

import errno
import os
import zlib
from collections.abc import Sequence
from pathlib import Path

import torch

from megatron_lightning.checkpoint.boxes import Box, row_major_strides
from megatron_lightning.checkpoint.data_file import BLOCK, DATA_HEADER, DataFile
from megatron_lightning.checkpoint.errors import CheckpointError

_BLOCK = BLOCK


class DataFileWriter(DataFile):
    """A new data file, written from tensors."""

    def write(self, view: torch.Tensor) -> tuple[int, int, int]:
        """Append the elements of `view` (any device, strides and dtype) in row-major order.

        Returns the position of the first byte, the number of bytes and their CRC-32.
        """
        start, crc = self.begin_box(), 0
        flat = flatten(view)
        for block in flat.split(max(1, _BLOCK // flat.element_size())):
            data = block.cpu().view(torch.uint8).numpy().data
            crc = zlib.crc32(data, crc)
            self._append(data)
        self.end_box(start, crc)
        return start, self.size - start, crc


def flatten(tensor: torch.Tensor) -> torch.Tensor:
    """The elements in row-major order with stride 1, not copied if they lie so already."""
    flat = tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1)
    return flat.as_strided(flat.shape, (1,))  # a single element may have had another stride


def write_file(path: Path, data: bytes) -> None:
    """Write a new small file and wait until it has reached the disk."""
    with open(path, "xb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def sync_folder(folder: Path) -> None:
    """Wait until the names in `folder` have reached the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (
            errno.EINVAL,
            errno.ENOTSUP,
        ):  # not offered by some network file systems
            raise
    finally:
        os.close(descriptor)


def file_crc32(path: Path) -> int:
    """CRC-32 of a whole file."""
    crc = 0
    with open(path, "rb") as file:
        while block := file.read(_BLOCK):
            crc = zlib.crc32(block, crc)
    return crc


class DataFileReader:
    """An open data file. Reads only the bytes that are asked for."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._descriptor = os.open(path, os.O_RDONLY)
        header = os.pread(self._descriptor, len(DATA_HEADER), 0)
        if header != DATA_HEADER:
            self.close()
            raise CheckpointError(
                f"{path} is not a data file of a checkpoint (it begins with {header[:16]!r})"
            )

    def close(self) -> None:
        """Close the file."""
        os.close(self._descriptor)

    def read(
        self, target: torch.Tensor, start: int, dtype: torch.dtype, shape: Sequence[int], part: Box
    ) -> None:
        """Fill `target` with `part` of the box of `shape` and `dtype` stored at byte `start`.

        `part` is relative to the stored box and has the sizes of `target`, which may have any
        device, strides and dtype; values are converted by `Tensor.copy_`. At most about 16 MiB are
        held beside the target.
        """
        if not part.numel:
            return
        strides = row_major_strides(shape)
        first = sum(offset * stride for offset, stride in zip(part.offsets, strides, strict=True))
        span = 1 + sum(
            (size - 1) * stride for size, stride in zip(part.sizes, strides, strict=True)
        )
        begin = start + first * dtype.itemsize
        if span == part.numel and _is_plain(target, dtype):
            self._fill(target.view(-1).view(torch.uint8).numpy().data, begin)
        elif span * dtype.itemsize <= _BLOCK or part.numel == 1:
            buffer = torch.empty(span * dtype.itemsize, dtype=torch.uint8)
            self._fill(buffer.numpy().data, begin)
            target.copy_(buffer.view(dtype).as_strided(part.sizes, strides))
        else:
            self._read_halves(target, start, dtype, shape, part)

    def _read_halves(
        self, target: torch.Tensor, start: int, dtype: torch.dtype, shape: Sequence[int], part: Box
    ) -> None:
        dim = next(dim for dim, size in enumerate(part.sizes) if size > 1)
        half = part.sizes[dim] // 2
        for offset, size in ((0, half), (half, part.sizes[dim] - half)):
            offsets = tuple(o + offset * (d == dim) for d, o in enumerate(part.offsets))
            sizes = tuple(size if d == dim else s for d, s in enumerate(part.sizes))
            self.read(target.narrow(dim, offset, size), start, dtype, shape, Box(offsets, sizes))

    def _fill(self, data: memoryview, position: int) -> None:
        while data:
            count = os.preadv(self._descriptor, [data], position)
            if count == 0:
                raise CheckpointError(
                    f"{self.path} ends at byte {position}, {len(data)} bytes too early"
                )
            data, position = data[count:], position + count


def _is_plain(target: torch.Tensor, dtype: torch.dtype) -> bool:
    matches = target.device.type == "cpu" and target.dtype == dtype
    return (
        matches and target.is_contiguous() and target.numel() > 1
    )  # a single one may have any stride
