"""Parts moved by writing to the memory of the peers (torch's symmetric memory, NVLink).

The copies run on a stream of their own, by the copy engines: unlike NCCL's kernels they take no
multiprocessor from the products that run meanwhile. A signal follows each copy, and the receiver's
stream waits for it. Nothing says that memory may be written again: turns use two sets of buffers by
turns, and whoever has heard from all peers in one turn knows that they are done with the turn
before it. Multicast is not used.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed._symmetric_memory import _SymmetricMemory

from megatron_lightning.parallel.axes import MeshAxis
from megatron_lightning.parallel.peers.exchange import (
    SETS,
    Turn,
    holding,
    shared_bytes,
    shared_parts,
)

_CHANNELS = 2
"""Of a set: what is gathered, and partial sums."""
_ALIGNMENT = 512
_KEPT_BUFFERS = 256


class SymmetricExchange:
    """Moves through memory that all ranks of the axis have mapped: GPUs of one host."""

    kind = "memory"

    def __init__(
        self,
        axis: MeshAxis,
        device: torch.device,
        *,
        timeout_seconds: float = 600.0,
        writes: bool = False,
        sums: bool = True,
    ) -> None:
        self.axis = axis
        self.device = device
        self.stream = torch.cuda.Stream(device, priority=-1)
        self.writes = writes
        """Whether signals are sent by the stream itself, which needs no room beside a product;
        False: by a small kernel, as whole training steps have been run."""
        self.sums = sums
        """Whether there is room for partial sums too; False: for what is gathered alone."""
        self.timeout_ms = round(1000 * timeout_seconds)
        """A signal that takes longer ends the process."""
        self.handle: Any = None
        self.part_bytes = 0
        """Largest part that there is room for."""
        self._memory: Tensor | None = None
        self._buffers: dict[Any, Tensor] = {}
        self._pads: dict[int, Tensor] = {}
        self._turns = 0
        self._signals: Any = None
        """A stream that waits for nothing, once it is needed."""
        self.current = torch.cuda.current_stream(device)
        """The stream of the present or last turn."""
        # Events may be recorded anew: whoever waits for one means what was recorded last.
        self._ready, self.joined, self.sent = (torch.cuda.Event() for _ in range(3))
        holding.add(self)

    def begin(self, rows: int, columns: int, dtype: torch.dtype) -> Turn:
        """See `Exchange`. More room is made where it is needed, which all ranks do together."""
        needed = rows * columns * dtype.itemsize
        if needed > self.part_bytes:
            self._allocate(needed)
        self._turns += 1
        current = torch.cuda.current_stream()
        if current != self.current:  # turns follow each other, also from stream to stream
            current.wait_stream(self.current)
            self.current = current
        self.follow()
        return _SymmetricTurn(self, self._turns % SETS, (rows, columns), dtype)

    def follow(self) -> None:
        """What is moved from now on comes after all that the current stream has been given."""
        self._ready.record(self.current)
        self.stream.wait_event(self._ready)

    def try_out(self) -> None:
        """Move a few numbers; RuntimeError where they don't arrive."""
        x = torch.full((256, 1), float(self.axis.rank), device=self.device)
        turn = self.begin(x.shape[0], x.shape[1], x.dtype)
        turn.gather(x, joins=True)
        found = turn.whole().view(self.axis.size, -1)[:, 0].tolist()
        turn.end()
        if found != list(range(self.axis.size)):
            raise RuntimeError(f"{found} arrived in place of the ranks' numbers")

    @property
    def held_bytes(self) -> int:
        """The buffers, which are outside of torch's allocator."""
        return 0 if self._memory is None else self._memory.numel()

    def release(self) -> None:
        """Give the memory back, once everything has been moved; the next turn makes it anew."""
        if self._memory is not None:
            torch.cuda.synchronize(self.device)
        self._buffers.clear()
        self._pads.clear()
        self.handle = self._memory = None
        self.part_bytes = 0

    def give_signals(self) -> None:
        """Give those that kernels on this device may wait for, from peers that give none."""
        if self.handle is None:
            return
        numbers, own = self.axis.size * SETS * _CHANNELS, self.axis.rank
        pads = [
            self.handle.get_signal_pad(rank, (numbers,), torch.uint32)
            for rank in range(self.axis.size)
        ]
        self._signals = self._signals or torch.cuda.Stream(self.device)
        with torch.cuda.stream(self._signals):
            for number in range(numbers):
                _SymmetricMemory.stream_write_value32(pads[own], number, 1)
            for channel in range(SETS * _CHANNELS):  # signals of ours that nobody takes
                for peer in set(range(self.axis.size)) - {own}:
                    offset = channel * self.axis.size + own
                    _SymmetricMemory.stream_write_value32(pads[peer], offset, 0)

    def is_idle(self) -> bool:
        """Whether the streams of the turns have done all."""
        return self.handle is None or (self.current.query() and self.stream.query())

    def _allocate(self, needed: int) -> None:
        self.release()
        self.part_bytes = -(-needed // _ALIGNMENT) * _ALIGNMENT
        size = shared_bytes(self.axis.size, self.part_bytes, sums=self.sums)
        # Not from a pool, where the beginning of the memory would have to be looked for.
        self._memory = _SymmetricMemory.empty_strided_p2p((size,), (1,), torch.uint8, self.device)
        self.handle = _SymmetricMemory.rendezvous(self._memory, self.axis.group.group_name)

    def buffer(self, rank: int, offset: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """A rank's memory from element `offset` on."""
        key = rank, offset, shape, dtype
        if key not in self._buffers:
            if len(self._buffers) >= _KEPT_BUFFERS:  # lengths that change with each batch
                self._buffers.clear()
            with torch.inference_mode(False):  # kept, and training writes to it too
                made = self.handle.get_buffer(rank, shape, dtype, storage_offset=offset)
            self._buffers[key] = made
        return self._buffers[key]

    def signal(self, peer: int, channel: int) -> None:
        """On the current stream: tell `peer` that all before this is done."""
        if not self.writes:
            self.handle.put_signal(peer, channel, self.timeout_ms)
            return
        offset = channel * self.axis.size + self.axis.rank  # where `wait_signal` looks
        if peer not in self._pads:
            numbers = self.axis.size * SETS * _CHANNELS
            self._pads[peer] = self.handle.get_signal_pad(peer, (numbers,), torch.uint32)
        _SymmetricMemory.stream_write_value32(self._pads[peer], offset, 1)


class _SymmetricTurn:
    def __init__(
        self,
        exchange: SymmetricExchange,
        number: int,
        shape: tuple[int, int],
        dtype: torch.dtype,
    ) -> None:
        self._exchange = exchange
        self._rank, self._size = exchange.axis.rank, exchange.axis.size
        self._shape, self._dtype = shape, dtype
        self._gathered = shape, dtype
        """Of the parts that are gathered."""
        room = exchange.part_bytes // dtype.itemsize
        self._gather_at = number * shared_parts(self._size, sums=exchange.sums) * room
        self._sums_at = self._gather_at + self._size * room
        self._room = room
        self._channel = number * _CHANNELS
        self._own: Tensor | None = None
        self._waits: list[tuple[int, int]] = []
        """(rank, channel) of the signals that are still to be waited for."""
        self._sums: list[int] = []
        self._kept: list[Tensor] = []
        """What is being sent; its memory must not be used again before."""

    def _part_of(self, rank: int, source: int) -> Tensor:
        (rows, columns), dtype = self._gathered
        offset = self._first_gathered() + source * rows * columns
        return self._exchange.buffer(rank, offset, (rows, columns), dtype)

    def _first_gathered(self) -> int:
        """Where what is gathered begins, in elements of its dtype."""
        return self._gather_at * self._dtype.itemsize // self._gathered[1].itemsize

    def _sum_of(self, rank: int, step: int) -> Tensor:
        offset = self._sums_at + (step - 1) * self._room
        return self._exchange.buffer(rank, offset, self._shape, self._dtype)

    def _wait(self, source: int, channel: int) -> None:
        if (source, channel) in self._waits:
            self._waits.remove((source, channel))
            exchange = self._exchange
            exchange.handle.wait_signal(source, channel, exchange.timeout_ms)

    def gather(self, part: Tensor, *, joins: bool = False) -> None:
        exchange, rank, size = self._exchange, self._rank, self._size
        assert part.numel() * part.element_size() <= exchange.part_bytes
        self._gathered = (part.shape[0], part.shape[1]), part.dtype
        self._own = part
        self._kept.append(part)
        torch.cuda.set_stream(exchange.stream)
        try:
            for step in range(1, size):
                peer = (rank + step) % size
                self._part_of(peer, rank).copy_(part, non_blocking=True)
                exchange.signal(peer, self._channel)
                self._waits.append(((rank - step) % size, self._channel))
            if joins:
                self._part_of(rank, rank).copy_(part, non_blocking=True)
                exchange.joined.record(exchange.stream)
        finally:
            torch.cuda.set_stream(exchange.current)

    def part(self, step: int) -> Tensor:
        if step == 0:
            assert self._own is not None
            return self._own
        source = (self._rank - step) % self._size
        self._wait(source, self._channel)
        return self._part_of(self._rank, source)

    def whole(self) -> Tensor:
        exchange = self._exchange
        exchange.current.wait_event(exchange.joined)
        for step in range(1, self._size):
            self._wait((self._rank - step) % self._size, self._channel)
        (rows, columns), dtype = self._gathered
        shape = (self._size * rows, columns)
        return exchange.buffer(self._rank, self._first_gathered(), shape, dtype)

    def send(self, step: int, partial: Tensor) -> None:
        exchange, rank, size = self._exchange, self._rank, self._size
        assert exchange.sums
        channel, peer = self._channel + 1, (rank + step) % size
        exchange.follow()
        torch.cuda.set_stream(exchange.stream)
        try:
            self._sum_of(peer, step).copy_(partial, non_blocking=True)
            exchange.signal(peer, channel)
        finally:
            torch.cuda.set_stream(exchange.current)
        self._kept.append(partial)
        self._waits.append(((rank - step) % size, channel))
        self._sums.append(step)

    def add_to(self, own: Tensor) -> Tensor:
        for step in self._sums:
            self._wait((self._rank - step) % self._size, self._channel + 1)
            own.add_(self._sum_of(self._rank, step))
        return own

    def end(self) -> None:
        exchange = self._exchange
        for source, channel in list(self._waits):
            self._wait(source, channel)
        exchange.sent.record(exchange.stream)
        exchange.current.wait_event(exchange.sent)
        self._kept.clear()
