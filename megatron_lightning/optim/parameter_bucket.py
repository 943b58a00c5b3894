"""The parameters of one gradient bucket in one flat tensor, and this rank's part of them.

The part is one slice, which the optimizer updates or its masters are rounded to, and which is given
to the other ranks after each step.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from megatron_lightning.optim.gather_fp8 import FP8Gather
from megatron_lightning.parallel.axes import MeshAxis
from megatron_lightning.parallel.collectives import all_gather_single
from megatron_lightning.parallel.flat import Bucket
from megatron_lightning.precision.changes import MasterCopy


@dataclass(eq=False)
class ParameterBucket:
    """The parameters of one gradient bucket."""

    bucket: Bucket | None
    """Their gradients; None after `ParameterShards.close`."""
    shard: MeshAxis
    own_range: tuple[int, int]
    """(start, stop) in elements of this rank's part."""
    parameters: list[Parameter]
    views: list[Tensor]
    """Their places in `data`, in their shapes."""
    data: Tensor
    """(elements,) all parameters, as their gradients lie; each parameter is a view of it."""
    masters: Tensor
    """(elements / shards,) what the optimizer updates: the own part of `data` itself, or a copy."""
    parts: dict[str, Parameter] = field(default_factory=dict)
    """Flat views of `masters` for each parameter that has elements in it, by name (0-dim for a
    scalar)."""
    grads: Tensor | None = None
    """Host copy of the own part of the gradients, when masters lie in host memory."""
    work: Any = None
    is_given: bool = False
    """True when the gather of this step has begun."""
    fp8: FP8Gather | None = None
    """Where some of the parameters are gathered in eight bits."""

    @property
    def own(self) -> Tensor:
        """View of this rank's part of the parameters."""
        start, stop = self.own_range
        return self.data[start:stop]

    @property
    def has_copies(self) -> bool:
        """True when masters are not the parameters themselves."""
        return self.masters.data_ptr() != self.own.data_ptr()

    def own_values(self, part: Parameter) -> Tensor:
        """View of the parameters' values where one of `parts` has masters."""
        begin = part.storage_offset() - self.masters.storage_offset()
        return self.own[begin : begin + part.numel()].view(part.shape)

    def master_copy(self, part: Parameter) -> MasterCopy:
        """One of `parts` that has masters, and what of the parameters it is rounded to."""
        place = self.own_range[0] + int(part.storage_offset() - self.masters.storage_offset())
        given = None if self.fp8 is None else functools.partial(self.fp8.given, place=place)
        return MasterCopy(part.detach(), self.own_values(part), given)

    def put_back(self) -> None:
        """Put values of parameters that were given other memory where they are gathered."""
        for parameter, view in zip(self.parameters, self.views, strict=True):
            if parameter.data_ptr() != view.data_ptr():
                view.copy_(parameter)
                parameter.data = view

    @torch.no_grad()
    def note_given(self) -> None:
        """Parameters hold what a gather of these masters gave, as in a checkpoint. All ranks must
        call it.
        """
        if self.fp8 is not None:
            self.fp8.find_scales(self.masters.to(self.data))

    @torch.no_grad()
    def begin_gather(self, *, rounded: bool = False) -> None:
        """Round the masters to the own part, unless that has been done, and start to give it to the
        other ranks.
        """
        if self.has_copies and not rounded:
            self.own.copy_(self.masters, non_blocking=True)
        if self.fp8 is not None:
            self.work = self.fp8.begin()
        elif self.shard.size > 1:
            group = self.shard.group
            self.work = all_gather_single(self.data, self.own, group=group, async_op=True)

    def wait(self) -> None:
        """Make what follows on this stream see the gathered parameters."""
        if self.work is not None:
            self.work.wait()
            self.work = None
            if self.fp8 is not None:
                self._put()

    @torch.no_grad()
    def _put(self) -> None:
        assert self.fp8 is not None
        self.fp8.finish()
