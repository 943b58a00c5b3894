"""Checkpoint folders between ranks: files as bytes over a gloo group, a few MiB at a time."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

import torch
import torch.distributed as dist

from megatron_lightning.checkpoint.commit import begin, discard, publish
from megatron_lightning.checkpoint.errors import CheckpointError
from megatron_lightning.checkpoint.parts import adopt, files_of

_BLOCK = 16 * 2**20  # bytes in flight in each direction


def exchange(
    group: dist.ProcessGroup,
    *,
    send: tuple[Path, int] | None = None,
    receive: tuple[Path, int] | None = None,
) -> None:
    """Send a checkpoint folder to a rank, and put the one that another sends in place. Ranks are
    those of the world; both directions run at the same time.

    Raises CheckpointError if what was received is not whole; gloo's RuntimeError when the other
    rank is gone.
    """
    sender = _Sender(group, *send) if send is not None else None
    receiver = _Receiver(group, *receive) if receive is not None else None
    try:
        ends = [end for end in (sender, receiver) if end is not None]
        for step in ("announce", "listing"):
            _wait([work for end in ends for work in getattr(end, step)()])
        streams = [end.blocks() for end in ends]
        while streams:
            streams = [stream for stream in streams if _advance(stream)]
        if receiver is not None:
            receiver.finish()
    except BaseException:
        if receiver is not None:
            receiver.give_up()
        raise


def _advance(stream: Iterator[None]) -> bool:
    return next(stream, StopIteration) is not StopIteration


def _wait(works: list[dist.Work | None]) -> None:
    for work in works:
        assert work is not None
        work.wait()


class _Sender:
    def __init__(self, group: dist.ProcessGroup, path: Path, to: int) -> None:
        self._group, self._path, self._to = group, path, to
        self._files = files_of(path)
        self._listing = _bytes(json.dumps(self._files).encode())

    def announce(self) -> list[dist.Work | None]:
        return [self._send(torch.tensor([len(self._listing)]))]

    def listing(self) -> list[dist.Work | None]:
        return [self._send(self._listing)]

    def blocks(self) -> Iterator[None]:
        for name, size in self._files.items():
            with open(self._path / name, "rb") as file:
                for length in _lengths(size):
                    block = _read(file, length)
                    if len(block) != length:
                        raise CheckpointError(f"{self._path / name} has become shorter")
                    work = self._send(block)
                    yield
                    _wait([work])

    def _send(self, tensor: torch.Tensor) -> dist.Work | None:
        return dist.isend(tensor, self._to, group=self._group)


class _Receiver:
    def __init__(self, group: dist.ProcessGroup, path: Path, source: int) -> None:
        self._group, self._path, self._source = group, path, source
        self._staging = begin(path)
        self._length = torch.zeros(1, dtype=torch.int64)
        self._listing = torch.zeros(0, dtype=torch.uint8)

    def announce(self) -> list[dist.Work | None]:
        return [self._receive(self._length)]

    def listing(self) -> list[dist.Work | None]:
        self._listing = torch.zeros(int(self._length), dtype=torch.uint8)
        return [self._receive(self._listing)]

    def blocks(self) -> Iterator[None]:
        files: dict[str, int] = json.loads(self._listing.numpy().tobytes())
        for name, size in files.items():
            path = self._staging / name
            if Path(name).is_absolute() or ".." in Path(name).parts:
                raise CheckpointError(f"rank {self._source} sends a file {name!r} of another place")
            path.parent.mkdir(exist_ok=True)
            with open(path, "xb") as file:
                for length in _lengths(size):
                    block = torch.empty(length, dtype=torch.uint8)
                    work = self._receive(block)
                    yield
                    _wait([work])
                    file.write(block.numpy().data)

    def finish(self) -> None:
        publish(self._staging, self._path, adopt(self._staging))

    def give_up(self) -> None:
        discard(self._staging)

    def _receive(self, tensor: torch.Tensor) -> dist.Work | None:
        return dist.irecv(tensor, self._source, group=self._group)


def _lengths(size: int) -> list[int]:
    return [min(_BLOCK, size - start) for start in range(0, size, _BLOCK)]


def _read(file: BinaryIO, length: int) -> torch.Tensor:
    return _bytes(file.read(length))


def _bytes(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)
