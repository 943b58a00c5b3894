"""Parts of a sequence on their way among the ranks of one axis, while the present stream computes.

A `Turn` is what one operation moves: the parts that all ranks need (`gather`, an all-gather taken
apart) and the partial sums that each rank owes each other (`send`, a reduce-scatter taken apart).
At step k a rank sends to the k-th rank behind it and hears from the k-th before it, so every rank
sends and receives all the time. This file moves by point-to-point messages, on any backend;
`parallel/peers/symmetric.py` writes to the peers' memory.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_lightning.parallel.axes import MeshAxis

SETS = 2
"""Of shared buffers, which turns use by turns."""
_ABANDON_SECONDS = 10.0


def shared_parts(ranks: int, *, sums: bool) -> int:
    """Parts that a set has room for: those of all ranks, and with `sums` the partial sums of the
    others.
    """
    return 2 * ranks - 1 if sums else ranks


def shared_bytes(ranks: int, part_bytes: int, *, sums: bool) -> int:
    """Memory that each rank shares with the others for parts of this size."""
    return SETS * shared_parts(ranks, sums=sums) * part_bytes


class Turn(Protocol):
    """What one operation moves. All ranks of the axis make the same calls in the same order."""

    def gather(self, part: Tensor, *, joins: bool = False) -> None:
        """Start to give the own part, contiguous, to all others. At most once. `joins`: for `whole`
        too. A part may have another shape and dtype than the turn, of no more bytes.
        """
        ...

    def part(self, step: int) -> Tensor:
        """The part of the `step`-th rank before this one, as soon as it is here; 0: the own."""
        ...

    def whole(self) -> Tensor:
        """All parts, joined along dim 0 in the axis' order. It is gone when the turn ends."""
        ...

    def send(self, step: int, partial: Tensor) -> None:
        """Start to give a partial sum, contiguous, to the `step`-th rank behind this one."""
        ...

    def add_to(self, own: Tensor) -> Tensor:
        """Add what the others sent to `own`, in place, and return it."""
        ...

    def end(self) -> None:
        """Nothing that came is read any more, and nothing that went may be missing."""
        ...


class Exchange(Protocol):
    """The moves of one axis."""

    axis: MeshAxis
    kind: str
    """By what is moved: "memory" or "messages"."""

    def begin(self, rows: int, columns: int, dtype: torch.dtype) -> Turn:
        """A turn whose parts and partial sums are matrices of this size. Turns follow each other:
        end one before the next.
        """
        ...


class HoldsMemory(Protocol):
    """An exchange that holds memory between turns which torch's allocator doesn't count."""

    @property
    def held_bytes(self) -> int:
        """How much."""
        ...

    def release(self) -> None:
        """Give it back; each rank for itself, when nothing is under way any more."""
        ...

    def give_signals(self) -> None:
        """Give the signals of all peers, of which one is gone or is not told, to what this device
        runs.
        """
        ...

    def is_idle(self) -> bool:
        """Whether the device has nothing left to do of what may wait for a signal."""
        ...


holding: weakref.WeakSet[HoldsMemory] = weakref.WeakSet()
"""All that are in use; each puts itself here."""


def held_bytes() -> int:
    """What all exchanges of this process hold outside of torch's allocator."""
    return sum(exchange.held_bytes for exchange in holding)


def release_exchanges() -> None:
    """Give back what exchanges hold."""
    for exchange in list(holding):
        exchange.release()


def abandon_exchanges(is_over: Callable[[], bool] = lambda: True) -> None:
    """Wait for no peer any more in any exchange, so that this process can end alone. It ends when
    nothing waits and `is_over` says so, or some seconds after that.

    Several exchanges may wait on one stream, in any order, so each gets its signals round by round.
    """
    waiting, until = list(holding), float("inf")
    while time.monotonic() < until:
        if is_over():
            until = min(until, time.monotonic() + _ABANDON_SECONDS)
            if all(exchange.is_idle() for exchange in waiting):
                return
        for exchange in waiting:
            exchange.give_signals()
        time.sleep(0.001)


class MessageExchange:
    """Moves by point-to-point messages of the axis' group."""

    kind = "messages"

    def __init__(self, axis: MeshAxis) -> None:
        self.axis = axis

    def begin(self, rows: int, columns: int, dtype: torch.dtype) -> Turn:
        """See `Exchange`."""
        return _MessageTurn(self.axis)


class _MessageTurn:
    def __init__(self, axis: MeshAxis) -> None:
        self._axis = axis
        self._joined: Tensor | None = None
        self._own: Tensor | None = None
        self._arrive: dict[int, Callable[[], Tensor]] = {}
        self._sums: list[Callable[[], Tensor]] = []

    def gather(self, part: Tensor, *, joins: bool = False) -> None:
        size = self._axis.size
        self._own = part
        self._joined = part.new_empty(size, *part.shape)
        for step in range(1, size):
            into = self._joined[(self._axis.rank - step) % size]
            self._arrive[step] = _swap(part, into, step, self._axis)

    def part(self, step: int) -> Tensor:
        assert self._own is not None
        return self._arrive[step]() if step else self._own

    def whole(self) -> Tensor:
        assert self._joined is not None
        assert self._own is not None
        self._joined[self._axis.rank].copy_(self._own)
        for step in range(1, self._axis.size):
            self.part(step)
        return self._joined.flatten(0, 1)

    def send(self, step: int, partial: Tensor) -> None:
        self._sums.append(_swap(partial, torch.empty_like(partial), step, self._axis))

    def add_to(self, own: Tensor) -> Tensor:
        for arrive in self._sums:
            own.add_(arrive())
        return own

    def end(self) -> None:
        for arrive in (*self._arrive.values(), *self._sums):
            arrive()


def _swap(x: Tensor, into: Tensor, step: int, axis: MeshAxis) -> Callable[[], Tensor]:
    """Start to send to the `step`-th rank behind and receive from the `step`-th before."""
    operations = [
        dist.P2POp(dist.isend, x, group=axis.group, group_peer=(axis.rank + step) % axis.size),
        dist.P2POp(dist.irecv, into, group=axis.group, group_peer=(axis.rank - step) % axis.size),
    ]
    works: list[Any] = list(dist.batch_isend_irecv(operations))
    kept = [x]  # its memory must not be used again before it has been sent

    def finish() -> Tensor:
        while works:
            works.pop().wait()
        kept.clear()
        return into

    return finish
