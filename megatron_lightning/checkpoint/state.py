"""Saving and loading the whole training state: global tensors in boxes, everything else as JSON.

`save` and `load` are called by all ranks together; each writes and reads its own boxes. The steps
are separate functions (plan, write, commit), because a background save plans and commits on the
trainer's ranks and writes elsewhere.
"""

import json
import math
import os
import zlib
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.checkpoint.storage import WriteResult

from megatron_lightning.checkpoint.boxed_tensor import BoxedTensor
from megatron_lightning.checkpoint.checks import open_checkpoint
from megatron_lightning.checkpoint.codec import Codec
from megatron_lightning.checkpoint.commit import begin, discard, publish
from megatron_lightning.checkpoint.encode import OBJECT_TENSORS
from megatron_lightning.checkpoint.errors import CheckpointError
from megatron_lightning.checkpoint.files import write_file
from megatron_lightning.checkpoint.index import (
    METADATA_FILE,
    StoredTensor,
    dtype_name,
    index_from_json,
)
from megatron_lightning.checkpoint.manifest import (
    FileEntry,
    Manifest,
    local_path,
    read_checked,
    read_manifest,
)
from megatron_lightning.checkpoint.planner import BoxLoadPlanner, BoxSavePlanner
from megatron_lightning.checkpoint.ranks import RankGroup
from megatron_lightning.checkpoint.report import (
    Comparison,
    LoadReport,
    Strictness,
    TensorInfo,
    compare,
    summarize,
)
from megatron_lightning.checkpoint.storage import BoxReader, BoxWriter, WrittenFile

OBJECTS_FILE = "objects.json"
PLAIN = Codec()
PathLike = str | os.PathLike[str]
RankResult = tuple[list[WriteResult], WrittenFile | None]
"""What one rank wrote: its boxes, and its data file if it wrote any."""


def save(
    path: PathLike,
    tensors: Mapping[str, torch.Tensor],
    objects: Mapping[str, Any],
    *,
    process_group: dist.ProcessGroup | None = None,
    metadata: Mapping[str, Any] | None = None,
    codec: Codec = PLAIN,
) -> None:
    """Write a checkpoint folder at `path`, replacing an older one of that name only when the new
    one is complete.

    All ranks of `process_group` call it (None: the world; a group that carries CPU objects is best,
    see `RankGroup`). `tensors` are this rank's parts by global name: a BoxedTensor, a DTensor, or a
    plain tensor, which is a replica of the whole. The same name means the same tensor on all ranks:
    replicas are written once. `objects` (a tree, see `Codec`) and `metadata` (small, readable
    without loading: layout, step, tokens) are taken from the first rank.

    When it returns on any rank, the checkpoint is complete and on disk. Raises CheckpointError on
    all ranks if any failed, with that rank's message (in a single process the error itself); `path`
    is then as it was.
    """
    ranks = RankGroup(process_group)
    prepared: list[_Objects] = []  # stays empty on all but the first rank

    def prepare() -> Path:
        prepared.append(_encode(objects, metadata or {}, codec))
        return begin(path)

    staging = ranks.broadcast("preparing the save", prepare)
    planner, writer = BoxSavePlanner(), BoxWriter(staging)
    extra = prepared[0].tensors if prepared else {}
    try:
        plan, table = plan_save(tensors, extra, planner, writer, ranks)
        written = ranks.gather("writing the tensors", lambda: write_boxes(plan, planner, writer))
        ranks.broadcast(
            "committing the checkpoint", lambda: _commit(path, writer, table, written, prepared[0])
        )
    except BaseException:
        if ranks.is_first:
            discard(staging)
        raise


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
        held.update(_boxed(tensors))
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
        if n.startswith(OBJECT_TENSORS)
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


def plan_save(
    tensors: Mapping[str, torch.Tensor],
    extra: Mapping[str, torch.Tensor],
    planner: BoxSavePlanner,
    writer: BoxWriter,
    ranks: RankGroup,
) -> tuple[SavePlan, Metadata]:
    """Agree on who writes what; `extra` are tensors taken out of the objects, with reserved names.

    Returns this rank's plan and, on the first rank, the table for `writer.finish` (elsewhere an
    empty one).
    """
    table = Metadata({})

    def local() -> SavePlan:
        reserved = [name for name in tensors if name.startswith(OBJECT_TENSORS)]
        if reserved:
            raise ValueError(
                f"tensors: the names {reserved[:3]} begin with {OBJECT_TENSORS!r}, a reserved word"
            )
        boxed = {**_boxed(tensors), **_boxed(extra)}
        planner.set_up_planner(boxed, is_coordinator=ranks.is_first)  # type: ignore[arg-type]
        writer.set_up_storage_writer(ranks.is_first)
        return writer.prepare_local_plan(planner.create_local_plan())

    def share(plans: list[SavePlan]) -> list[SavePlan]:
        nonlocal table
        shared, table = planner.create_global_plan(plans)
        return writer.prepare_global_plan(shared)

    plans = ranks.gather("planning the save", local)
    plan = ranks.scatter("planning the save", lambda: share(plans))
    return planner.finish_plan(plan), table


def write_boxes(plan: SavePlan, planner: BoxSavePlanner, writer: BoxWriter) -> RankResult:
    """Write this rank's data file; no other rank is involved."""
    return writer.write_data(plan, planner).value(), writer.written


@dataclass(frozen=True, slots=True)
class _Objects:
    """What the first rank adds to the tensors, ready to be written."""

    tree: bytes
    tensors: dict[str, torch.Tensor]
    metadata: Any


def _encode(objects: Mapping[str, Any], metadata: Mapping[str, Any], codec: Codec) -> _Objects:
    encoded = codec.encode(dict(objects))
    about = codec.encode(dict(metadata))
    if about.tensors:
        raise ValueError(
            f"metadata holds large tensors ({', '.join(about.tensors)}); put them among the objects"
        )
    return _Objects(
        (json.dumps(encoded.tree, allow_nan=False) + "\n").encode(), encoded.tensors, about.tree
    )


def _boxed(tensors: Mapping[str, torch.Tensor]) -> dict[str, BoxedTensor]:
    """The tensors as BoxedTensors. Raises ValueError naming one that has no values or cannot be
    stored.
    """
    boxed = {}
    for name, tensor in tensors.items():
        if not isinstance(tensor, torch.Tensor) or tensor.layout is not torch.strided:
            raise ValueError(
                f"tensors[{name!r}] is {type(tensor).__name__}, not a dense tensor;"
                " save it as an object"
            )
        if tensor.device.type == "meta":
            raise ValueError(f"tensors[{name!r}] is on the meta device; materialise it first")
        dtype_name(tensor.dtype)
        boxed[name] = BoxedTensor.of(tensor)
    return boxed


def _commit(
    path: PathLike, writer: BoxWriter, table: Metadata, written: list[RankResult], objects: _Objects
) -> None:
    """On the first rank: write the tables and put the staged folder in place."""
    writer.finish(table, [results for results, _ in written])
    write_file(writer.folder / OBJECTS_FILE, objects.tree)
    files = {file.file: FileEntry(file.size, file.crc32) for _, file in written if file is not None}
    for name in (METADATA_FILE, OBJECTS_FILE):
        data = (writer.folder / name).read_bytes()
        files[name] = FileEntry(len(data), zlib.crc32(data))
    publish(writer.folder, path, Manifest(files=files, metadata=objects.metadata))


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
        assert planned[name] == sum(box.numel for box in tensor.boxes), name
    reader.read_data(plan, planner).wait()
