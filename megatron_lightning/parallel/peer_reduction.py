"""Reduce-scatter of gradient buckets through the peers' memory (`parallel/symmetric.py`).

Each rank has its copy engines write every other rank's part of a full bucket to that rank, which
adds what came to its own part. NCCL's kernels would hold multiprocessors all the while, also while
they wait for a rank that is late, and products beside them take longer for it; here only the short
sum does. Sums are made in one order, so that a run repeats bit by bit.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megatron_lightning.parallel.exchange import Exchange
from megatron_lightning.parallel.mesh import MeshAxis
from megatron_lightning.parallel.overlap_choice import _agree, _try, _why_not
from megatron_lightning.parallel.overlap_operations import exchanges
from megatron_lightning.utils.env import provide
from megatron_lightning.utils.logging import warn_once


class PeerReduction:
    """Reductions over the axis of one exchange, one after the other in the same order on all ranks.

    They run on a stream of their own, behind all that the current one has been given.
    """

    def __init__(self, exchange: Exchange) -> None:
        self._exchange = exchange
        self._stream = torch.cuda.Stream(priority=-1)

    def reserve(self, elements: int, dtype: torch.dtype) -> None:
        """Make room for parts of this size; all ranks of the axis together."""
        self._exchange.begin(1, elements, dtype).end()

    def begin(self, data: Tensor, own: Tensor) -> Reduced:
        """Start to sum `data` (elements,) over the ranks. `own`: the part of it that this rank is
        to hold the sum of; other parts keep what they hold, and must until it is waited for.
        """
        axis = self._exchange.axis
        parts = data.view(axis.size, 1, own.numel())
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            turn = self._exchange.begin(1, own.numel(), own.dtype)
            for step in range(1, axis.size):
                turn.send(step, parts[(axis.rank + step) % axis.size])
            turn.add_to(own.view(1, -1))
            turn.end()
            done = torch.cuda.Event()
            done.record()
        return Reduced(done)


class Reduced:
    """A reduction under way."""

    def __init__(self, done: Any) -> None:
        self._done = done

    def wait(self) -> None:
        """Let the current stream wait for it."""
        torch.cuda.current_stream().wait_event(self._done)


def peer_reduction(
    axis: MeshAxis, device: torch.device, timeout_seconds: float
) -> PeerReduction | None:
    """Reductions through the memory of the ranks of `axis`, which is tried once, or None on all of
    them. They all must call it.
    """
    if axis.size == 1 or device.type != "cuda":
        return None
    name = f"{axis.name} {axis.group.group_name} memory"
    exchange: Any = exchanges.get(name)
    if exchange is not None and exchange.axis.group is axis.group:  # of buckets made before
        return PeerReduction(exchange)
    exchange, reasons = None, _agree(axis, _why_not(axis, device))
    if not reasons:
        provide(override=False, TORCH_SYMM_MEM_DISABLE_MULTICAST="1")  # it is not used
        exchange, reason = _try(axis, device, timeout_seconds)
        reasons = _agree(axis, reason)
    if reasons:
        warn_once(
            "data_parallel.peer_memory: the GPUs can't write to each other's memory"
            f" ({reasons[0]}), so gradients are reduced by collectives"
        )
        return None
    exchanges[name] = exchange
    return PeerReduction(exchange)
