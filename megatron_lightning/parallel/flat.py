"""Flat gradient buffers: where each parameter and each bucket begins, and sums of several views."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from megatron_lightning.config.plan import ParameterInfo
from megatron_lightning.parallel.collectives import all_reduce_
from megatron_lightning.parallel.mesh import MeshAxis

ALIGNMENT_ELEMENTS = 32
"""Parameters begin at multiples of this (128 bytes in float32), so that kernels can vectorise."""


def plan_buckets(numels: Sequence[int], bucket_size: int) -> tuple[list[int], list[int]]:
    """Lay parameters out in a flat buffer: (begins of parameters, begins of buckets), in elements.

    A bucket is closed as soon as it holds `bucket_size` elements; no parameter lies in two. The
    length of the buffer is appended to both lists.
    """
    begins: list[int] = []
    buckets = [0]
    position = 0
    for numel in numels:
        if position - buckets[-1] >= bucket_size:
            buckets.append(position)
        begins.append(position)
        position += -(-numel // ALIGNMENT_ELEMENTS) * ALIGNMENT_ELEMENTS
    return [*begins, position], [*buckets, position]


@dataclass(eq=False)
class Bucket:
    """A slice of a buffer that is reduced as one over `axis`."""

    data: Tensor
    axis: MeshAxis
    chunk: int
    """Model chunk (virtual stage) of its parameters; they are all of the same one."""
    names: list[str] = field(default_factory=list)
    armed: bool = False
    """True when the backward pass that completes it is the next one."""
    launched: bool = False
    pending: set[str] = field(default_factory=set)
    """Parameters whose gradient that pass has not brought yet."""
    work: Any = None


@dataclass(eq=False)
class Slot:
    """One parameter and its view of a buffer."""

    name: str
    parameter: Parameter
    info: ParameterInfo
    main_grad: Tensor
    bucket: Bucket
    received: bool = False
    """True when it got a gradient in this window; after agreement, when any replica did."""


def lay_out(
    parameters: Mapping[str, Parameter],
    table: Mapping[str, ParameterInfo],
    chunk: int,
    axis: MeshAxis,
    *,
    bucket_size: int,
    dtype: torch.dtype,
) -> tuple[Tensor, list[Slot]]:
    """Make one zero buffer (elements,) for `parameters` and the slots in it, in the given order."""
    begins, bounds = plan_buckets([p.numel() for p in parameters.values()], bucket_size)
    device = next(iter(parameters.values())).device
    buffer = torch.zeros(begins[-1], dtype=dtype, device=device)
    ends = iter(bounds[1:])
    end = 0
    bucket: Bucket | None = None
    slots: list[Slot] = []
    for (name, parameter), begin in zip(parameters.items(), begins, strict=False):
        if bucket is None or begin >= end:
            end = next(ends)
            bucket = Bucket(data=buffer[begin:end], axis=axis, chunk=chunk)
        bucket.names.append(name)
        view = buffer[begin : begin + parameter.numel()].view(parameter.shape)
        slots.append(Slot(name, parameter, table[name], view, bucket))
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


def sum_gradients(slots: Sequence[Slot], axis: MeshAxis) -> None:
    """Sum the main gradients of `slots` over `axis` as one tensor; equal slots on each rank."""
    if axis.size == 1 or not slots:
        return
    grads = [slot.main_grad for slot in slots]
    flat = all_reduce_(torch.cat([grad.flatten() for grad in grads]), axis)
    parts = flat.split([grad.numel() for grad in grads])
    torch._foreach_copy_(
        grads, [part.view_as(grad) for part, grad in zip(parts, grads, strict=True)]
    )
