"""Parameters in flat buckets, this rank's part of them, and the gather of what all ranks updated.

The parameters of a gradient bucket are moved into one flat tensor laid out as their gradients are,
so that every data rank's part of it is one slice. The optimizer sees the part as one flat tensor
for each parameter (or part of one) in it: views of the parameters themselves, or of masters where
these have another dtype or lie in host memory (ZeRO stage 1, arXiv 1910.02054). Which optimizer
updates them is the business of `optim.distributed`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterable

import torch
from torch import Tensor
from torch.nn import Parameter

from megatron_lightning.optim.gather_fp8 import FP8Gather
from megatron_lightning.optim.parameter_bucket import ParameterBucket
from megatron_lightning.parallel.data import GradientBuckets
from megatron_lightning.parallel.flat import Bucket, Slot
from megatron_lightning.precision.changes import MasterCopy
from megatron_lightning.precision.masters import Agree, Unrounded, still_initial


def _give(made: ParameterBucket) -> None:
    made.begin_gather(rounded=True)
    made.is_given = True


class ParameterShards:
    """All parameters of the buckets, of which this rank updates its parts.

    `dtype` is that of the masters; None: each parameter's own, and no copies. With `offload`
    masters lie in host memory. `fp8` names weights that are gathered in eight bits. While a gather
    is running, parameters must not be read before `wait`.
    """

    def __init__(
        self,
        buckets: GradientBuckets,
        *,
        dtype: torch.dtype | None = None,
        offload: bool = False,
        fp8: Collection[str] = (),
        initial: Unrounded | None = None,
        agree: Agree | None = None,
    ) -> None:
        self._buckets = buckets
        self._initial: Unrounded = initial or {}
        self._agree = agree
        self._dtype = dtype
        self._offload = offload
        self._fp8 = frozenset(fp8)
        self._made: list[ParameterBucket] = []
        self._bucket_of: dict[str, ParameterBucket] = {}
        self.weights: dict[str, Parameter] = {}
        """Parameters of which this or another rank updates parts, by name."""
        self.ranges: dict[str, tuple[int, int]] = {}
        """(start, stop) of the part of each flattened parameter that this rank updates; may be
        empty."""
        self.extend()

    @property
    def has_masters(self) -> bool:
        """True when parts are copies of another dtype, which hold more than the parameters."""
        return any(made.masters.dtype is not made.data.dtype for made in self._made)

    @property
    def has_copies(self) -> bool:
        """True when parts are copies, which hold more than the parameters or lie elsewhere."""
        return any(made.has_copies for made in self._made)

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """Flat parameters and masters, for memory reports and tests."""
        return tuple(tensor for made in self._made for tensor in (made.data, made.masters))

    @property
    def is_pending(self) -> bool:
        """True while a gather is running."""
        return any(made.work is not None for made in self._made)

    @property
    def names(self) -> Collection[str]:
        """Of the parameters of which this or another rank updates parts."""
        return self.ranges.keys()

    def parts(self) -> dict[str, Parameter]:
        """What this rank updates, by name: (elements,) tensors. Names without a part are left
        out.
        """
        return {
            name: part
            for name, made in self._bucket_of.items()
            if (part := made.parts.get(name)) is not None
        }

    def extend(self) -> None:
        """Take in buckets that were added since (parameters that were unfrozen)."""
        taken = {made.bucket for made in self._made}
        new = [bucket for bucket in self._buckets.buckets if bucket not in taken]
        # Every rank asks of all parameters, whether it updates parts of them or not.
        rounded = [
            slot.parameter
            for bucket in new
            for slot in bucket.slots
            if self._dtype not in (None, slot.parameter.dtype)
        ]
        exact = still_initial(rounded, self._initial, self._agree)
        for bucket in new:
            made = self._make(bucket, exact)
            self._made.append(made)
            self._bucket_of |= {slot.name: made for slot in bucket.slots}
            self.ranges |= {slot.name: slot.own_range for slot in bucket.slots}
            self.weights |= {slot.name: slot.parameter for slot in bucket.slots}

    @torch.no_grad()
    def _make(self, bucket: Bucket, exact: Unrounded) -> ParameterBucket:
        first = bucket.slots[0].parameter
        data = torch.zeros(bucket.data.numel(), dtype=first.dtype, device=first.device)
        views: list[Tensor] = []
        for slot in bucket.slots:
            view = data[slot.begin : slot.begin + slot.parameter.numel()].view(slot.parameter.shape)
            view.copy_(slot.parameter)
            slot.parameter.data = view
            views.append(view)
        start, stop = bucket.own_range
        own = data[start:stop]
        dtype = own.dtype if self._dtype is None else self._dtype
        made = ParameterBucket(
            bucket=bucket,
            shard=bucket.replicas.shard,
            own_range=bucket.own_range,
            parameters=[slot.parameter for slot in bucket.slots],
            views=views,
            data=data,
            masters=own,
        )
        if self._offload:
            pinned = own.is_cuda
            made.masters = torch.empty(own.shape, dtype=dtype, device="cpu", pin_memory=pinned)
            made.grads = torch.empty_like(made.masters, pin_memory=pinned)
            made.masters.copy_(own)
        elif dtype is not own.dtype:
            made.masters = own.to(dtype)
        for slot in bucket.slots:
            low, high = slot.own_range
            if low < high:
                begin = slot.begin + low - start
                part = made.masters[begin : begin + high - low]
                if slot.parameter in exact:
                    part.copy_(exact[slot.parameter]().flatten()[low:high])
                # A scalar stays one: optimizers tell counts from state by their dims.
                made.parts[slot.name] = Parameter(part if slot.parameter.dim() else part.view(()))
        spans = [
            (slot.begin, slot.begin + slot.parameter.numel())
            for slot in bucket.slots
            if slot.name in self._fp8
        ]
        if spans and made.shard.size > 1:
            made.fp8 = FP8Gather(data, made.shard, spans)
        return made

    def cut(self, name: str, value: Tensor) -> Tensor:
        """Return this rank's part of `value`, which has the shape of parameter `name`."""
        part = value.detach().flatten()[slice(*self.ranges[name])]
        return part if value.dim() else part.view(())

    # ------------------------------------------------------------------ one step

    def attach_gradients(self) -> None:
        """Give each part its reduced gradient; None where no rank got one."""
        for made in self._made:
            assert made.bucket is not None
            made.is_given = False
            if made.grads is not None:
                made.grads.copy_(made.bucket.own, non_blocking=True)
        if self._offload and any(made.data.is_cuda for made in self._made):
            torch.cuda.current_stream().synchronize()  # the host is about to read them
        slots = self._buckets.slots
        for name, part in self.parts().items():
            part.grad = self._gradient(slots[name], part) if slots[name].received else None

    def _gradient(self, slot: Slot, part: Parameter) -> Tensor:
        made = self._bucket_of[slot.name]
        if made.grads is None:
            return slot.own_grad.view(part.shape).to(part.dtype)
        begin = part.storage_offset() - made.masters.storage_offset()
        return made.grads[begin : begin + part.numel()].view(part.shape)

    def begin_gather(self, *, rounded: bool = False) -> None:
        """Start to gather what every rank updated, in the order of the next forward pass, where
        that hasn't begun in a step by stages.

        `rounded` says that `copies` hold the updated values already.
        """
        for made in reversed(self._made):
            if not made.is_given:
                made.begin_gather(rounded=rounded)
            made.is_given = False

    def stages(self) -> list[tuple[list[Parameter], Callable[[], None]]]:
        """The parts of each bucket, in the order of the next forward pass, and what starts their
        gather once all are updated and rounded. All ranks have equally many.
        """
        if self._offload or self._fp8:
            return []  # the host updates them; amounts are agreed on between gathers
        return [
            (list(made.parts.values()), functools.partial(_give, made))
            for made in reversed(self._made)
        ]

    def copies(self) -> dict[Parameter, Tensor]:
        """Return for each part that is a master the rounded values, of the same shape."""
        found: dict[Parameter, Tensor] = {}
        for made in self._made if not self._offload else ():
            for part in made.parts.values() if made.has_copies else ():
                found[part] = made.own_values(part)
        return found

    def wait(self, names: Iterable[str] | None = None) -> None:
        """Wait until the parameters `names` (None: all) are gathered."""
        if names is None:
            waiting = self._made
        else:
            waiting = [self._bucket_of[name] for name in names if name in self._bucket_of]
        for made in waiting:
            made.wait()

    # ------------------------------------------------------------------ outside of steps

    @torch.no_grad()
    def copy_from_model(self, names: Collection[str] | None = None) -> None:
        """Take the parameters' values for the masters (after they were loaded), or those of
        `names`.
        """
        self.wait()
        for made in self._made:
            made.put_back()
            if made.has_copies and names is None:
                made.masters.copy_(made.own)
            for name, part in made.parts.items():
                if made.has_copies and names is not None and name in names:
                    part.copy_(made.own_values(part))

    def note_given(self) -> None:
        """Parameters hold what masters gave, as in a checkpoint. All ranks must call it."""
        self.wait()
        for made in self._made:
            made.note_given()

    @torch.no_grad()
    def master_copies(self, names: Iterable[str]) -> dict[str, MasterCopy]:
        """The masters of this rank's parts of `names`, to be compared with the parameters, which
        are put back where they were gathered if need be. Other ranks needn't call it.
        """
        self.wait()
        wanted = {name: self._bucket_of[name] for name in names}
        for made in dict.fromkeys(wanted.values()):
            made.put_back()
        return {
            name: made.master_copy(made.parts[name])
            for name, made in wanted.items()
            if name in made.parts and made.has_copies
        }

    @torch.no_grad()
    def release(self, *, wait: bool = True) -> None:
        """Give every parameter its own memory again; without `wait`, as it is now."""
        if wait:
            self.wait()
        self._bucket_of, self.ranges, self.weights = {}, {}, {}
        while self._made:  # one after the other: no second copy of all
            made = self._made.pop()
            for parameter in made.parameters:
                parameter.data = parameter.data.clone()

    def close(self, *, wait: bool = True) -> None:
        """End training: gradients are let go, masters and optimizer state stay, to be saved."""
        if wait:
            self.wait()
        for made in self._made:
            made.bucket = None
