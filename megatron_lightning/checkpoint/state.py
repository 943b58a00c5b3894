"""Loading the training state: global tensors in boxes, everything else as JSON.

`load` is called by all ranks together; each reads its own boxes. `saving.py` is the other way.
"""

import json
import math
import os
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megatron_lightning.checkpoint.boxed_tensor import BoxedTensor
from megatron_lightning.checkpoint.checks import open_checkpoint
from megatron_lightning.checkpoint.codec import Codec
from megatron_lightning.checkpoint.encode import OBJECT_TENSORS
from megatron_lightning.checkpoint.errors import CheckpointError
from megatron_lightning.checkpoint.index import (
    METADATA_FILE,
    StoredTensor,
    index_from_json,
)
from megatron_lightning.checkpoint.manifest import (
    Manifest,
    local_path,
    read_checked,
    read_manifest,
)
from megatron_lightning.checkpoint.planner import BoxLoadPlanner
from megatron_lightning.checkpoint.ranks import RankGroup
from megatron_lightning.checkpoint.report import (
    Comparison,
    LoadReport,
    Strictness,
    TensorInfo,
    compare,
    summarize,
)
from megatron_lightning.checkpoint.saving import (
    OBJECTS_FILE,
    PLAIN,
    RANDOM_STATES,
    PathLike,
    boxed_tensors,
)
from megatron_lightning.checkpoint.storage import BoxReader


def load(
    path: PathLike,
    tensors: Mapping[str, torch.Tensor],
    *,
    strict: Strictness = "all",
    scope: str | tuple[str, ...] = "",
    process_group: dist.ProcessGroup | None = None,
) -> LoadReport:
    """Fill this rank's parts of the named tensors in place, whatever layout they were saved in.

    All ranks of `process_group` call it, each with the names it holds; each reads only its boxes. A
    name counts as unexpected if no rank asks for it; only names that begin with `scope` are looked
    at for that.

    Values are converted between floating dtypes by `Tensor.copy_` (to a narrower one by rounding to
    the nearest, ties to even) and listed in the report; other dtypes must be equal.

    `strict="all"`: names missing in or unexpected in the checkpoint, and tensors of another shape
    or dtype, are errors. "missing_ok" leaves missing ones untouched, "unexpected_ok" ignores
    unexpected ones, "none" does both and leaves mismatched ones untouched too. The report is the
    same on all ranks.

    Raises CheckpointError on all ranks; nothing is changed then, unless the reading of the data
    itself failed.
    """
    ranks = RankGroup(process_group)
    folder = local_path(path)
    contents = ranks.broadcast("opening the checkpoint", lambda: _open(folder)[1])
    index = index_from_json(contents, str(folder / METADATA_FILE))
    held: dict[str, BoxedTensor] = {}

    def look() -> Comparison:
        held.update(boxed_tensors(tensors))
        return compare(index, held)

    answers = ranks.gather("comparing the tensors", look)
    report = ranks.broadcast("loading", lambda: summarize(folder, index, answers, strict, scope))
    wanted = {name: held[name] for name in held if name not in report.mismatched and name in index}
    ranks.gather("reading the tensors", lambda: _read(folder, index, wanted))
    return report


def load_objects(path: PathLike, *, codec: Codec = PLAIN) -> dict[str, Any]:
    """The `objects` of a checkpoint, tensors on the CPU. Each process reads them by itself."""
    folder = local_path(path)
    manifest, contents = _open(folder)
    tree = json.loads(read_checked(folder, manifest, OBJECTS_FILE))
    index = index_from_json(contents, str(folder / METADATA_FILE))
    taken = {
        n: torch.empty(t.shape, dtype=t.dtype)
        for n, t in index.items()
        if n.startswith(OBJECT_TENSORS) and not n.startswith(RANDOM_STATES)
    }
    _read(folder, index, {name: BoxedTensor.of(tensor) for name, tensor in taken.items()})
    return codec.decode(tree, taken, where=str(folder / OBJECTS_FILE))


def load_metadata(path: PathLike, *, codec: Codec = PLAIN) -> dict[str, Any]:
    """The `metadata` given to `save`; only the manifest is read."""
    return codec.decode(read_manifest(path).metadata, where=f"the metadata of {os.fspath(path)}")


def list_tensors(path: PathLike) -> dict[str, TensorInfo]:
    """Name, global shape and dtype of every tensor, without those taken out of the objects."""
    folder = local_path(path)
    index = index_from_json(_open(folder)[1], str(folder / METADATA_FILE))
    return {
        n: TensorInfo(t.shape, t.dtype)
        for n, t in index.items()
        if not n.startswith(OBJECT_TENSORS)
    }


def _open(folder: Path) -> tuple[Manifest, bytes]:
    """The manifest and the checked contents of `metadata.json`."""
    manifest = open_checkpoint(folder)
    contents = read_checked(folder, manifest, METADATA_FILE)
    for name, tensor in index_from_json(contents, str(folder / METADATA_FILE)).items():
        for stored in tensor.boxes:
            entry = manifest.files.get(stored.file)
            if entry is None or stored.start + stored.length > entry.size:
                raise CheckpointError(
                    f"{folder / METADATA_FILE} places {name!r} outside the files of the checkpoint"
                )
    return manifest, contents


def _read(folder: Path, index: Mapping[str, StoredTensor], tensors: dict[str, BoxedTensor]) -> None:
    """Read this rank's boxes; no other rank is involved."""
    reader, planner = BoxReader(folder, index), BoxLoadPlanner()
    planner.set_up(tensors, reader.read_metadata())
    plan = planner.finish_plan(planner.create_local_plan())
    planned = Counter({name: 0 for name in tensors})
    for item in plan.items:
        planned[item.dest_index.fqn] += math.prod(item.lengths)
    for name, tensor in tensors.items():
        if planned[name] != sum(box.numel for box in tensor.boxes):
            raise CheckpointError(
                f"{folder} has only a part of what this rank holds of {name!r}: it is a copy of"
                f" what one rank held, for that rank and layout"
            )
    reader.read_data(plan, planner).wait()
