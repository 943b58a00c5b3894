"""Host memory that a rank shares with its writer process, pinned for copies from a GPU, reused.

The memory is an anonymous file (`memfd_create`): it needs no place in a file system, is not limited
by the size of /dev/shm, and is gone when the last process that has it open is.
"""

from __future__ import annotations

import mmap
import os
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from megatron_lightning.checkpoint.data_file import ALIGNMENT
from megatron_lightning.checkpoint.errors import CheckpointError
from megatron_lightning.utils.logging import warn_once

CHUNK_BYTES = 2**30
"""Boxes share chunks of about this size; a larger one gets a chunk of its own. A copy must not
cross the border of two pinned ranges.
"""
_PORTABLE = 1  # cudaHostRegisterPortable


@dataclass(slots=True)
class _Chunk:
    start: int
    memory: torch.Tensor
    pinned: bool
    used: int = 0


class HostBuffers:
    """Grows as needed, never shrinks until it is closed; pinned for the GPU `device`, if any."""

    def __init__(self, device: torch.device | None = None) -> None:
        self._device = device
        self._chunks: list[_Chunk] = []
        self._total = 0
        if hasattr(os, "memfd_create"):
            self.descriptor = os.memfd_create("checkpoint")
        else:
            with tempfile.TemporaryFile() as file:
                self.descriptor = os.dup(file.fileno())

    def place(self, lengths: Sequence[int]) -> list[int]:
        """A position for each box of these lengths in bytes; boxes placed before are given up.

        Raises CheckpointError when there is not enough memory.
        """
        for chunk in self._chunks:
            chunk.used = 0
        left = sum(_aligned(length) for length in lengths)
        positions = []
        for size in map(_aligned, lengths):
            chunk = next((c for c in self._chunks if c.used + size <= len(c.memory)), None)
            if chunk is None:
                chunk = self._grow(max(size, min(left, CHUNK_BYTES)))
            positions.append(chunk.start + chunk.used)
            chunk.used += size
            left -= size
        return positions

    def view(self, position: int, like: torch.Tensor) -> torch.Tensor:
        """The memory at `position` as a contiguous tensor of the shape and dtype of `like`."""
        length = like.numel() * like.element_size()
        if not length:
            return torch.empty(like.shape, dtype=like.dtype)
        chunk = next(c for c in self._chunks if 0 <= position - c.start < len(c.memory))
        begin = position - chunk.start
        return chunk.memory[begin : begin + length].view(like.dtype).view(like.shape)

    def close(self) -> None:
        """Give the memory back."""
        for chunk in self._chunks:
            if chunk.pinned:
                torch.cuda.cudart().cudaHostUnregister(chunk.memory.data_ptr())  # type: ignore[attr-defined]
        self._chunks.clear()
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1

    def _grow(self, length: int) -> _Chunk:
        length += -length % mmap.ALLOCATIONGRANULARITY
        start = self._total
        try:
            os.ftruncate(self.descriptor, start + length)
            if hasattr(os, "posix_fallocate"):  # an error now instead of a crash when it is written
                os.posix_fallocate(self.descriptor, start, length)
        except OSError as error:
            raise CheckpointError(
                f"host memory for saves in the background: {start + length} bytes can't be had on"
                f" this rank ({error}); save with CheckpointConfig(asynchronous=False)"
            ) from error
        self._total += length
        mapping = mmap.mmap(self.descriptor, length, offset=start)
        memory = torch.frombuffer(mapping, dtype=torch.uint8)
        chunk = _Chunk(start, memory, self._device is not None and _pin(memory, self._device))
        self._chunks.append(chunk)
        return chunk


def _aligned(length: int) -> int:
    return length + -length % ALIGNMENT


def _pin(memory: torch.Tensor, device: torch.device) -> bool:
    address, size = memory.data_ptr(), memory.numel()
    with torch.cuda.device(device):  # a thread of its own would begin with device 0
        status = int(torch.cuda.cudart().cudaHostRegister(address, size, _PORTABLE))  # type: ignore[attr-defined]
    if status:
        warn_once(
            f"{size} bytes of host memory could not be pinned (CUDA error {status}): copies to it"
            f" are slower, and training waits for them"
        )
    return status == 0
