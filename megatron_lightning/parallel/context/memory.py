"""Heads exchanged through the peers' memory (`parallel/peers/symmetric.py`), by the copy engines:
one tensor travels while the one before it is put in its place.

What arrives lies in memory that the swap after the next one overwrites. Queries, keys and values
are copied out of it, for they are kept for the backward pass; outputs and their gradients are read
where they arrived.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from megatron_lightning.parallel.peers.symmetric import SymmetricExchange


class Swap:
    """Part i of each of `tensors`, (ranks, ...) and contiguous, goes to rank i. All ranks make the
    same swaps in the same order, and end one before they begin the next.

    The first tensor and the others arrive one after the other. They lie in the exchange's room for
    what is gathered: the parts of all ranks of the first tensor, then those of the next.
    """

    def __init__(self, exchange: SymmetricExchange, tensors: Sequence[Tensor]) -> None:
        self._exchange = exchange
        self._tensors = list(tensors)
        self._rank, self._size = exchange.axis.rank, exchange.axis.size
        counts = [x[0].numel() for x in tensors]
        self._turn: Any = exchange.begin(1, sum(counts), tensors[0].dtype)
        self._starts = [self._size * sum(counts[:number]) for number in range(len(counts))]
        self._channels = [range(1), range(1, len(counts))] if len(counts) > 1 else [range(1)]
        """Numbers of the tensors whose arrival is told together."""
        torch.cuda.set_stream(exchange.stream)
        try:
            for channel, numbers in enumerate(self._channels):
                for step in range(1, self._size):
                    peer = (self._rank + step) % self._size
                    for number in numbers:
                        there = self._room(number, peer)[self._rank]
                        there.copy_(self._tensors[number][peer], non_blocking=True)
                    exchange.signal(peer, self._turn._channel + channel)
        finally:
            torch.cuda.set_stream(exchange.current)

    def take(self, into: Sequence[Tensor]) -> None:
        """Write the parts of all ranks to tensors of the same sizes."""
        for x, there in zip(self._tensors, into, strict=True):
            there[self._rank].copy_(x[self._rank])
        for channel, numbers in enumerate(self._channels):
            self._wait(channel)
            for number in numbers:
                came = self._room(number)
                for rank in range(self._size):
                    if rank != self._rank:
                        into[number][rank].copy_(came[rank])

    def only(self) -> Tensor:
        """The parts of all ranks of the only tensor, where they lie, until the swap after the
        next.
        """
        [x] = self._tensors
        came = self._room(0)
        came[self._rank].copy_(x[self._rank])
        self._wait(0)
        return came

    def each(self) -> Iterator[tuple[int, Tensor]]:
        """The same with its rank, one by one: the own part at once, the others as they are here."""
        [x] = self._tensors
        came = self._room(0)
        yield self._rank, x[self._rank]
        self._wait(0)
        for rank in range(self._size):
            if rank != self._rank:
                yield rank, came[rank]

    def end(self) -> None:
        """What was sent may be overwritten."""
        self._turn.end()

    def _wait(self, channel: int) -> None:
        exchange = self._exchange
        for step in range(1, self._size):
            source = (self._rank - step) % self._size
            exchange.handle.wait_signal(source, self._turn._channel + channel, exchange.timeout_ms)

    def _room(self, number: int, rank: int | None = None) -> Tensor:
        """A rank's memory, the own, for the parts of all ranks of a tensor."""
        x, owner = self._tensors[number], self._rank if rank is None else rank
        start = self._turn._gather_at + self._starts[number]
        return self._exchange.buffer(owner, start, tuple(x.shape), x.dtype)
