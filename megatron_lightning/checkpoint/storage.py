"""Storage for torch's distributed checkpoint (DCP) without pickle: raw boxes in one file a rank,
contents as JSON.

DCP's own file storage pickles its metadata and runs `torch.load` on it. These two classes take its
place behind the same interface: `dcp.save(..., storage_writer=BoxWriter(folder))`, `dcp.load(...,
storage_reader=BoxReader(folder))`.
"""

import os
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadItemType,
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    SavePlanner,
    WriteItemType,
)
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.futures import Future

from megatron_lightning.checkpoint.boxes import Box
from megatron_lightning.checkpoint.errors import CheckpointError
from megatron_lightning.checkpoint.files import DataFileReader, DataFileWriter, write_file
from megatron_lightning.checkpoint.index import (
    METADATA_FILE,
    StoredBox,
    StoredTensor,
    index_from_json,
    index_to_json,
)

DATA_FOLDER = "data"


@dataclass(frozen=True, slots=True)
class WrittenFile:
    """A finished data file."""

    file: str
    """Path relative to the checkpoint folder."""
    size: int
    """Bytes."""
    crc32: int


class BoxWriter(StorageWriter):
    """Writes the boxes of a plan to `data/rank_<rank>.bin` and the table of contents to
    `metadata.json`.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder = Path(folder)
        self.written: WrittenFile | None = None
        """The data file of this rank after `write_data`; None if its plan was empty."""

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Begin a new checkpoint, in another folder if `checkpoint_id` is given."""
        if checkpoint_id is not None:
            self.folder = Path(checkpoint_id)
        self.written = None

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:  # noqa: ARG002
        """Make the folders; every rank does, as a new name shows late on network file systems."""
        (self.folder / DATA_FOLDER).mkdir(parents=True, exist_ok=True)

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Refuse what is not a tensor."""
        for item in plan.items:
            if item.type == WriteItemType.BYTE_IO:
                raise CheckpointError(
                    f"{item.index.fqn!r} is not a tensor; save it among the objects"
                )
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Name the data file of each rank."""
        return [
            replace(plan, storage_data=f"{DATA_FOLDER}/rank_{i:05d}.bin")
            for i, plan in enumerate(plans)
        ]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's boxes; the result is complete when it is returned."""
        results = []
        if plan.items:
            file = plan.storage_data
            with DataFileWriter(self.folder / file) as writer:
                for item in plan.items:
                    data = planner.resolve_data(item)
                    assert isinstance(data, torch.Tensor)
                    assert item.tensor_data is not None
                    start, length, crc32 = writer.write(data)
                    chunk = item.tensor_data.chunk
                    box = Box(tuple(chunk.offsets), tuple(chunk.sizes))
                    stored = StoredBox(box, file, start, length, crc32)
                    results.append(WriteResult(item.index, length, stored))
            self.written = WrittenFile(file, writer.size, writer.crc32)
        done: Future[list[WriteResult]] = Future()
        done.set_result(results)
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Write `metadata.json` from what all ranks wrote."""
        boxes: dict[str, list[StoredBox]] = defaultdict(list)
        for result in (result for results_of_rank in results for result in results_of_rank):
            boxes[result.index.fqn].append(result.storage_data)
        index = {
            name: StoredTensor(entry.properties.dtype, tuple(entry.size), tuple(boxes[name]))
            for name, entry in metadata.state_dict_metadata.items()
            if isinstance(entry, TensorStorageMetadata)
        }
        write_file(self.folder / METADATA_FILE, index_to_json(index))

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Whether this storage can write there: any path of the local file system."""
        return "://" not in os.fspath(checkpoint_id)


class BoxReader(StorageReader):
    """Reads parts of boxes from the data files, only the bytes that are needed."""

    def __init__(
        self, folder: str | os.PathLike[str], index: Mapping[str, StoredTensor] | None = None
    ) -> None:
        self.folder = Path(folder)
        self._index = index

    @property
    def index(self) -> Mapping[str, StoredTensor]:
        """The table of contents; read from `metadata.json` when it was not given."""
        if self._index is None:
            path = self.folder / METADATA_FILE
            self._index = index_from_json(path.read_bytes(), str(path))
        return self._index

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Begin a new load, from another folder if `checkpoint_id` is given."""
        if checkpoint_id is not None and Path(checkpoint_id) != self.folder:
            self.folder, self._index = Path(checkpoint_id), None

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:  # noqa: ARG002
        """The table of contents as DCP's planners want it."""
        return Metadata({name: _dcp_entry(tensor) for name, tensor in self.index.items()})

    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any
    ) -> None:  # noqa: ARG002
        """Nothing to do: the index is all that is needed."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """The plan as it is."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """The plans as they are."""
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Fill the tensors of the plan, file by file from front to back. Complete when it is
        returned.
        """
        wanted: dict[str, list[tuple[StoredBox, ReadItem]]] = defaultdict(list)
        boxes: dict[str, dict[tuple[int, ...], StoredBox]] = {}
        for item in plan.items:
            if item.type == LoadItemType.BYTE_IO:
                raise CheckpointError(
                    f"{item.dest_index.fqn!r} is not a tensor; load it with the objects"
                )
            name = item.storage_index.fqn
            if name not in boxes:
                boxes[name] = {stored.box.offsets: stored for stored in self.index[name].boxes}
            assert item.storage_index.offset is not None
            stored = boxes[name][tuple(item.storage_index.offset)]
            wanted[stored.file].append((stored, item))
        for file, items in wanted.items():
            self._read_file(file, items, planner)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _read_file(
        self, file: str, items: list[tuple[StoredBox, ReadItem]], planner: LoadPlanner
    ) -> None:
        reader = DataFileReader(self.folder / file)
        try:
            for stored, item in sorted(items, key=lambda pair: pair[0].start):
                target = planner.resolve_tensor(item).detach()
                part = Box(tuple(item.storage_offsets), tuple(item.lengths))
                dtype = self.index[item.storage_index.fqn].dtype
                reader.read(target, stored.start, dtype, stored.box.sizes, part)
                planner.commit_tensor(item, target)
        finally:
            reader.close()

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Whether this storage can read there."""
        return (Path(checkpoint_id) / METADATA_FILE).is_file()


def _dcp_entry(tensor: StoredTensor) -> TensorStorageMetadata:
    chunks = [
        ChunkStorageMetadata(torch.Size(stored.box.offsets), torch.Size(stored.box.sizes))
        for stored in tensor.boxes
    ]
    return TensorStorageMetadata(
        TensorProperties(dtype=tensor.dtype), torch.Size(tensor.shape), chunks
    )
