"""Copies of a rank's boxes in host memory, and their way to the writer process.

Copies from a GPU run on a stream of their own, beside the next step. Tensors that only the
optimizer changes (`steady`) may still be on their way when training goes on; the device waits for
them just before the update.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.checkpoint.planner import SavePlan

from megatron_lightning.checkpoint.background import WriteJob, WriterProcess
from megatron_lightning.checkpoint.buffers import HostBuffers
from megatron_lightning.checkpoint.device_copies import DeviceCopies
from megatron_lightning.checkpoint.errors import CheckpointError
from megatron_lightning.checkpoint.planner import BoxSavePlanner


@dataclass(kw_only=True)
class Staged:
    """One rank's boxes on their way."""

    job: WriteJob
    copies: DeviceCopies | None = None
    sources: Sequence[tuple[str, Tensor, int]] = ()
    """Name, memory and version of what is still being copied."""

    def before_update(self) -> None:
        """Let the device wait for the copies, and note what was changed under them."""
        if self.copies is None:
            return
        self.copies.hold(torch.cuda.current_stream())
        changed = [name for name, view, version in self.sources if _version(view) != version]
        if changed:
            self.job.fail(
                CheckpointError(
                    f"{changed[0]} was changed while it was copied, by something else than the"
                    f" optimizer; set CheckpointConfig(overlap_copies=False)"
                )
            )
        self.copies, self.sources = None, ()


@dataclass(frozen=True, slots=True)
class _Placed:
    """Where the boxes of a plan lie in host memory, the same for every save of that plan."""

    plan: SavePlan
    boxes: list[tuple[int, int]]
    """Position and length in bytes."""
    targets: list[Tensor]

    @classmethod
    def of(
        cls, plan: SavePlan, views: Sequence[tuple[str, Tensor]], buffers: HostBuffers
    ) -> _Placed:
        lengths = [_num_bytes(view) for _, view in views]
        places = buffers.place(lengths)
        targets = [buffers.view(p, v) for p, (_, v) in zip(places, views, strict=True)]
        return cls(plan, list(zip(places, lengths, strict=True)), targets)


class Stager:
    """This rank's host memory and writer process, made when they are first needed. Takes part in no
    collective.
    """

    def __init__(self, device: torch.device | None, *, pin_memory: bool) -> None:
        self._device = device if device is not None and device.type == "cuda" else None
        self._pin_memory = pin_memory
        self._buffers: HostBuffers | None = None
        self._process: WriterProcess | None = None
        self._placed: _Placed | None = None
        self._stream: torch.cuda.Stream | None = None
        self._copies: DeviceCopies | None = None
        self._preparing: threading.Thread | None = None

    def prepare(self, views: Sequence[Tensor]) -> None:
        """Allocate host memory for tensors like these, while training goes on."""
        buffers, _ = self._open()
        lengths = [_num_bytes(view) for view in views]

        def allocate() -> None:
            with contextlib.suppress(RuntimeError):  # said when it is needed
                buffers.place(lengths)

        self._preparing = threading.Thread(target=allocate, name="host memory", daemon=True)
        self._preparing.start()

    def stage(
        self,
        plan: SavePlan,
        planner: BoxSavePlanner,
        folder: Path,
        steady: Callable[[str], bool],
        began: float,
    ) -> Staged:
        """Start to copy and write this rank's boxes into the staging `folder`. An error is that of
        the job.
        """
        try:
            views = [(item.index.fqn, planner.resolve_data(item)) for item in plan.items]
            buffers, process = self._open()
            process.start()
            if self._placed is None or self._placed.plan is not plan:
                self._placed = _Placed.of(plan, views, buffers)
            targets = self._placed.targets
            copies, sources = self._copy(views, targets, steady)
            job = WriteJob(
                process,
                folder / plan.storage_data if views else None,
                self._placed.boxes,
                copy=copies.run if copies is not None else lambda: None,
                began=began,
            )
        except Exception as error:  # whatever it is: all ranks hear of it when they poll
            self._placed = None
            job, copies, sources = WriteJob.failed_before(error), None, []
        job.start()
        return Staged(job=job, copies=copies, sources=sources)

    def _open(self) -> tuple[HostBuffers, WriterProcess]:
        self._join()
        if self._buffers is None or self._process is None:
            self._buffers = HostBuffers(self._device if self._pin_memory else None)
            self._process = WriterProcess(self._buffers.descriptor)
        return self._buffers, self._process

    def _copy(
        self,
        views: Sequence[tuple[str, Tensor]],
        targets: Sequence[Tensor],
        steady: Callable[[str], bool],
    ) -> tuple[DeviceCopies | None, list[tuple[str, Tensor, int]]]:
        """Copy what training may change, and return the other copies with what they read."""
        if self._device is None:
            for (_, view), target in zip(views, targets, strict=True):
                target.copy_(view)
            return None, []
        current = torch.cuda.current_stream(self._device)
        if self._stream is None:
            self._stream = torch.cuda.Stream(self._device)
        self._stream.wait_stream(current)
        later = []
        with torch.cuda.stream(self._stream):
            for (name, view), target in zip(views, targets, strict=True):
                if view.is_cuda and steady(name):
                    later.append((name, view, target))
                else:
                    target.copy_(view, non_blocking=True)
            current.wait_event(self._stream.record_event())
        self._copies = DeviceCopies(self._stream, [(target, view) for _, view, target in later])
        return self._copies, [(name, view, _version(view)) for name, view, _ in later]

    def _join(self) -> None:
        if self._preparing is not None:
            self._preparing.join()
            self._preparing = None

    def kill(self) -> None:
        """End the writer process at once; another is started when it is needed."""
        if self._process is not None:
            self._process.close(kill=True)

    def close(self) -> None:
        """End the writer process and free host memory."""
        self._join()
        if self._process is not None:
            self._process.close()
            self._process = None
        if self._copies is not None and not self._copies.give_up():
            return  # copies hang with a run that failed; this memory goes with the process
        self._placed = None
        if self._buffers is not None:
            self._buffers.close()
            self._buffers = None


def _num_bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _version(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version
