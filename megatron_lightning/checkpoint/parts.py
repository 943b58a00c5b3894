"""What one rank holds, as a checkpoint folder of its own: for copies that never leave a node.

The format is that of whole checkpoints (boxes, tables as JSON, a manifest with sizes and checksums,
committed by a rename), less the rule that boxes cover their tensors. No other rank is involved, and
nothing is left out because another rank has it too. Such a folder is loaded by the rank that wrote
it, in the same layout, with `load(..., process_group=ALONE)`.
"""

from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.planner import SavePlan

from megatron_lightning.checkpoint.boxes import Box
from megatron_lightning.checkpoint.errors import CheckpointError
from megatron_lightning.checkpoint.files import write_file
from megatron_lightning.checkpoint.index import (
    METADATA_FILE,
    StoredBox,
    StoredTensor,
    index_to_json,
)
from megatron_lightning.checkpoint.manifest import MANIFEST_FILE, FileEntry, Manifest, read_manifest
from megatron_lightning.checkpoint.planner import BoxSavePlanner
from megatron_lightning.checkpoint.saving import Objects, boxed_tensors, commit_objects, entry_of
from megatron_lightning.checkpoint.storage import DATA_FOLDER

PART = "part"
"""Key of a part in the metadata of its manifest: the number of its rank."""
DATA_FILE = f"{DATA_FOLDER}/part.bin"


def is_part(path: Path) -> bool:
    """Whether the checkpoint at `path` is what one rank held. Raises CheckpointError where there is
    no checkpoint.
    """
    metadata = read_manifest(path).metadata
    return isinstance(metadata, Mapping) and PART in metadata


class PartPlan:
    """All boxes of this rank, in the form that writers take: a plan and a planner."""

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self._boxed = boxed_tensors(tensors)
        self.planner = BoxSavePlanner()
        self.planner.set_up_planner(dict(self._boxed), is_coordinator=False)  # type: ignore[arg-type]
        items = [
            item
            for name, tensor in self._boxed.items()
            for item in tensor.__create_write_items__(name, None)
        ]
        self.plan = SavePlan(items, storage_data=DATA_FILE)

    @property
    def num_bytes(self) -> int:
        """Bytes of all boxes."""
        return sum(
            view.numel() * view.element_size()
            for tensor in self._boxed.values()
            for view in tensor.views
        )

    def commit(
        self, path: Path, staging: Path, answer: Mapping[str, Any] | None, objects: Objects
    ) -> None:
        """Put the staged folder in place as `path`; `answer` says what was written, see
        `data_file.write_file`.
        """
        boxes: dict[str, list[StoredBox]] = defaultdict(list)
        files: dict[str, FileEntry] = {}
        if answer is not None:
            files[DATA_FILE] = FileEntry(answer["size"], answer["crc32"])
            for item, (start, length, crc32) in zip(self.plan.items, answer["boxes"], strict=True):
                assert item.tensor_data is not None
                chunk = item.tensor_data.chunk
                box = Box(tuple(chunk.offsets), tuple(chunk.sizes))
                boxes[item.index.fqn].append(StoredBox(box, DATA_FILE, start, length, crc32))
        index = {
            name: StoredTensor(tensor.dtype, tuple(tensor.shape), tuple(boxes[name]))
            for name, tensor in self._boxed.items()
        }
        table = index_to_json(index, part=True)
        write_file(staging / METADATA_FILE, table)
        files[METADATA_FILE] = entry_of(table)
        commit_objects(path, staging, files, objects)


def files_of(path: Path) -> dict[str, int]:
    """Every file of the checkpoint at `path`, the manifest last, with its size in bytes."""
    manifest = read_manifest(path)
    sizes = {name: entry.size for name, entry in manifest.files.items()}
    return {**sizes, MANIFEST_FILE: (path / MANIFEST_FILE).stat().st_size}


def adopt(staging: Path) -> Manifest:
    """The manifest out of a staged folder that was copied as a whole, ready for `publish`."""
    manifest = read_manifest(staging)
    for name, entry in manifest.files.items():
        if not (staging / name).is_file() or (staging / name).stat().st_size != entry.size:
            raise CheckpointError(f"{staging / name} was not copied whole")
    (staging / MANIFEST_FILE).unlink()
    return manifest
