"""Reading and writing this package's own checkpoint folders in one process, a box at a time."""

from __future__ import annotations

import json
import zlib
from collections import defaultdict
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path

import torch
from torch import Tensor

from megatron_lightning.checkpoint.boxes import Box
from megatron_lightning.checkpoint.checks import verify
from megatron_lightning.checkpoint.commit import begin, discard, publish
from megatron_lightning.checkpoint.convert.content import Content
from megatron_lightning.checkpoint.convert.lazy import LazyTensor
from megatron_lightning.checkpoint.files import DataFileReader, DataFileWriter, write_file
from megatron_lightning.checkpoint.index import (
    METADATA_FILE,
    StoredBox,
    StoredTensor,
    index_from_json,
    index_to_json,
)
from megatron_lightning.checkpoint.manifest import FileEntry, Manifest, read_checked
from megatron_lightning.checkpoint.state import OBJECTS_FILE
from megatron_lightning.checkpoint.storage import DATA_FOLDER

_PIECE_BYTES = 64 * 2**20  # boxes are cut to about this size, so that files come out equal


def read_native(folder: Path) -> Content:
    """The contents of a checkpoint folder, after every byte has been compared with its checksum.

    Raises CheckpointError naming damaged files and tensors.
    """
    manifest = verify(folder)
    table = read_checked(folder, manifest, METADATA_FILE)
    index = index_from_json(table, str(folder / METADATA_FILE))
    return Content(
        origin=str(folder),
        tensors={name: _lazy(folder, stored) for name, stored in index.items()},
        objects=json.loads(read_checked(folder, manifest, OBJECTS_FILE)),
        metadata=manifest.metadata,
    )


def _lazy(folder: Path, stored: StoredTensor) -> LazyTensor:
    def part(box: Box) -> Tensor:
        target = torch.empty(box.sizes, dtype=stored.dtype)
        for piece in stored.boxes:
            common = piece.box.intersect(box)
            if common is None:
                continue
            reader = DataFileReader(folder / piece.file)
            try:
                view = target[common.shift(box.offsets, sign=-1).slices()]
                inside = common.shift(piece.box.offsets, sign=-1)
                reader.read(view, piece.start, stored.dtype, piece.box.sizes, inside)
            finally:
                reader.close()
        return target

    return LazyTensor(stored.shape, stored.dtype, part)


def write_native(path: Path, content: Content, *, files: int = 1) -> None:
    """Write a checkpoint folder with `files` data files of about equal size, and put it in place
    when it is complete. At most one tensor, or 64 MiB of it, is in memory.
    """
    staging = begin(path)
    try:
        (staging / DATA_FOLDER).mkdir()
        entries = _write_tensors(staging, content.tensors, files)
        objects = (json.dumps(dict(content.objects), allow_nan=False) + "\n").encode()
        write_file(staging / OBJECTS_FILE, objects)
        for name in (METADATA_FILE, OBJECTS_FILE):
            data = (staging / name).read_bytes()
            entries[name] = FileEntry(len(data), zlib.crc32(data))
        publish(staging, path, Manifest(files=entries, metadata=dict(content.metadata)))
    except BaseException:
        discard(staging)
        raise


def _write_tensors(
    staging: Path, tensors: Mapping[str, LazyTensor], files: int
) -> dict[str, FileEntry]:
    boxes: dict[str, list[StoredBox]] = defaultdict(list)
    names = [f"{DATA_FOLDER}/rank_{i:05d}.bin" for i in range(files)]
    with ExitStack() as stack:
        writers = [stack.enter_context(DataFileWriter(staging / name)) for name in names]
        for name in sorted(tensors):
            tensor = tensors[name]
            for box in pieces(tensor):
                place = min(range(files), key=lambda i: writers[i].size)
                start, length, crc32 = writers[place].write(tensor.part(box))
                boxes[name].append(StoredBox(box, names[place], start, length, crc32))
    index = {
        name: StoredTensor(tensor.dtype, tensor.shape, tuple(boxes[name]))
        for name, tensor in tensors.items()
    }
    write_file(staging / METADATA_FILE, index_to_json(index))
    return {
        name: FileEntry(writer.size, writer.crc32)
        for name, writer in zip(names, writers, strict=True)
    }


def pieces(tensor: LazyTensor) -> list[Box]:
    """The tensor as boxes of about 64 MiB."""
    whole = Box.whole(tensor.shape)
    return whole.cut(-(-whole.numel * tensor.dtype.itemsize // _PIECE_BYTES))
