"""Where tensors lie in the safetensors files of an export: the same plan on every rank."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from megatron_lightning.bridge.folder import INDEX, SINGLE
from megatron_lightning.bridge.safetensors_files import DTYPES, StoredTensor
from megatron_lightning.checkpoint import Box
from megatron_lightning.checkpoint.files import write_file

DEFAULT_SHARD_BYTES = 5 * 10**9
"""As transformers writes by default."""
_TEXT = {dtype: name for name, dtype in DTYPES.items()}


@dataclass(frozen=True)
class FileSet:
    """The files of one export."""

    folder: Path
    headers: Mapping[str, bytes]
    """File name -> its beginning: length of the header, and header."""
    tensors: Mapping[str, StoredTensor]
    """All tensors with their places."""

    def create(self) -> None:
        """Make the files with their headers and full size."""
        for name, header in self.headers.items():
            held = [t for t in self.tensors.values() if t.file == str(self.folder / name)]
            with open(self.folder / name, "xb") as file:
                file.write(header)
                file.truncate(len(header) + sum(t.num_bytes for t in held))

    @contextmanager
    def opened(self) -> Iterator[Callable[[str], int]]:
        """Give a function from a file's path to a descriptor for writing; what was written has
        reached the disk at the end.
        """
        descriptors: dict[str, int] = {}

        def descriptor_of(path: str) -> int:
            if path not in descriptors:
                descriptors[path] = os.open(path, os.O_WRONLY)
            return descriptors[path]

        try:
            yield descriptor_of
            for descriptor in descriptors.values():
                os.fsync(descriptor)
        finally:
            for descriptor in descriptors.values():
                os.close(descriptor)

    def write_index(self) -> None:
        """Write the index, where there are several files."""
        if len(self.headers) == 1:
            return
        placed = {name: Path(tensor.file).name for name, tensor in self.tensors.items()}
        size = sum(tensor.num_bytes for tensor in self.tensors.values())
        index = {"metadata": {"total_size": size}, "weight_map": dict(sorted(placed.items()))}
        write_json(self.folder / INDEX, index)


def plan_files(
    folder: Path,
    entries: Mapping[str, tuple[torch.dtype, tuple[int, ...]]],
    max_shard_bytes: int = DEFAULT_SHARD_BYTES,
    *,
    single: str = SINGLE,
) -> FileSet:
    """Place tensors (name -> dtype, shape) in files of at most `max_shard_bytes`, or of one larger
    tensor; in one of the name `single` where one is enough.
    """
    if max_shard_bytes < 1:
        raise ValueError(f"max_shard_bytes={max_shard_bytes} must be positive")
    shards: list[list[str]] = [[]]
    filled = 0
    for name, (dtype, shape) in entries.items():
        size = Box.whole(shape).numel * dtype.itemsize
        if shards[-1] and filled + size > max_shard_bytes:
            shards.append([])
            filled = 0
        shards[-1].append(name)
        filled += size
    count = len(shards)
    headers: dict[str, bytes] = {}
    tensors: dict[str, StoredTensor] = {}
    for number, names in enumerate(shards, start=1):
        file = single if count == 1 else f"model-{number:05d}-of-{count:05d}.safetensors"
        # Wider elements first, so that every tensor begins at a multiple of its element's size.
        ordered = sorted(names, key=lambda name: -entries[name][0].itemsize)
        headers[file], placed = _place(folder / file, {name: entries[name] for name in ordered})
        tensors |= placed
    return FileSet(folder, headers, tensors)


def _place(
    path: Path, entries: Mapping[str, tuple[torch.dtype, tuple[int, ...]]]
) -> tuple[bytes, dict[str, StoredTensor]]:
    table: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    position = 0
    for name, (dtype, shape) in entries.items():
        size = Box.whole(shape).numel * dtype.itemsize
        table[name] = {
            "dtype": _TEXT[dtype],
            "shape": list(shape),
            "data_offsets": [position, position + size],
        }
        position += size
    text = json.dumps(table, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    header = len(text).to_bytes(8, "little") + text
    placed = {
        name: StoredTensor(str(path), dtype, shape, len(header) + table[name]["data_offsets"][0])
        for name, (dtype, shape) in entries.items()
    }
    return header, placed


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write a new JSON file as transformers does: sorted, indented."""
    write_file(path, (json.dumps(content, indent=2, sort_keys=True) + "\n").encode())
