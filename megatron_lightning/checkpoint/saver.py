"""Saves of one run, in the foreground or while training goes on.

A background save copies this rank's boxes to host memory, lets the rank's writer process write them
(`staging.py`, `background.py`), and is committed by the ranks together (`pending.py`) at a later
step: `poll`. There is one at a time; the next one waits for it. Until it is committed nothing of it
can be seen, and what it replaces stays.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan

from megatron_lightning.checkpoint.codec import Codec
from megatron_lightning.checkpoint.commit import begin, delete_folder, discard, remove
from megatron_lightning.checkpoint.errors import CheckpointError
from megatron_lightning.checkpoint.pending import PendingSave
from megatron_lightning.checkpoint.planner import BoxSavePlanner
from megatron_lightning.checkpoint.ranks import RankGroup
from megatron_lightning.checkpoint.save_times import SaveTimes
from megatron_lightning.checkpoint.saving import (
    PLAIN,
    Objects,
    PlanCache,
    can_link,
    commit,
    commit_linked,
    encode_objects,
    write_boxes,
)
from megatron_lightning.checkpoint.staging import Stager
from megatron_lightning.checkpoint.storage import BoxWriter
from megatron_lightning.utils.logging import get_logger


@dataclass(kw_only=True)
class _Written:
    """Tensors that have been written, or are being written, and may be referred to."""

    path: Path
    state: Hashable
    extra: dict[str, Tensor]
    created: int = 0
    """Mark of the checkpoint that was committed with them; 0 while there is none."""


class Saver:
    """All ranks of `process_group` (None: the world) call each method together, but for
    `before_update`, `is_pending`, `after_commit`, `remove`, `abandon` and `close`.
    """

    def __init__(
        self,
        *,
        process_group: dist.ProcessGroup | None = None,
        device: torch.device | None = None,
        pin_memory: bool = True,
    ) -> None:
        self._ranks = RankGroup(process_group)
        self._plans = PlanCache()
        self._stager = Stager(device, pin_memory=pin_memory)
        self._pending: PendingSave | None = None
        self._last: _Written | None = None
        self._deletions: list[threading.Thread] = []
        self.times: SaveTimes | None = None
        """Of the last save that was committed."""

    # ------------------------------------------------------------------ saving

    def save(
        self,
        path: Path,
        tensors: Mapping[str, Tensor],
        objects: Mapping[str, Any],
        *,
        metadata: Mapping[str, Any],
        codec: Codec = PLAIN,
        own: Mapping[str, Tensor] | None = None,
        state: Hashable = None,
        background: bool = False,
        steady: Callable[[str], bool] = lambda _: False,
    ) -> None:
        """As `save` of this package; in the `background`, what went wrong is raised by `poll` or
        `finish`.

        `own` are small tensors of this rank alone, under names of `RANDOM_STATES`.

        `state` stands for the values of the tensors: where it equals that of the save before, the
        data files get a second name instead of being written again. `steady` says which tensors
        don't change before `before_update` is called, so that their copies need not be waited for.
        """
        began, prepared = time.monotonic(), list[Objects]()
        last, same = self._last, False
        if last is not None and state is not None:
            (same,) = self._ranks.minimum(last.state == state)
        if not same:
            self._complete()

        def prepare() -> tuple[Path, bool]:
            prepared.append(encode_objects(objects, metadata, codec))
            return self._prepare(path, prepared[0], last if same else None)

        staging, linked = self._ranks.broadcast("preparing the save", prepare)
        mine = prepared[0] if prepared else None
        if linked:
            assert last is not None
            seconds = time.monotonic() - began
            if self._pending is not None:
                self._pending.linked.append((path, staging, mine))
                self._pending.stall_seconds += seconds
            else:
                self._log(f"saved {path}: its tensors are those of {last.path}; {seconds:.3f} s")
            return
        self._last, created = None, 0
        planner, writer = BoxSavePlanner(), BoxWriter(staging)
        extra = {} if mine is None else mine.tensors
        try:
            self._complete()
            reserved = {**extra, **(own or {})}
            plan, table = self._plans.plan(tensors, reserved, planner, writer, self._ranks)
            if background:
                staged = self._stager.stage(plan, planner, staging, steady, began)
                self._pending = PendingSave(
                    path=path, writer=writer, plan=plan, table=table, objects=mine, staged=staged
                )
            else:
                created = self._write(path, plan, table, planner, writer, mine, began)
        except BaseException:
            if self._ranks.is_first:
                discard(staging)
            raise
        kept = {name: tensor.detach().cpu().clone() for name, tensor in extra.items()}
        self._last = _Written(path=path, state=state, extra=kept, created=created)
        if self._pending is not None:
            self._pending.stall_seconds = time.monotonic() - began

    def _prepare(self, path: Path, objects: Objects, like: _Written | None) -> tuple[Path, bool]:
        """On the first rank: make a staging folder; whether its tensors are those of `like`."""
        staging = begin(path)
        if like is None or not _equal(objects.tensors, like.extra):
            return staging, False
        if self._pending is not None:
            return staging, can_link(self._pending.writer.folder, staging)
        try:
            commit_linked(path, staging, like.path, objects, created=like.created)
        except (OSError, CheckpointError):  # e.g. removed meanwhile, or no hard links there
            discard(staging)
            return begin(path), False
        return staging, True

    def _write(
        self,
        path: Path,
        plan: SavePlan,
        table: Metadata,
        planner: BoxSavePlanner,
        writer: BoxWriter,
        objects: Objects | None,
        began: float,
    ) -> int:
        ranks = self._ranks
        written = ranks.gather("writing the tensors", lambda: write_boxes(plan, planner, writer))

        def put_in_place() -> tuple[int, int]:
            assert objects is not None
            created = commit(path, writer, table, written, objects)
            return created, sum(file.size for _, file in written if file is not None)

        created, num_bytes = ranks.broadcast("committing the checkpoint", put_in_place)
        seconds = time.monotonic() - began
        self.times = SaveTimes(
            path=str(path),
            num_bytes=num_bytes,
            stall_seconds=seconds,
            staging_seconds=0.0,
            write_seconds=seconds,
        )
        self._log(self.times.describe())
        return created

    def _log(self, line: str) -> None:
        if self._ranks.is_first:
            get_logger(__name__).info(line)

    # ------------------------------------------------------------------ in the background

    def prepare(self, tensors: Mapping[str, Tensor], own: Mapping[str, Tensor]) -> None:
        """Plan for tensors that will be saved, and allocate host memory for them meanwhile."""
        planner = BoxSavePlanner()
        plan, _ = self._plans.plan(tensors, own, planner, _NoFolder(""), self._ranks)
        self._stager.prepare([planner.resolve_data(item) for item in plan.items])

    def before_update(self) -> None:
        """To be called before the steady tensors of a save change; the device waits, if need be,
        and not the host.
        """
        if self._pending is not None:
            self._pending.staged.before_update()

    @property
    def is_saving(self) -> bool:
        """Whether a save is under way in the background."""
        return self._pending is not None

    def is_pending(self, path: Path) -> bool:
        """Whether a save to `path` is under way."""
        pending = self._pending
        return pending is not None and path in pending.paths

    def after_commit(self, action: Callable[[], None]) -> None:
        """Call `action` on this rank when the save that is under way has been committed, or now if
        there is none. It is not called if that save fails.
        """
        if self._pending is None:
            action()
        else:
            self._pending.afterwards.append(action)

    def poll(self) -> None:
        """Commit the save that is under way if all ranks have written their parts. Costs nothing
        if there is none.

        Raises CheckpointError on all ranks if the writing has failed on any.
        """
        if self._pending is None:
            return
        job = self._pending.staged.job
        done, fine = self._ranks.minimum(not job.is_alive(), not job.failed)
        if done or not fine:
            self._complete()

    def finish(self) -> None:
        """Wait for the save that is under way, commit it and delete what it replaced; raises as
        `poll`.
        """
        self._complete()
        for thread in self._deletions:
            thread.join()
        self._deletions.clear()

    def _complete(self) -> None:
        pending = self._pending
        if pending is None:
            return
        began = time.monotonic()
        ranks = self._ranks
        try:
            answers = ranks.gather(f"saving {pending.path} in the background", pending.answer)

            def put_in_place() -> tuple[int, SaveTimes]:
                created = pending.commit(answers, self._delete_later)
                return created, pending.times(answers, time.monotonic() - began)

            created, self.times = ranks.broadcast("committing the checkpoint", put_in_place)
            if self._last is not None:
                self._last.created = created
        except BaseException:
            self._last = None
            if ranks.is_first:
                for staging in pending.folders:
                    discard(staging)
            raise
        finally:
            self._pending = None
        names = "".join(f", also as {path}" for path in pending.paths[1:])
        self._log(self.times.describe() + names)
        for action in pending.afterwards:
            action()

    def remove(self, path: Path, *, later: bool) -> None:
        """Hide a checkpoint and delete it, now or in a thread. For one rank."""
        remove(path, self._delete_later if later else None)

    def _delete_later(self, folder: Path) -> None:
        """Large files take long to delete, so a thread does; a fit's end waits for it."""
        self._deletions = [thread for thread in self._deletions if thread.is_alive()]
        thread = threading.Thread(target=_delete, args=(folder,), name="deletion", daemon=True)
        self._deletions.append(thread)
        thread.start()

    def abandon(self) -> None:
        """Give up the save that is under way, without a word to other ranks."""
        self._pending = None
        self._last = None
        self._stager.kill()

    def close(self) -> None:
        """End the writer process and free host memory; a save that is under way is given up."""
        if self._pending is not None:
            self.abandon()
        self._stager.close()
        self._last = None


class _NoFolder(BoxWriter):
    """Takes part in planning alone."""

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Make no folder."""


def _delete(folder: Path) -> None:
    try:
        delete_folder(folder)
    except OSError as error:  # `recover` deletes the rest
        get_logger(__name__).warning("could not delete %s: %s", folder, error)


def _equal(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(
        tensor.dtype == other[name].dtype and torch.equal(tensor.cpu(), other[name])
        for name, tensor in one.items()
    )
