"""The steps of a save: agree on who writes what, write, commit.

They are separate functions, because a background save plans and commits on the trainer's ranks and
writes elsewhere (`saver.py`). `save` runs them one after the other.
"""

import json
import os
import zlib
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.checkpoint.storage import WriteResult

from megatron_lightning.checkpoint.boxed_tensor import BoxedTensor
from megatron_lightning.checkpoint.codec import Codec
from megatron_lightning.checkpoint.commit import begin, discard, publish
from megatron_lightning.checkpoint.encode import OBJECT_TENSORS
from megatron_lightning.checkpoint.errors import CheckpointError
from megatron_lightning.checkpoint.files import write_file
from megatron_lightning.checkpoint.index import METADATA_FILE, dtype_name
from megatron_lightning.checkpoint.manifest import FileEntry, Manifest, read_manifest
from megatron_lightning.checkpoint.planner import BoxSavePlanner
from megatron_lightning.checkpoint.ranks import RankGroup
from megatron_lightning.checkpoint.storage import DATA_FOLDER, BoxWriter, WrittenFile

OBJECTS_FILE = "objects.json"
RANDOM_STATES = OBJECT_TENSORS + "random/"
"""Beginning of the names of tensors that each rank adds for itself and reads alone."""
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
    prepared: list[Objects] = []  # stays empty on all but the first rank

    def prepare() -> Path:
        prepared.append(encode_objects(objects, metadata or {}, codec))
        return begin(path)

    staging = ranks.broadcast("preparing the save", prepare)
    planner, writer = BoxSavePlanner(), BoxWriter(staging)
    extra = prepared[0].tensors if prepared else {}
    try:
        plan, table = PlanCache().plan(tensors, extra, planner, writer, ranks)
        written = ranks.gather("writing the tensors", lambda: write_boxes(plan, planner, writer))
        ranks.broadcast(
            "committing the checkpoint", lambda: commit(path, writer, table, written, prepared[0])
        )
    except BaseException:
        if ranks.is_first:
            discard(staging)
        raise


@dataclass(frozen=True, slots=True)
class Objects:
    """What the first rank adds to the tensors, ready to be written."""

    tree: bytes
    tensors: dict[str, torch.Tensor]
    metadata: Any


def encode_objects(
    objects: Mapping[str, Any], metadata: Mapping[str, Any], codec: Codec
) -> Objects:
    """Write the objects as JSON, tensors taken out. Raises ValueError for what can't be stored."""
    encoded = codec.encode(dict(objects))
    about = codec.encode(dict(metadata))
    if about.tensors:
        raise ValueError(
            f"metadata holds large tensors ({', '.join(about.tensors)}); put them among the objects"
        )
    return Objects(
        (json.dumps(encoded.tree, allow_nan=False) + "\n").encode(), encoded.tensors, about.tree
    )


class PlanCache:
    """Agrees on who writes what, and remembers it: training saves the same tensors again and
    again.
    """

    def __init__(self) -> None:
        self._signature: Hashable = None
        self._plan = SavePlan([])
        self._table = Metadata({})

    def plan(
        self,
        tensors: Mapping[str, torch.Tensor],
        extra: Mapping[str, torch.Tensor],
        planner: BoxSavePlanner,
        writer: BoxWriter,
        ranks: RankGroup,
    ) -> tuple[SavePlan, Metadata]:
        """Return this rank's plan and, on the first rank, the table for `writer.finish` (elsewhere
        an empty one). `extra` are this rank's tensors with reserved names: on the first rank those
        taken out of the objects, and on each its own.
        """
        signature: Hashable = None

        def local() -> SavePlan:
            nonlocal signature
            boxed = {**boxed_tensors(tensors), **boxed_tensors(extra)}
            signature = tuple((n, t.dtype, tuple(t.shape), t.boxes) for n, t in boxed.items())
            planner.set_up_planner(boxed, is_coordinator=ranks.is_first)  # type: ignore[arg-type]
            writer.set_up_storage_writer(ranks.is_first)
            if signature == self._signature:
                return SavePlan([])
            reserved = [name for name in tensors if name.startswith(OBJECT_TENSORS)]
            if reserved:
                raise ValueError(
                    f"tensors: the names {reserved[:3]} begin with {OBJECT_TENSORS!r}, a reserved"
                    f" word"
                )
            return writer.prepare_local_plan(planner.create_local_plan())

        if self._signature is not None:
            try:
                local()
            except Exception:  # found again below, where it is told to all ranks
                signature = None
            (known,) = ranks.minimum(signature == self._signature)
            if known:
                return self._plan, self._table
            self._signature = None
        self._plan, self._table = _plan_anew(local, planner, writer, ranks)
        self._signature = signature
        return self._plan, self._table


def _plan_anew(
    local: Any, planner: BoxSavePlanner, writer: BoxWriter, ranks: RankGroup
) -> tuple[SavePlan, Metadata]:
    table = Metadata({})

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


def boxed_tensors(tensors: Mapping[str, torch.Tensor]) -> dict[str, BoxedTensor]:
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


def commit(
    path: PathLike,
    writer: BoxWriter,
    table: Metadata,
    written: list[RankResult],
    objects: Objects,
    delete: Callable[[Path], None] | None = None,
) -> int:
    """On the first rank: write the tables and put the staged folder in place; returns when that
    was, in nanoseconds since 1970.
    """
    writer.finish(table, [results for results, _ in written])
    files = {file.file: FileEntry(file.size, file.crc32) for _, file in written if file is not None}
    files[METADATA_FILE] = entry_of((writer.folder / METADATA_FILE).read_bytes())
    return commit_objects(path, writer.folder, files, objects, delete)


def can_link(source: Path, target: Path) -> bool:
    """Whether a file in the folder `source` can have a second name in the folder `target`."""
    probe = source / ".link-probe"
    try:
        probe.touch()
        os.link(probe, target / probe.name)
        (target / probe.name).unlink()
    except OSError:
        return False
    finally:
        probe.unlink(missing_ok=True)
    return True


def commit_linked(
    path: PathLike,
    staging: Path,
    source: Path,
    objects: Objects,
    *,
    created: int,
    delete: Callable[[Path], None] | None = None,
) -> None:
    """On the first rank: put a checkpoint in place that has the tensors of the one at `source`,
    which was committed at `created`.

    Its data files are further names of the same files (hard links), so that either may be removed.
    Raises CheckpointError if `source` is another one by now, OSError if no links can be made.
    """
    manifest = read_manifest(source)
    if manifest.created_unix_ns != created:
        raise CheckpointError(f"{source} has been replaced by another checkpoint")
    files = {name: entry for name, entry in manifest.files.items() if name != OBJECTS_FILE}
    (staging / DATA_FOLDER).mkdir()
    for name in files:
        os.link(source / name, staging / name)
    commit_objects(path, staging, files, objects, delete)


def commit_objects(
    path: PathLike,
    staging: Path,
    files: dict[str, FileEntry],
    objects: Objects,
    delete: Callable[[Path], None] | None = None,
) -> int:
    """Write the objects into a staged folder whose other `files` are complete, and put it in place
    as `path`. Returns when that was, in nanoseconds since 1970. `delete` as in `publish`.
    """
    write_file(staging / OBJECTS_FILE, objects.tree)
    files[OBJECTS_FILE] = entry_of(objects.tree)
    manifest = Manifest(files=files, metadata=objects.metadata)
    publish(staging, path, manifest, delete)
    return manifest.created_unix_ns


def entry_of(data: bytes) -> FileEntry:
    """What the manifest says about a file with these contents."""
    return FileEntry(len(data), zlib.crc32(data))
