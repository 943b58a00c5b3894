"""One rank of a layout of several, alone in one process: all other ranks are its mirror images.

What a rank computes, launches and holds can so be measured on a single GPU, without the time of
communication and without waiting for others. Collectives of this process group are done at once, on
the current stream, as copies within the device: a gather repeats the own part, a reduction counts
the own contribution once for every rank, a message that arrives is random numbers of unit size
(small ones, headers: the last of that size that was sent). So all numbers are finite and of the
usual sizes, on which a GPU's power depends, but the losses are those of no training. Overlap of
tensor parallelism by the peers' memory writes to memory of this GPU instead.

    with mirrored(ranks=2, rank=0):
        trainer.fit(...)  # num_nodes=2, devices=1
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_lightning.parallel.peers import symmetric
from megatron_lightning.parallel.peers.symmetric import SymmetricExchange
from megatron_lightning.runtime.publish import Publisher
from megatron_lightning.runtime.stage_messages import StageMessages, TensorSpec
from megatron_lightning.strategies.lifeline import Lifeline

_SMALL_BYTES = 1024
"""Smaller messages are headers, whose numbers mean something."""
_NOISE = 1 << 20
"""Random numbers that are drawn once and repeated."""


class Done(dist.Work):  # type: ignore[misc]
    """Of a collective that is over."""

    def wait(self, timeout: Any = None) -> bool:
        """Nothing to wait for."""
        return True

    def is_completed(self) -> bool:
        """True."""
        return True

    def is_success(self) -> bool:
        """True."""
        return True

    def synchronize(self) -> None:
        """Nothing to wait for."""


def _as_native(group: type[Any]) -> type[Any]:
    """The compiler leaves collectives out of its regions, as it does those of other groups."""
    for name, method in list(vars(group).items()):
        if callable(method) and not name.startswith("__"):
            setattr(group, name, torch.compiler.disable(method))
    return group


@_as_native
class MirrorGroup(dist.ProcessGroup):
    """A process group of `size` ranks of which all are like this one."""

    supports_coalescing = False

    def __init__(self, rank: int, size: int) -> None:
        super().__init__(rank, size)
        self._rank, self._size = rank, size
        self._sent: dict[int, Tensor] = {}
        self._noise: dict[torch.device, Tensor] = {}

    # ------------------------------------------------------------------ what torch asks of a group

    def rank(self) -> int:
        """The own rank in the group."""
        return self._rank

    def size(self) -> int:
        """Ranks."""
        return self._size

    @property
    def group_name(self) -> str:
        """That under which compiled regions find it."""
        return dist.distributed_c10d._world.pg_names[self]

    def getBackendName(self) -> str:  # noqa: N802 - torch's name
        """That under which it is registered."""
        return "mirror"

    def _get_backend(self, device: torch.device) -> MirrorGroup:
        return self

    def abort(self) -> None:
        """Nothing is under way."""

    # ------------------------------------------------------------------ collectives

    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> Done:
        """In place: a sum is the own tensor n times, a maximum itself."""
        if opts is None or opts.reduceOp == dist.ReduceOp.SUM:
            for tensor in tensors:
                tensor.mul_(self._size)
        return Done()

    allreduce_coalesced = allreduce

    def reduce(self, tensors: list[Tensor], opts: Any = None) -> Done:
        """As `allreduce`."""
        return self.allreduce(tensors, opts)

    def broadcast(self, tensors: list[Tensor], opts: Any = None) -> Done:
        """The others hold the same."""
        return Done()

    def all_gather_single(self, output: Tensor, own: Tensor, opts: Any = None) -> Done:
        """(n x own) <- own."""
        for part in output.view(self._size, *own.shape):
            if part.data_ptr() != own.data_ptr():  # a gather may be in place
                part.copy_(own)
        return Done()

    _allgather_base = all_gather_single  # the name until torch 2.12

    def all_gather_single_coalesced(
        self, outputs: list[Tensor], own: list[Tensor], opts: Any = None
    ) -> Done:
        """Several of them."""
        for output, one in zip(outputs, own, strict=True):
            self.all_gather_single(output, one)
        return Done()

    allgather_into_tensor_coalesced = all_gather_single_coalesced

    def allgather(self, outputs: list[list[Tensor]], own: list[Tensor], opts: Any = None) -> Done:
        """Every tensor of the list is the own."""
        for output, one in zip(outputs, own, strict=True):
            for tensor in output:
                tensor.copy_(one)
        return Done()

    def gather(self, outputs: list[list[Tensor]], own: list[Tensor], opts: Any = None) -> Done:
        """Likewise, where there is a list."""
        return self.allgather(outputs, own[: len(outputs)])

    def scatter(self, outputs: list[Tensor], parts: list[list[Tensor]], opts: Any = None) -> Done:
        """The own part of what this rank gives, zeros where another one gives."""
        for index, output in enumerate(outputs):
            output.copy_(parts[index][self._rank]) if parts else output.zero_()
        return Done()

    def reduce_scatter_single(self, output: Tensor, whole: Tensor, opts: Any = None) -> Done:
        """Own <- its part of the whole, n times for a sum."""
        part = whole.view(self._size, -1)[self._rank].view_as(output)
        if opts is None or opts.reduceOp == dist.ReduceOp.SUM:
            torch.mul(part, self._size, out=output)
        else:
            output.copy_(part)
        return Done()

    _reduce_scatter_base = reduce_scatter_single  # the name until torch 2.12

    def reduce_scatter_single_coalesced(
        self, outputs: list[Tensor], wholes: list[Tensor], opts: Any = None
    ) -> Done:
        """Several of them."""
        for output, whole in zip(outputs, wholes, strict=True):
            self.reduce_scatter_single(output, whole, opts)
        return Done()

    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    def reduce_scatter(
        self, outputs: list[Tensor], parts: list[list[Tensor]], opts: Any = None
    ) -> Done:
        """From lists of parts."""
        for output, whole in zip(outputs, parts, strict=True):
            torch.mul(whole[self._rank], self._size, out=output)
        return Done()

    def all_to_all_single(
        self,
        output: Tensor,
        given: Tensor,
        output_sizes: Sequence[int] | None = None,
        given_sizes: Sequence[int] | None = None,
        opts: Any = None,
    ) -> Done:
        """What this rank gives to rank i is what rank i gives to this one."""
        rows = min(len(output), len(given))
        output[:rows].copy_(given[:rows])
        self._fill(output[rows:])
        return Done()

    alltoall_base = all_to_all_single  # the name until torch 2.12

    def alltoall(self, outputs: list[Tensor], given: list[Tensor], opts: Any = None) -> Done:
        """Likewise, with lists."""
        for output, one in zip(outputs, given, strict=True):
            self.all_to_all_single(output, one)
        return Done()

    def barrier(self, opts: Any = None) -> Done:
        """Nobody is late."""
        return Done()

    # ------------------------------------------------------------------ messages

    def send(self, tensors: list[Tensor], target: int, tag: int = 0) -> Done:
        """Small ones are kept."""
        for tensor in tensors:
            if _bytes(tensor) <= _SMALL_BYTES:
                self._sent[_bytes(tensor)] = tensor.clone()
        return Done()

    def recv(self, tensors: list[Tensor], source: int, tag: int = 0) -> Done:
        """The last that was sent of the size where it is small, else random numbers."""
        for tensor in tensors:
            known = self._sent.get(_bytes(tensor))
            if known is not None:
                tensor.copy_(known)
            else:
                self._fill(tensor)
        return Done()

    def _fill(self, tensor: Tensor) -> None:
        """Random numbers, of unit size where they are read as any floating-point numbers of at
        least two bytes.
        """
        if tensor.numel() == 0:
            return
        if tensor.device not in self._noise:
            self._noise[tensor.device] = _noise(tensor.device)
        noise, flat = self._noise[tensor.device], tensor.view(-1).view(torch.uint8)
        whole = len(flat) // len(noise) * len(noise)
        flat[:whole].view(-1, len(noise)).copy_(noise.expand(whole // len(noise), -1))
        flat[whole:].copy_(noise[: len(flat) - whole])


class OwnMemory:
    """Symmetric memory of which each peer's part is this rank's own."""

    def __init__(self, memory: Tensor) -> None:
        self._memory = memory
        self._signal = torch.zeros(1, device=memory.device)
        self._pad = torch.zeros(_SMALL_BYTES, dtype=torch.int32, device=memory.device)

    @classmethod
    def empty_strided_p2p(
        cls, size: Sequence[int], stride: Sequence[int], dtype: torch.dtype, device: torch.device
    ) -> Tensor:
        """Memory of random numbers, since from others none will come."""
        noise = _noise(device)
        return noise.repeat(-(-size[0] // len(noise)))[: size[0]]

    @classmethod
    def rendezvous(cls, memory: Tensor, group: str) -> OwnMemory:
        """Nobody else is there."""
        return cls(memory)

    def get_buffer(
        self, rank: int, shape: Sequence[int], dtype: torch.dtype, storage_offset: int = 0
    ) -> Tensor:
        """The same for all ranks."""
        count = torch.Size(shape).numel()
        return self._memory.view(dtype)[storage_offset : storage_offset + count].view(*shape)

    def get_signal_pad(self, rank: int, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Numbers that nobody waits for."""
        return self._pad[: torch.Size(shape).numel()]

    @staticmethod
    def stream_write_value32(pad: Tensor, offset: int, value: int) -> None:
        """A small kernel, where the stream itself would write."""
        pad[offset].fill_(value)

    def put_signal(self, rank: int, channel: int, timeout: int) -> None:
        """A small kernel, as a signal is."""
        self._signal.fill_(1)

    def wait_signal(self, rank: int, channel: int, timeout: int) -> None:
        """A small kernel that doesn't wait."""
        self._signal.fill_(0)


def _noise(device: torch.device) -> Tensor:
    """Bytes of random numbers of unit size in bfloat16."""
    generator = torch.Generator(device).manual_seed(0)
    numbers = torch.randn(_NOISE, generator=generator, device=device, dtype=torch.bfloat16)
    return numbers.view(torch.uint8)


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _create(store: Any, rank: int, size: int, timeout: Any) -> MirrorGroup:
    return MirrorGroup(rank, size)


def stage_input(shape: dict[str, Any], *, tp: int, cp: int) -> TensorSpec:
    """What a pipeline stage of a shape of `shapes.py` is sent: a part of the hidden states."""
    size = (shape["seq"] // (tp * cp), shape["micro"], shape["hidden"])
    return TensorSpec(size, torch.bfloat16, differentiable=True)


@contextmanager
def mirrored(*, ranks: int, rank: int = 0, arrives: TensorSpec | None = None) -> Iterator[None]:
    """Within, torch.distributed runs as rank `rank` of `ranks`, and a Trainer with `devices=1,
    num_nodes=ranks` as that one of its processes. `arrives`: what pipeline stages are sent, which
    nobody is there to announce.
    """
    if not 0 <= rank < ranks:
        raise ValueError(f"rank={rank}: give one of 0 to {ranks - 1}")
    if not hasattr(dist.Backend, "MIRROR"):
        dist.Backend.register_backend("mirror", _create, devices=["cpu", "cuda"])
    variables = {
        "RANK": str(rank),
        "WORLD_SIZE": str(ranks),
        "LOCAL_RANK": "0",
        "NODE_RANK": str(rank),
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": "29500",
    }
    new_group, agree = dist.new_group, Publisher._agree

    def mirror_group(*args: Any, backend: Any = None, **options: Any) -> Any:
        return new_group(*args, backend="mirror", **options)

    def agree_on(self: Publisher, own: Any, mark: Any) -> Any:
        return agree(self, own or (), mark)  # a rank without the last stage is told nothing

    with ExitStack() as patches:
        patches.enter_context(patch.dict(os.environ, variables))
        for owner, name, stand_in in (
            (dist, "new_group", mirror_group),
            (dist, "broadcast_object_list", lambda objects, *args, **options: None),
            (Lifeline, "open", lambda *args: Lifeline(0, {})),
            (Publisher, "_agree", agree_on),
            (StageMessages, "receive_specs", lambda self, peer: (arrives,)),
            (SymmetricExchange, "try_out", lambda self: None),
            (symmetric, "_SymmetricMemory", OwnMemory),
        ):
            patches.enter_context(patch.object(owner, name, stand_in))
        dist.init_process_group("mirror", store=dist.HashStore(), rank=rank, world_size=ranks)
        try:
            yield
        finally:
            dist.destroy_process_group()
