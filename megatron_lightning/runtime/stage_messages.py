"""Tuples of tensors between pipeline ranks, in the order of the action lists.

Every message is one ``batch_isend_irecv`` on the pipeline axis' group, so that on NCCL all of them
share one communicator and one in-order stream. Tensors travel as bytes, hence in any dtype. A
receiver must know shapes beforehand: ``send_specs`` and ``receive_specs`` carry them once for each
kind of micro-batch (the engine caches them). Nothing here waits before it has to: receives are
waited for where their data is used, sends only when too many are under way.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_lightning.parallel.axes import MeshAxis

_DTYPES = (
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.complex64,
    torch.complex128,
    torch.bool,
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
)  # the position is the code in a header; all ranks run the same version


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """What a receiver has to know of a tensor."""

    shape: tuple[int, ...]
    """Sizes of its dims."""
    dtype: torch.dtype
    """Element type."""
    differentiable: bool
    """A gradient of the same shape and dtype will come back for it."""

    @classmethod
    def of(cls, tensor: Tensor, *, backward: bool) -> "TensorSpec":
        """The spec of a stage's output; only floating-point outputs with a graph get a gradient."""
        differentiable = backward and tensor.requires_grad and tensor.is_floating_point()
        return cls(tuple(tensor.shape), tensor.dtype, differentiable)


@dataclass(slots=True)
class Arrival:
    """Tensors under way; ``take`` waits for them."""

    tensors: tuple[Tensor, ...]
    works: list[dist.Work] = field(default_factory=list)
    specs: tuple[TensorSpec, ...] = ()

    def take(self) -> tuple[Tensor, ...]:
        """The tensors, complete (on CUDA: for what is launched on the current stream from now)."""
        for work in self.works:
            work.wait()
        self.works = []
        return self.tensors


class StageMessages:
    """The messages of one pipeline rank. Both ends must call in the same order."""

    max_sends_under_way = 4
    """Older sends are waited for, which bounds the memory that their tensors hold: an activation
    and a gradient in each of the two most recent rounds of a schedule's steady state."""

    def __init__(self, axis: MeshAxis, device: torch.device) -> None:
        self._axis, self._device = axis, device
        self._sends: deque[tuple[list[dist.Work], list[Tensor]]] = deque()
        self._connected = False

    def connect(self) -> None:
        """Bring up the communicator: NCCL wants all ranks of a group in the group's first call."""
        if not self._connected and self._axis.size > 1:
            dist.all_reduce(torch.zeros(1, device=self._device), group=self._axis.group)
        self._connected = True

    def send(self, tensors: Sequence[Tensor], peer: int) -> None:
        """Start sending; the tensors are kept alive until they have left."""
        payload = [_as_bytes(t.detach().contiguous()) for t in tensors if t.numel() > 0]
        if not payload:
            return
        self._sends.append((self._exchange(dist.isend, payload, peer), payload))
        while len(self._sends) > self.max_sends_under_way:
            self._wait_oldest()

    def receive(self, specs: Sequence[TensorSpec], peer: int) -> Arrival:
        """Start receiving tensors of these specs into new memory."""
        tensors = tuple(
            torch.empty(spec.shape, dtype=spec.dtype, device=self._device) for spec in specs
        )
        payload = [_as_bytes(t) for t in tensors if t.numel() > 0]
        works = self._exchange(dist.irecv, payload, peer) if payload else []
        return Arrival(tensors, works, tuple(specs))

    def send_specs(self, specs: Sequence[TensorSpec], peer: int) -> None:
        """Tell the peer what the next ``send`` holds."""
        header = [len(specs)]
        for spec in specs:
            header += [_DTYPES.index(spec.dtype), spec.differentiable, len(spec.shape), *spec.shape]
        body = torch.tensor(header, dtype=torch.int64, device=self._device)
        self.send([torch.tensor([len(header)], dtype=torch.int64, device=self._device)], peer)
        self.send([body], peer)

    def receive_specs(self, peer: int) -> tuple[TensorSpec, ...]:
        """Wait for what the peer says of its next ``send``."""
        (length,) = self._receive_integers(1, peer)
        count, *rest = self._receive_integers(length, peer)
        specs: list[TensorSpec] = []
        for _ in range(count):
            code, differentiable, dims, *rest = rest
            specs.append(TensorSpec(tuple(rest[:dims]), _DTYPES[code], bool(differentiable)))
            rest = rest[dims:]
        return tuple(specs)

    def drain(self) -> None:
        """Wait until everything has left."""
        while self._sends:
            self._wait_oldest()

    def _wait_oldest(self) -> None:
        works, _ = self._sends.popleft()
        for work in works:
            work.wait()

    def _receive_integers(self, count: int, peer: int) -> list[int]:
        spec = TensorSpec((count,), torch.int64, differentiable=False)
        (values,) = self.receive([spec], peer).take()
        return values.tolist()

    def _exchange(
        self, operation: Callable[..., dist.Work | None], payload: Sequence[Tensor], peer: int
    ) -> list[dist.Work]:
        group = self._axis.group
        return dist.batch_isend_irecv(
            [dist.P2POp(operation, tensor, group=group, group_peer=peer) for tensor in payload]
        )


def _as_bytes(tensor: Tensor) -> Tensor:
    """The memory of a contiguous tensor as a flat uint8 tensor."""
    return tensor.view(-1).view(torch.uint8)
