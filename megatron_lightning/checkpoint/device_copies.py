"""Copies from a GPU to pinned host memory, beside training.

They go in pieces, with two under way at a time: a GPU's engine for copies to the host serves them
in order, so that a small copy of the training step (the number of tokens, a logged loss) would
otherwise wait for a whole checkpoint.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from megatron_lightning.checkpoint.errors import CheckpointError

PIECE_BYTES = 2**25
"""Half a millisecond at the speed of PCIe 5: long against the start of a copy, short against a
step."""
_UNDER_WAY = 2


class DeviceCopies:
    """Copies of some tensors on a stream; `run` makes them and belongs into a thread of its own.

    `pairs` are targets in host memory and sources of equal shapes; sources must not change before
    the stream that changes them has been held by `hold`.
    """

    def __init__(self, stream: torch.cuda.Stream, pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
        self._stream, self._pairs = stream, pairs
        self._last = torch.cuda.Event(blocking=True)  # the thread that waits leaves the core free
        self._last.record(stream)
        self._all_begun, self._ended = threading.Event(), threading.Event()
        self._given_up = False

    def run(self) -> None:
        """Copy everything; returns when it is there. CheckpointError when given up before."""
        try:
            self._copy()
            self._all_begun.set()
            self._last.synchronize()
        finally:
            self._all_begun.set()
            self._ended.set()

    def _copy(self) -> None:
        events: deque[torch.cuda.Event] = deque()
        with torch.cuda.stream(self._stream):
            for target, source in pieces(self._pairs):
                if self._given_up:
                    raise CheckpointError("the save was given up while it was copied")
                target.copy_(source, non_blocking=True)
                self._last = torch.cuda.Event(blocking=True)
                self._last.record(self._stream)
                events.append(self._last)
                if len(events) > _UNDER_WAY:
                    events.popleft().synchronize()

    def hold(self, stream: torch.cuda.Stream) -> None:
        """Let what comes on `stream` wait for the copies, the host for their beginning."""
        self._all_begun.wait()
        stream.wait_event(self._last)

    def give_up(self, seconds: float = 5.0) -> bool:
        """Begin no further copy; whether nothing of them uses the host memory any more, which may
        not be when the device hangs.
        """
        self._given_up = True
        return self._ended.wait(seconds)


def pieces(
    pairs: Sequence[tuple[Tensor, Tensor]], piece_bytes: int = PIECE_BYTES
) -> Iterator[tuple[Tensor, Tensor]]:
    """Parts of each pair of equal shapes, flattened, of at most `piece_bytes` bytes; a tensor with
    gaps in memory stays whole.
    """
    for target, source in pairs:
        if target.is_contiguous() and source.is_contiguous():
            length = max(1, piece_bytes // source.element_size())
            yield from zip(
                target.view(-1).split(length), source.view(-1).split(length), strict=True
            )
        else:
            yield target, source
