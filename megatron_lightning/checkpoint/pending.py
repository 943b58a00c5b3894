"""A background save between its copies in host memory and its commit.

While the ranks' processes write, other saves of the same tensors may join it, under names of their
own; the commit puts all of them in place.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.checkpoint.storage import WriteResult

from megatron_lightning.checkpoint.boxes import Box
from megatron_lightning.checkpoint.index import StoredBox
from megatron_lightning.checkpoint.save_times import SaveTimes
from megatron_lightning.checkpoint.saving import Objects, RankResult, commit, commit_linked
from megatron_lightning.checkpoint.staging import Staged
from megatron_lightning.checkpoint.storage import BoxWriter, WrittenFile

Answer = tuple[RankResult, tuple[float, float, float]]
"""What a rank wrote; its stall, staging and write time in seconds."""


@dataclass(kw_only=True)
class PendingSave:
    """This rank's side of a save that is not committed yet."""

    path: Path
    writer: BoxWriter
    plan: SavePlan
    table: Metadata
    objects: Objects | None
    """On the first rank."""
    staged: Staged
    stall_seconds: float = 0.0
    linked: list[tuple[Path, Path, Objects | None]] = field(default_factory=list)
    """Path, staging folder and objects of saves of the same tensors."""
    afterwards: list[Callable[[], None]] = field(default_factory=list)
    """What waits for the commit."""

    @property
    def paths(self) -> list[Path]:
        """Where it and those that joined it will be."""
        return [self.path, *(path for path, _, _ in self.linked)]

    @property
    def folders(self) -> list[Path]:
        """Where they are until then."""
        return [self.writer.folder, *(staging for _, staging, _ in self.linked)]

    def answer(self) -> Answer:
        """Wait for this rank's process."""
        job = self.staged.job
        answer = job.result()
        if answer is None:
            return ([], None), (self.stall_seconds, job.staging_seconds, 0.0)
        file = self.plan.storage_data
        results = []
        for item, (start, length, crc32) in zip(self.plan.items, answer["boxes"], strict=True):
            assert item.tensor_data is not None
            chunk = item.tensor_data.chunk
            box = Box(tuple(chunk.offsets), tuple(chunk.sizes))
            stored = StoredBox(box, file, start, length, crc32)
            results.append(WriteResult(item.index, length, stored))
        written = WrittenFile(file, answer["size"], answer["crc32"])
        return (results, written), (self.stall_seconds, job.staging_seconds, answer["seconds"])

    def commit(self, answers: Sequence[Answer], delete: Callable[[Path], None]) -> int:
        """On the first rank: put all in place; the mark of the checkpoint. `delete` gets what they
        replace.
        """
        assert self.objects is not None
        written = [result for result, _ in answers]
        created = commit(self.path, self.writer, self.table, written, self.objects, delete)
        for path, staging, objects in self.linked:
            assert objects is not None
            commit_linked(path, staging, self.path, objects, created=created, delete=delete)
        return created

    def times(self, answers: Sequence[Answer], commit_seconds: float) -> SaveTimes:
        """What it cost the ranks, each time that of the slowest."""
        each = zip(*(times for _, times in answers), strict=True)
        stall, staging, write = (max(values) for values in each)
        return SaveTimes(
            path=str(self.path),
            num_bytes=sum(file.size for (_, file), _ in answers if file is not None),
            stall_seconds=stall + commit_seconds,
            staging_seconds=staging,
            write_seconds=write,
        )
