"""Two lanes for a backward and a forward that run side by side: a CUDA stream each, and process
groups each for the collectives inside layers.

The collectives of one group run in the order in which they were launched. Of a pair, the backward
is launched first: with one group, the forward's first exchange would wait for the backward's last.
So axes whose collectives are inside layers have a second group (`parallel/axes.py`), and which of
the two counts is said here.

On CUDA the current stream outside of the lanes stays the one that everything is ordered by. A lane
begins behind it (`fork`) and is waited for (`join`) before anything follows. Autograd runs a
backward on the stream of its forward, so a micro-batch stays in the lane in which it began.
Gradients are added to parameters on the outer stream (`hold_accumulators`): on a lane's, they would
chain both lanes to each other. On the CPU there are groups only, and pairs run one after the other.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

NUM_LANES = 2


class Lanes:
    """Which lane is launched into; one object for all of a rank."""

    def __init__(self, device: torch.device) -> None:
        self.number = 0
        """The lane whose groups are used now; 0 outside of lanes."""
        self.streams: tuple[Any, ...] = ()
        """On CUDA, the stream of each lane."""
        if device.type == "cuda":
            self.streams = tuple(torch.cuda.Stream(device) for _ in range(NUM_LANES))
            if hasattr(torch.autograd.graph, "set_warn_on_accumulate_grad_stream_mismatch"):
                # Not in every torch. That gradients cross from a lane to the outer stream is meant.
                torch.autograd.graph.set_warn_on_accumulate_grad_stream_mismatch(False)

    def __deepcopy__(self, memo: dict[int, Any]) -> Lanes:
        """Itself, as groups and streams."""
        return self

    def fork(self) -> None:
        """Let both lanes begin behind what the current stream has to do."""
        for stream in self.streams:
            stream.wait_stream(torch.cuda.current_stream())

    def join(self) -> None:
        """Let the current stream wait for both lanes."""
        for stream in self.streams:
            torch.cuda.current_stream().wait_stream(stream)

    @contextmanager
    def lane(self, number: int) -> Iterator[None]:
        """Launch into lane `number` inside."""
        before, self.number = self.number, number
        try:
            if self.streams:
                with torch.cuda.stream(self.streams[number]):
                    yield
            else:
                yield
        finally:
            self.number = before

    def use(self, tensors: Iterable[Tensor]) -> None:
        """Say that tensors made outside of the current lane are read in it: their memory may not
        be given away before.
        """
        for tensor in tensors if self.streams else ():
            tensor.record_stream(torch.cuda.current_stream())


def hold_accumulators(parameters: Iterable[Tensor]) -> list[Any]:
    """Autograd's nodes that add to the parameters' gradients, made now: they run on the stream that
    is current now, as long as the result is kept.
    """
    return [get_gradient_edge(parameter).node for parameter in parameters]
