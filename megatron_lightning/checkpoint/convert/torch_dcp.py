"""torch's distributed checkpoint (DCP) in its stock form: `.metadata`, a pickle, and `.distcp`
files of `torch.save` archives.

The pickle is read without running code (`inert_pickle.py`), archives with torch's restricted
loader. What is written is read by `dcp.load`.
"""

from __future__ import annotations

import io
import json
import math
import os
import pickle
import secrets
import shutil
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint.default_planner import create_default_global_save_plan
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult

from megatron_lightning.checkpoint.boxes import Box
from megatron_lightning.checkpoint.convert.content import Content
from megatron_lightning.checkpoint.convert.inert_pickle import Record, read_table
from megatron_lightning.checkpoint.convert.lazy import LazyTensor
from megatron_lightning.checkpoint.convert.native import pieces
from megatron_lightning.checkpoint.errors import CheckpointError
from megatron_lightning.checkpoint.files import sync_folder, write_file

TABLE = ".metadata"
_DATA = "__0_0.distcp"
OBJECTS = "megatron_lightning.json"
"""Beside the table, where this package wrote it: objects and metadata as tagged JSON."""


@dataclass(frozen=True)
class DcpFolder:
    """What a DCP folder holds."""

    tensors: Mapping[str, LazyTensor]
    values: Mapping[str, _Place]
    """Where the values that are not tensors lie; `read_value` reads one."""
    folder: Path

    def read_value(self, name: str) -> Any:
        """A value of plain kinds. Raises CheckpointError for any other."""
        return _load(self.folder, self.values[name], name)


@dataclass(frozen=True)
class _Place:
    """Where an archive lies."""

    file: str
    start: int
    length: int


def read_dcp(folder: Path) -> DcpFolder:
    """The table of a DCP folder; nothing else is read yet. CheckpointError if it cannot be
    trusted.
    """
    where = str(folder / TABLE)
    table = read_table((folder / TABLE).read_bytes(), where)
    if not isinstance(table, Record):
        raise CheckpointError(f"{where} is no table of a distributed checkpoint")
    try:
        places = {
            (index.field("fqn"), tuple(index.optional("offset") or ())): _place(info, where)
            for index, info in table.field("storage_data").items()
        }
        entries = dict(table.field("state_dict_metadata").items())
        tensors = {
            name: _tensor(folder, name, entry, places)
            for name, entry in entries.items()
            if entry.kind == "TensorStorageMetadata"
        }
        values = {
            name: places[(name, ())]
            for name, entry in entries.items()
            if entry.kind == "BytesStorageMetadata"
        }
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{where} is damaged: {error!r}") from error
    return DcpFolder(tensors, values, folder)


def _place(info: Record, where: str) -> _Place:
    place = _Place(
        str(info.field("relative_path")), int(info.field("offset")), int(info.field("length"))
    )
    transforms = info.optional("transform_descriptors")
    if transforms:
        raise CheckpointError(
            f"{where}: {place.file} is stored with {transforms} (such as "
            f"compression), which is not read; save it without extensions"
        )
    if "/" in place.file or "\\" in place.file or place.file in ("", ".", ".."):
        raise CheckpointError(f"{where} places data in {place.file!r}, outside of the folder")
    return place


def _tensor(
    folder: Path, name: str, entry: Record, places: Mapping[tuple[str, tuple[int, ...]], _Place]
) -> LazyTensor:
    shape, properties = tuple(entry.field("size")), entry.field("properties")
    dtype = (
        properties.state[0] if isinstance(properties.state, tuple) else properties.field("dtype")
    )
    chunks = []
    last: list[tuple[_Place, Tensor]] = []  # a large archive is asked for in parts
    for chunk in entry.field("chunks"):
        box = Box(tuple(chunk.field("offsets")), tuple(chunk.field("sizes")))
        place = places.get((name, box.offsets)) or (
            places[name, ()] if not any(box.offsets) else None
        )
        if box.numel == 0 and place is None:
            continue
        if place is None:
            raise ValueError(f"{name} at {list(box.offsets)} lies nowhere")
        chunks.append((box, place))
    if sum(box.numel for box, _ in chunks) != math.prod(shape):
        raise ValueError(f"the parts of {name} do not cover its shape {list(shape)}")

    def part(box: Box) -> Tensor:
        target = torch.empty(box.sizes, dtype=dtype)
        for held, place in chunks:
            common = held.intersect(box)
            if common is None:
                continue
            if not last or last[0][0] != place:
                last[:] = [(place, _load(folder, place, name))]
            stored = last[0][1]
            if not isinstance(stored, Tensor) or stored.numel() != held.numel:
                raise CheckpointError(
                    f"{folder / place.file}: {name} at {list(held.offsets)} is not a tensor of "
                    f"{list(held.sizes)}"
                )
            inside = common.shift(held.offsets, sign=-1).slices()
            view = target[common.shift(box.offsets, sign=-1).slices()]
            view.copy_(stored.reshape(held.sizes)[inside])
            if common == held:
                last.clear()  # all of it was given
        return target

    return LazyTensor(shape, dtype, part)


def _load(folder: Path, place: _Place, name: str) -> Any:
    """An archive out of a data file, by torch's restricted loader."""
    with open(folder / place.file, "rb") as file:
        file.seek(place.start)
        data = file.read(place.length)
    return load_archive(data, f"{folder / place.file} at byte {place.start} ({name})")


def load_archive(data: bytes, where: str) -> Any:
    """What `torch.save` wrote, if it is made of tensors and plain values."""
    try:
        return torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
    except (
        pickle.UnpicklingError,
        RuntimeError,
        EOFError,
        ValueError,
        TypeError,
        AttributeError,
        KeyError,
        zipfile.BadZipFile,
    ) as error:
        raise CheckpointError(
            f"{where} is refused; nothing of it was run: {_first_line(error)}"
        ) from error


def _first_line(error: Exception) -> str:
    text = str(error).strip()
    blamed = [line for line in text.splitlines() if "GLOBAL" in line or "Unsupported" in line]
    return (blamed or text.splitlines() or [type(error).__name__])[0].strip()


def read_dcp_content(folder: Path) -> Content:
    """A DCP folder whose names are this package's (`model.NAME`, ...), as `convert` writes it."""
    found = read_dcp(folder)
    objects, metadata = {}, {}
    if (folder / OBJECTS).is_file():
        try:
            kept = json.loads((folder / OBJECTS).read_bytes())
            objects, metadata = dict(kept["objects"]), dict(kept["metadata"])
        except (ValueError, KeyError, TypeError) as error:
            raise CheckpointError(f"{folder / OBJECTS} is damaged: {error}") from error
    return Content(origin=str(folder), tensors=found.tensors, objects=objects, metadata=metadata)


def _write_item(name: str, box: Box, tensor: LazyTensor) -> WriteItem:
    chunk = ChunkStorageMetadata(torch.Size(box.offsets), torch.Size(box.sizes))
    properties = TensorProperties(dtype=tensor.dtype)
    data = TensorWriteData(chunk, properties, torch.Size(tensor.shape))
    return WriteItem(MetadataIndex(name, chunk.offsets), WriteItemType.SHARD, tensor_data=data)


def write_dcp(path: Path, content: Content) -> None:
    """Write the stock form of DCP to a new folder, which appears when it is complete. At most one
    tensor, or 64 MiB of it, is in memory.
    """
    staging = path.with_name(f".staging-{path.name}-{secrets.token_hex(4)}")
    staging.mkdir(parents=True)
    try:
        items = [
            _write_item(name, box, tensor)
            for name, tensor in content.tensors.items()
            for box in pieces(tensor)
        ]
        (plan,), table = create_default_global_save_plan([SavePlan(items)])
        results = _write_archives(staging / _DATA, plan.items, content.tensors)
        FileSystemWriter(staging).finish(table, [results])
        kept = {"objects": dict(content.objects), "metadata": dict(content.metadata)}
        write_file(staging / OBJECTS, (json.dumps(kept, allow_nan=False) + "\n").encode())
        sync_folder(staging)
        staging.rename(path)
        sync_folder(path.absolute().parent)
    except BaseException:
        shutil.rmtree(staging, ignore_errors=True)
        raise


def _write_archives(
    path: Path, items: Sequence[WriteItem], tensors: Mapping[str, LazyTensor]
) -> list[WriteResult]:
    """One data file of archives, as torch's writer would, which keeps all tensors till the end."""
    results = []
    with open(path, "xb") as file:
        for item in items:
            assert item.tensor_data is not None
            chunk, start = item.tensor_data.chunk, file.tell()
            box = Box(tuple(chunk.offsets), tuple(chunk.sizes))
            tensor = tensors[item.index.fqn].part(box)
            if tensor.untyped_storage().nbytes() != tensor.nbytes:
                tensor = tensor.clone()  # torch.save writes the whole storage
            torch.save(tensor, file)
            place = _StorageInfo(path.name, start, file.tell() - start)
            results.append(WriteResult(item.index, box.numel, place))
        file.flush()
        os.fsync(file.fileno())
    return results
