"""Records what a function does on a CUDA device as one graph, to be launched as a whole.

All graphs of a recorder share one memory pool: they must be replayed in the order in which they
were recorded, each set of a micro-batch's graphs by itself (torch's CUDA graph notes, "Sharing
memory across captures").
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

import torch

from megatron_lightning.precision.fp8 import device_problem

T = TypeVar("T")
Replay = Callable[[], None]


class Recorder(Protocol):
    """Makes graphs."""

    def begin(self) -> None:
        """Before the graphs of a kind of micro-batch are recorded."""
        ...

    def close(self) -> None:
        """Let go of all graphs, which are not replayed any more."""
        ...

    def record(
        self, function: Callable[[], T], generators: Sequence[torch.Generator]
    ) -> tuple[Replay, T]:
        """What replays `function` on the same memory, and its result, whose tensors hold nothing
        before the first replay. `generators`: what it draws from besides the default one.
        """
        ...


class CudaRecorder:
    """CUDA graphs on a stream and in a memory pool of their own. A graph goes with the last that
    replays it.
    """

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)
        self._pool = torch.cuda.graph_pool_handle()
        self._graphs: weakref.WeakSet[torch.cuda.CUDAGraph] = weakref.WeakSet()
        with torch.cuda.stream(self._stream):  # cuBLAS takes its workspace outside of the pool
            for dtype in (torch.float32, torch.bfloat16):
                square = torch.zeros(16, 16, device=device, dtype=dtype)
                torch.mm(square, square)
            if device_problem(device) is None:
                values, one = square.to(torch.float8_e4m3fn), torch.ones((), device=device)
                torch._scaled_mm(values, values.t(), one, one, out_dtype=square.dtype)
        torch.cuda.current_stream(device).wait_stream(self._stream)

    def close(self) -> None:
        """See `Recorder.close`. Whoever still refers to a graph doesn't keep it: NCCL ends no
        communicator that a graph uses.
        """
        for graph in self._graphs:
            graph.reset()
        self._graphs.clear()

    def begin(self) -> None:
        """See `Recorder.begin`. What micro-batches without graphs used is given back: graphs take
        as much from elsewhere, and an allocator gives nothing back while it records.
        """
        torch.cuda.empty_cache()

    def record(
        self, function: Callable[[], T], generators: Sequence[torch.Generator]
    ) -> tuple[Replay, T]:
        """See `Recorder.record`. Other threads may use the device meanwhile."""
        if not self._graphs:  # a pool ends with its graphs
            self._pool = torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        for generator in generators:
            graph.register_generator_state(generator)
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                result = function()
            except BaseException:
                _abandon(graph)
                raise
            graph.capture_end()
        # Beginning to record fills the generators' seeds and offsets on this stream, and a replay
        # does on its own: whichever came last would count.
        torch.cuda.current_stream().wait_stream(self._stream)
        self._graphs.add(graph)
        return graph.replay, result


def _abandon(graph: torch.cuda.CUDAGraph) -> None:
    try:
        graph.capture_end()
    except RuntimeError:  # the recording is invalid; its cause is being raised already
        return
