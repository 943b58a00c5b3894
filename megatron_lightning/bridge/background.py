"""An export beside training: values are copied to host memory, and a thread writes from there."""

from __future__ import annotations

import threading
from collections.abc import Mapping

import torch
from torch import Tensor

from megatron_lightning.bridge.verify import verify_tensors
from megatron_lightning.bridge.writing import Export, Held, Shares
from megatron_lightning.checkpoint import Box
from megatron_lightning.checkpoint.buffers import HostBuffers
from megatron_lightning.checkpoint.ranks import RankGroup


class HostCopy:
    """Copies of this rank's share (see `writing.Held`), in memory that is kept for the next one."""

    def __init__(self, device: torch.device) -> None:
        self._device = device if device.type == "cuda" else None
        self._buffers: HostBuffers | None = None
        self._copies: dict[str, list[tuple[Box, Tensor]]] = {}

    @torch.no_grad()
    def take(self, held: Held, export: Export) -> None:
        """Copy what this rank writes, in the dtypes of the files, and wait for it."""
        if self._buffers is None:
            self._buffers = HostBuffers(self._device)
        boxes = [(name, box) for name, share in export.mine.items() for box in share]
        dtypes = {name: export.dtype_of(name) for name in export.mine}
        places = self._buffers.place([box.numel * dtypes[n].itemsize for n, box in boxes])
        self._copies.clear()
        for (name, box), place in zip(boxes, places, strict=True):
            like = torch.empty(box.sizes, dtype=dtypes[name], device="meta")
            target = self._buffers.view(place, like)
            target.copy_(held.values(name, box).to(dtypes[name]), non_blocking=True)
            self._copies.setdefault(name, []).append((box, target))
        if self._device is not None:
            torch.cuda.current_stream(self._device).synchronize()

    def close(self) -> None:
        """Give the memory back."""
        self._copies.clear()
        if self._buffers is not None:
            self._buffers.close()
            self._buffers = None

    def dtypes(self) -> Mapping[str, torch.dtype]:
        """See `Held`."""
        return {name: copies[0][1].dtype for name, copies in self._copies.items()}

    def share(self, ranks: RankGroup) -> Shares:
        """See `Held`."""
        return {name: [box for box, _ in copies] for name, copies in self._copies.items()}

    def values(self, name: str, box: Box) -> Tensor:
        """See `Held`; also of a part of a box."""
        for held, copy in self._copies[name]:
            if held.intersect(box) == box:
                return copy[box.shift(held.offsets, sign=-1).slices()]
        raise KeyError(f"{name} at {box} was not copied")


class ExportThread(threading.Thread):
    """Writes this rank's share, and reads it back if asked to."""

    def __init__(self, export: Export, held: Held, *, verify: bool) -> None:
        super().__init__(name="export", daemon=True)
        self._export, self._held, self._verify = export, held, verify
        self._error: BaseException | None = None

    def run(self) -> None:
        """Write."""
        try:
            self._export.write(self._held)
            if self._verify:
                verify_tensors(self._export, self._held)
        except BaseException as error:  # noqa: BLE001 - raised by `result`
            self._error = error

    @property
    def failed(self) -> bool:
        """Whether `result` is known to raise."""
        return self._error is not None

    def result(self) -> None:
        """Wait for the end; raises what went wrong."""
        self.join()
        if self._error is not None:
            raise self._error
