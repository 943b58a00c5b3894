"""The order in which gradient buckets are summed over replicas: strictly one on all ranks, as
collectives must be.

A bucket that is ready waits for those before it, and a parameter that gets no gradient merely holds
them back until the end of the window. What is in a bucket, and what its sums mean, is not known
here.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Any

import torch

from megatron_lightning.parallel.flat import Bucket, Slot


class ReductionQueue:
    """One rank's buckets, in the order in which they were added, for one window at a time.

    With `overlap` they are reduced while a backward pass still runs, on CUDA (`on_gpu`) with the
    second of two sums on a stream of its own; else all at the end. `streams`: CUDA streams beside
    the current one on which backward passes may add gradients.
    """

    def __init__(self, *, overlap: bool, on_gpu: bool, streams: Sequence[Any] = ()) -> None:
        self.overlap = overlap
        self._side_stream = torch.cuda.Stream() if on_gpu else None
        self._streams = (torch.cuda.current_stream(), *streams) if streams else ()
        self._buckets: list[Bucket] = []
        self.num_launched = 0
        """Buckets whose reduction has begun in this window."""

    @property
    def buckets(self) -> tuple[Bucket, ...]:
        """The buckets, in order."""
        return tuple(self._buckets)

    def extend(self, buckets: Iterable[Bucket]) -> None:
        """Put buckets behind those that are there."""
        for bucket in buckets:
            bucket.side_stream = self._side_stream
            self._buckets.append(bucket)

    def clear(self) -> None:
        """Forget all buckets."""
        self._buckets = []
        self.num_launched = 0

    def reset(self) -> None:
        """Begin a window: nothing is reduced."""
        assert not any(bucket.work for bucket in self._buckets), (
            "reset during a reduction: finish() comes first"
        )
        for bucket in self._buckets:
            bucket.armed = bucket.launched = False
        self.num_launched = 0

    def arm(self, chunk: int, names: Collection[str] | None) -> None:
        """Say that the next backward pass of `chunk` is its last one: buckets start when filled.
        `names`: see `GradientBuckets.arm`.
        """
        for bucket in self._buckets if self.overlap else ():
            if bucket.chunk == chunk:
                bucket.armed = True
                bucket.pending = {
                    slot.name for slot in bucket.slots if names is None or slot.name in names
                }
        self._launch_ready()

    def arrived(self, slot: Slot) -> None:
        """Say that this pass' gradient of the slot is in its view."""
        if slot.bucket.armed:
            slot.bucket.pending.discard(slot.name)
            self._launch_ready()

    def launch_rest(self) -> None:
        """Start all that the last backward pass of a window didn't fill here."""
        for bucket in self._buckets[self.num_launched :]:
            self._launch(bucket)

    def join_streams(self) -> None:
        """Let the current stream wait for all on which gradients may have been added."""
        for stream in self._streams:
            torch.cuda.current_stream().wait_stream(stream)

    def wait(self) -> None:
        """Wait for all sums over replicas."""
        for bucket in self._buckets if self._side_stream is None else ():
            bucket.launch_replicas()
        for bucket in self._buckets:
            bucket.wait()

    def _launch_ready(self) -> None:
        while self.num_launched < len(self._buckets):
            bucket = self._buckets[self.num_launched]
            if not bucket.armed or bucket.pending:
                return
            self._launch(bucket)

    def _launch(self, bucket: Bucket) -> None:
        self.num_launched += 1
        self.join_streams()
        bucket.launch()
