"""Flat gradient buffers: where each parameter and each bucket begins, and sums of several views."""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Parameter

from megatron_lightning.config.plan import Gradient, ParameterInfo
from megatron_lightning.parallel.axes import MeshAxis
from megatron_lightning.parallel.collectives import all_reduce_, reduce_scatter_single
from megatron_lightning.parallel.main_gradient import PutOff, add_product_
from megatron_lightning.precision.accumulate import add_to_sum_

ALIGNMENT_ELEMENTS = 32
"""Parameters begin at multiples of this (128 bytes in float32), so that kernels can vectorise."""


def plan_buckets(
    numels: Sequence[int], bucket_size: int, parts: int = 1
) -> tuple[list[int], list[int]]:
    """Lay parameters out in a flat buffer: (begins of parameters, begins of buckets), in elements.

    A bucket is closed as soon as it holds `bucket_size` elements; no parameter lies in two. Each
    bucket is padded so that it can be cut into `parts` equal, aligned parts. The length of the
    buffer is appended to both lists.
    """
    begins: list[int] = []
    buckets = [0]
    position = 0
    for numel in numels:
        if position - buckets[-1] >= bucket_size:
            position = buckets[-1] + _round_up(position - buckets[-1], parts * ALIGNMENT_ELEMENTS)
            buckets.append(position)
        begins.append(position)
        position += _round_up(numel, ALIGNMENT_ELEMENTS)
    position = buckets[-1] + _round_up(position - buckets[-1], parts * ALIGNMENT_ELEMENTS)
    return [*begins, position], [*buckets, position]


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


@dataclass(frozen=True, kw_only=True)
class Replicas:
    """The ranks that hold equal parameters: `replica` x `shard`.

    Each rank of `shard` gets the reduced gradients of its own part of a bucket; ranks of `replica`
    get equal ones. With a `shard` axis of size 1, every rank gets all.
    """

    shard: MeshAxis
    replica: MeshAxis


@dataclass(eq=False)
class Bucket:
    """A slice of a buffer that is reduced as one."""

    data: Tensor
    replicas: Replicas
    chunk: int
    """Model chunk (virtual stage) of its parameters; they are all of the same one."""
    slots: list[Slot] = field(default_factory=list)
    armed: bool = False
    """True when the backward pass that completes it is the next one."""
    launched: bool = False
    pending: set[str] = field(default_factory=set)
    """Parameters whose gradient that pass has not brought yet."""
    work: Any = None
    side_stream: Any = None
    """CUDA stream on which the sum over `replica` follows that over `shard`."""

    @property
    def own_range(self) -> tuple[int, int]:
        """(start, stop) in elements of this rank's part of the bucket."""
        length = self.data.numel() // self.replicas.shard.size
        return self.replicas.shard.rank * length, (self.replicas.shard.rank + 1) * length

    @property
    def own(self) -> Tensor:
        """View of this rank's part of the gradients."""
        start, stop = self.own_range
        return self.data[start:stop]

    def launch(self) -> None:
        """Start to sum over the replicas: reduce-scatter over `shard`, else all-reduce."""
        self.launched = True
        for slot in self.slots:
            slot.fill()
        shard, replica = self.replicas.shard, self.replicas.replica
        if shard.size > 1:
            self.work = reduce_scatter_single(self.own, self.data, group=shard.group, async_op=True)
            if self.side_stream is not None:
                with torch.cuda.stream(self.side_stream):
                    self.launch_replicas()
        elif replica.size > 1:
            self.work = dist.all_reduce(self.data, group=replica.group, async_op=True)

    def launch_replicas(self) -> None:
        """Sum the own part over `replica` when that over `shard` is there; waits for the latter."""
        if self.replicas.shard.size > 1 and self.replicas.replica.size > 1:
            self.wait()
            group = self.replicas.replica.group
            self.work = dist.all_reduce(self.own, group=group, async_op=True)

    @property
    def is_complete_by_waiting(self) -> bool:
        """Whether all of its sums over replicas have begun."""
        replicas = self.replicas
        follows = replicas.shard.size > 1 and replicas.replica.size > 1
        return self.launched and (not follows or self.side_stream is not None)

    def wait(self) -> None:
        """Wait for what was started last."""
        if self.work is not None:
            self.work.wait()
            self.work = None


@dataclass(eq=False)
class Slot:
    """One parameter and its view of a buffer."""

    name: str
    parameter: Parameter
    info: ParameterInfo
    main_grad: Tensor
    bucket: Bucket
    begin: int
    """Element of the bucket at which the parameter begins."""
    filled: bool = False
    """True when the view holds a sum of this window; until then what it holds is old."""
    received: bool = False
    """True when it got a gradient in this window; after agreement, when any replica did."""
    summed: bool = False
    """True when layers have added to the view themselves since the hook was called."""
    put_off: PutOff | None = None
    """See `MainGradient`."""

    def add(self, grad: Tensor) -> None:
        """Add a gradient to the view; the first one of a window is copied."""
        if self.filled:
            add_to_sum_(self.main_grad, grad.view_as(self.main_grad))
        else:
            self.main_grad.copy_(grad.view_as(self.main_grad))
            self.filled = True

    def add_product(self, grad: Tensor, x: Tensor) -> None:
        """Add grad^T x, as a layer does in a backward pass: (..., out), (..., in) -> (out, in)."""
        self.check_open()
        add_product_(self.main_grad, grad, x, first=not self.filled)
        self.filled = self.summed = self.received = True

    def add_gradient(self, compute: Callable[[Tensor | None], Tensor]) -> None:
        """Add a gradient, as a layer does in a backward pass.

        `compute(out)` gives it, as many elements as the weight; given a flat `out`, it writes it
        there.
        """
        self.check_open()
        if self.filled:
            self.add(compute(None))
        else:
            compute(self.main_grad.view(-1))
        self.filled = self.summed = self.received = True

    def add_written(self, write: Callable[[Tensor, bool], None]) -> None:
        """Add a gradient, as a layer does in a backward pass: `write(total, add)` adds it to the
        flat sum, or without `add` overwrites what is there.
        """
        self.check_open()
        write(self.main_grad.view(-1), self.filled)
        self.filled = self.summed = self.received = True

    def check_open(self) -> None:
        """RuntimeError when the bucket's sum over replicas has begun."""
        if self.bucket.launched:
            raise RuntimeError(
                f"parameter {self.name!r} got a gradient after its bucket was reduced. Either"
                " backward ran again after the last micro-batch of the window, or one pass reaches"
                " the parameter several times (re-entrant checkpointing of a shared parameter): use"
                " non-re-entrant checkpointing, or switch the overlap off"
            )

    def fill(self) -> None:
        """Make the view zero unless it holds a sum of this window."""
        if not self.filled:
            self.main_grad.zero_()
            self.filled = True

    @property
    def own_range(self) -> tuple[int, int]:
        """(start, stop) in elements of the flattened parameter: the part that this rank reduces
        and updates; empty where the parameter lies in other ranks' parts.
        """
        start, stop = (edge - self.begin for edge in self.bucket.own_range)
        start, stop = max(start, 0), min(stop, self.main_grad.numel())
        return (start, stop) if start < stop else (0, 0)

    @property
    def own_grad(self) -> Tensor:
        """Flat view of the reduced gradient of `own_range`."""
        start, stop = self.own_range
        return self.main_grad.view(-1)[start:stop]


def lay_out(
    parameters: Mapping[str, Parameter],
    table: Mapping[str, ParameterInfo],
    chunk: int,
    replicas: Replicas,
    *,
    bucket_size: int,
    dtype: torch.dtype,
) -> tuple[Tensor, list[Slot]]:
    """Make one zero buffer (elements,) for `parameters` and the slots in it, in the given order."""
    numels = [p.numel() for p in parameters.values()]
    begins, bounds = plan_buckets(numels, bucket_size, replicas.shard.size)
    device = next(iter(parameters.values())).device
    buffer = torch.zeros(begins[-1], dtype=dtype, device=device)
    slots: list[Slot] = []
    buckets = [
        Bucket(data=buffer[begin:end], replicas=replicas, chunk=chunk)
        for begin, end in itertools.pairwise(bounds)
    ]
    for (name, parameter), begin in zip(parameters.items(), begins, strict=False):
        index = bisect.bisect_right(bounds, begin, hi=len(buckets)) - 1
        bucket = buckets[index]
        view = buffer[begin : begin + parameter.numel()].view(parameter.shape)
        slot = Slot(name, parameter, table[name], view, bucket, begin - bounds[index])
        bucket.slots.append(slot)
        slots.append(slot)
    return buffer, slots


def agree_on_received(slots: Sequence[Slot], axis: MeshAxis) -> None:
    """Let a parameter count as received where any rank of `axis` received it: all step, or none.

    The result is read, which waits for the device, only on ranks that miss a gradient themselves.
    """
    if axis.size == 1 or not slots:
        return
    received = [slot.received for slot in slots]
    device = slots[0].main_grad.device
    flags = (
        torch.ones(len(slots), dtype=torch.int32, device=device)
        if all(received)  # the usual case costs no copy to the device
        else torch.tensor(received, dtype=torch.int32, device=device)
    )
    all_reduce_(flags, axis, "max")
    if not all(received):
        for slot, flag in zip(slots, flags.tolist(), strict=True):
            slot.received = bool(flag)


def is_tensor_partial(info: ParameterInfo, *, sequence_parallel: bool) -> bool:
    """Return whether a tensor rank's gradient of the parameter is only a part of it."""
    if info.split.dim is not None or info.expert:
        return False  # experts are summed over edp, which already spans the tensor ranks
    gradient = info.split.gradient
    return gradient is Gradient.PARTIAL or (gradient is Gradient.SEQUENCE and sequence_parallel)


def sum_gradients(slots: Sequence[Slot], axis: MeshAxis) -> None:
    """Sum the own parts of the gradients of `slots` over `axis` as one tensor.

    Slots and their own parts must be equal on each rank of the axis.
    """
    sum_tensors([slot.own_grad for slot in slots], axis)


def sum_tensors(tensors: Sequence[Tensor], axis: MeshAxis) -> None:
    """Sum tensors (of equal shapes on each rank) over `axis` in place, as one."""
    if axis.size == 1 or not tensors:
        return
    flat = all_reduce_(torch.cat([tensor.flatten() for tensor in tensors]), axis)
    parts = flat.split([tensor.numel() for tensor in tensors])
    torch._foreach_copy_(
        list(tensors), [part.view_as(t) for part, t in zip(parts, tensors, strict=True)]
    )
