"""Data parallelism: flat gradient buckets that sum micro-batches, then replicas.

Gradients are kept as sums in flat buffers per model chunk and reduced in slices of them (buckets),
while the backward pass is still running, as in PyTorch DDP (arXiv 2006.15704); they are divided
once, by the weight of the whole accumulation window. With `sharded`, each rank gets the sums of its
own part of every bucket only (reduce-scatter), which `optim.distributed` updates (ZeRO-1, arXiv
1910.02054). Parameters are not broadcast here.

The order in which buckets are reduced is in `reduction_queue.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import Parameter

from megatron_lightning.config.plan import ParameterInfo
from megatron_lightning.parallel.bucket_layout import BucketLayout
from megatron_lightning.parallel.flat import (
    Bucket,
    Slot,
    agree_on_received,
    is_tensor_partial,
    sum_gradients,
)
from megatron_lightning.parallel.main_gradient import announce
from megatron_lightning.parallel.mesh import ParallelMesh
from megatron_lightning.parallel.reduction_queue import ReductionQueue
from megatron_lightning.utils.gradients import scale_tensors_
from megatron_lightning.utils.tensors import scalar

BUCKET_ELEMENTS = 40_000_000
"""Default bucket size: large enough for the full bandwidth of a link, small enough to overlap."""


class GradientBuckets:
    """Main gradients of this rank's trainable parameters, for one accumulation window at a time.

    The order of calls in a window: `reset`, backward passes of all micro-batches (with `arm(chunk)`
    before the last one of each chunk), `finish(weight)`, `publish`, the optimizer step, `withdraw`.

    `named_parameters` is a mapping from canonical names to parameters, or a list of them, one for
    each model chunk (virtual stage) of this rank. `tied` names, in an order that is equal on both
    edge stages, the parameters that the first and the last pipeline stage both hold. Parameters
    that don't require gradients are left out; after freezing or unfreezing, `is_stale` is True and
    `rebuild` makes new buckets. With `sharded`, buckets stay and `rebuild` adds some for parameters
    that were unfrozen, since optimizer state lies as they do. `streams`: CUDA streams beside the
    current one on which backward passes may add gradients.
    """

    def __init__(
        self,
        named_parameters: Mapping[str, Parameter] | Sequence[Mapping[str, Parameter]],
        table: Mapping[str, ParameterInfo],
        mesh: ParallelMesh,
        *,
        sequence_parallel: bool,
        sharded: bool = False,
        tied: Sequence[str] = (),
        bucket_size: int = BUCKET_ELEMENTS,
        dtype: torch.dtype = torch.float32,
        overlap: bool = True,
        streams: Sequence[Any] = (),
    ) -> None:
        if bucket_size < 1:
            raise ValueError(
                f"bucket_size={bucket_size}: must be at least 1 element; the default is"
                f" {BUCKET_ELEMENTS}"
            )
        self._chunks = (
            [named_parameters] if isinstance(named_parameters, Mapping) else list(named_parameters)
        )
        self._mesh = mesh
        self._sequence_parallel = sequence_parallel
        self.sharded = sharded
        self._tied = tuple(tied)
        self._dtype = dtype
        self._layout = BucketLayout(
            table=table,
            mesh=mesh,
            tied=self._tied,
            sharded=sharded,
            bucket_size=bucket_size,
            dtype=dtype,
        )
        # Collectives of a backward pass over the same group (context or expert parallel ones, when
        # there is no data axis beside them) would have to interleave equally with ours on every
        # rank; nothing guarantees that.
        shared = [mesh.axis(name).group for name in ("cp", "ep") if mesh.axis(name).size > 1]
        self._queue = ReductionQueue(
            overlap=overlap and not any(group is mesh.dp_cp.group for group in shared),
            on_gpu=mesh.device.type == "cuda",
            streams=streams,
        )
        self._slots: dict[str, Slot] = {}
        self._buffers: list[Tensor] = []
        self._handles: list[Any] = []
        self._layers: list[Any] = []
        self.on_launched: Callable[[], None] | None = None
        """Called after the last backward pass of a window, when all reductions have begun."""
        self._build()

    # ------------------------------------------------------------------ what is there

    @property
    def buffers(self) -> tuple[Tensor, ...]:
        """The flat buffers, for memory reports and tests."""
        return tuple(self._buffers)

    @property
    def bucket_names(self) -> list[list[str]]:
        """Names in each bucket, in the order in which buckets are reduced."""
        return [[slot.name for slot in bucket.slots] for bucket in self._queue.buckets]

    @property
    def buckets(self) -> tuple[Bucket, ...]:
        """The buckets, in the order in which they are reduced."""
        return self._queue.buckets

    @property
    def slots(self) -> dict[str, Slot]:
        """Where each parameter lies, by name."""
        return dict(self._slots)

    @property
    def num_launched(self) -> int:
        """Buckets whose reduction has begun in this window."""
        return self._queue.num_launched

    @property
    def is_stale(self) -> bool:
        """True when parameters were frozen or unfrozen since the buckets were built."""
        names = {name for chunk in self._chunks for name, p in chunk.items() if p.requires_grad}
        return not names <= self._slots.keys() if self.sharded else names != self._slots.keys()

    def main_grad(self, name: str) -> Tensor:
        """Return the gradient view of parameter `name`, in its local shape; zero at first."""
        slot = self._slots[name]
        slot.fill()
        return slot.main_grad

    def add(self, name: str, grad: Tensor) -> None:
        """Add a gradient of parameter `name` to its view; the first one of a window is copied."""
        self._slots[name].add(grad)

    def add_product(self, name: str, grad: Tensor, x: Tensor) -> None:
        """Add grad^T x to the gradient of weight `name`: (..., out), (..., in) -> (out, in)."""
        slot = self._slots[name]
        slot.add_product(grad, x)
        slot.summed = False  # the caller says itself when it has arrived

    def gradients(self) -> dict[str, Tensor]:
        """Return the gradient views of parameters that got one; after `finish`, on any replica.

        They are whole, or after `finish` with `sharded` flat and the own part only.
        """
        return {
            name: slot.own_grad if self.sharded else slot.main_grad
            for name, slot in self._slots.items()
            if slot.received
        }

    # ------------------------------------------------------------------ one window

    def reset(self) -> None:
        """Begin an accumulation window: no gradient has come and none is published."""
        self._queue.reset()
        self.withdraw()  # autograd would add to a published view in place, and the hook once more
        for slot in self._slots.values():
            slot.received = slot.filled = slot.summed = False
        self._tell_layers()

    def serve(self, layers: Iterable[nn.Module]) -> None:
        """Let layers add the gradients of their `weight` here themselves, from the next `reset` on.

        They have an attribute `sums_weight_gradient`, which says whether they do, and a
        `weight_sink`, which may be asked first.
        """
        self._layers = list(layers)

    def _tell_layers(self) -> None:
        slots = {id(slot.parameter): slot for slot in self._slots.values()}
        for layer in self._layers:
            slot = slots.get(id(layer.weight))
            # Hooks on the gradient itself are autograd's business.
            sums = slot is not None and not slot.parameter._backward_hooks
            if layer.sums_weight_gradient is not sums:  # setting an attribute of a module is slow
                layer.sums_weight_gradient = sums
            if slot is not None:
                sink = layer.weight_sink
                if sink is not None and sink.in_regions:
                    slot.put_off = sink.defer
                announce(slot)

    def begin_run(self) -> None:
        """Before a batch of the window: take away what a hook may have left in `grad`."""
        self.withdraw()

    def end_run(self) -> None:
        """After a batch: sums are in the buffers."""

    def arm(self, chunk: int = 0, names: Collection[str] | None = None) -> None:
        """Say that the next backward pass of `chunk` is its last one: buckets start when filled.

        `names`: the parameters whose gradients that pass brings, where others have theirs already
        (a weight-gradient pass); None: all.
        """
        self._queue.arm(chunk, names)

    def launch_rest(self) -> None:
        """After the last backward pass of a window: start the buckets that it didn't fill here.

        On another replica they may have started already, and collectives of one group must come in
        one order on all ranks: nothing else may use the group before this.
        """
        if not self._queue.overlap:
            return
        self._queue.launch_rest()
        if self.on_launched is not None:
            self.on_launched()

    def summed_later(self) -> set[str]:
        """Names of the gradients that `sum` still changes when their bucket is reduced."""
        names = {slot.name for slot in self._partial_slots()} if self._mesh.tp.size > 1 else set()
        return names | {slot.name for slot in self._tied_slots()}

    def arrived(self, name: str) -> None:
        """Say that this pass' gradient of `name` is in its view (ops that add there in place)."""
        slot = self._slots[name]
        slot.received = True
        slot.check_open()
        self._queue.arrived(slot)

    def finish(self, weight: Tensor | float) -> None:
        """Complete the window: sum over replicas, tensor ranks and tied copies, divide by `weight`.

        `weight` is the global weight of the window, equal on all ranks: its token count, or its
        number of micro-batches over all replicas. With weight 0 the gradients stay as they are:
        zero.
        """
        self.sum()
        divisor = scalar(weight, self._mesh.device, self._dtype)
        divisor = torch.where(divisor == 0, torch.ones_like(divisor), divisor)
        if self._mesh.device.type == "cuda":
            self.scale(divisor.reciprocal())
        elif self.buckets:
            torch._foreach_div_([bucket.own for bucket in self.buckets], divisor)

    def scale(self, factor: Tensor) -> None:
        """Multiply what `sum` gave by a 0-dim tensor."""
        scale_tensors_([bucket.own for bucket in self.buckets], factor)

    def sum(self) -> None:
        """Complete the window but for the division: sum over replicas, tensor ranks, tied
        copies.
        """
        self._queue.launch_rest()
        self._queue.join_streams()
        self._agree_on_received()
        self._queue.wait()
        sum_gradients(self._partial_slots(), self._mesh.tp)
        sum_gradients(self._tied_slots(), self._mesh.axis("edges"))

    def publish(self, *, in_parameter_dtype: bool = False) -> None:
        """Make each parameter's `grad` its main gradient; None where no replica got one.

        `grad` is the view itself, float32 also for bfloat16 parameters, so hooks and clipping act
        on what the optimizer reads. With `in_parameter_dtype` it is a copy in the parameter's
        dtype, for optimizers that work directly on low-precision parameters. With `sharded` no
        rank has the whole gradient and `grad` stays None: `optim.distributed` gives the own parts
        to what the optimizer updates.
        """
        for slot in self._slots.values() if not self.sharded else ():
            grad = slot.main_grad
            if in_parameter_dtype:
                grad = grad.to(slot.parameter.dtype)
            slot.parameter.grad = grad if slot.received else None

    def withdraw(self) -> None:
        """Take every `grad` away again."""
        for slot in self._slots.values():
            slot.parameter.grad = None

    # ------------------------------------------------------------------ building

    def rebuild(self) -> None:
        """Make buckets for what requires gradients now; between windows, on every rank."""
        if not self.sharded:
            self.release()
        self._build()
        self.reset()

    def release(self) -> None:
        """Remove all hooks and drop the buffers."""
        for handle in self._handles:
            handle.remove()
        for slot in self._slots.values():
            slot.parameter.grad = None
            slot.parameter.grad_dtype = slot.parameter.dtype
        self._handles, self._slots, self._buffers = [], {}, []
        self._queue.clear()
        for layer in self._layers:
            layer.sums_weight_gradient = False

    def _build(self) -> None:
        for buffer, slots in self._layout.lay_out(self._chunks, self._slots):
            self._add_buffer(buffer, slots)
        missing = [n for n, s in self._slots.items() if s.info.tied_copy and n not in self._tied]
        assert not missing or self._mesh.pp.size == 1, f"tied={self._tied} must name {missing}"

    def _add_buffer(self, buffer: Tensor, slots: Sequence[Slot]) -> None:
        self._buffers.append(buffer)
        self._queue.extend(dict.fromkeys(slot.bucket for slot in slots))
        for slot in slots:
            self._slots[slot.name] = slot
            slot.parameter.grad_dtype = None  # any: autograd's own, then that of main gradients
            hook = slot.parameter.register_post_accumulate_grad_hook(self._hook(slot))
            self._handles.append(hook)

    def _hook(self, slot: Slot) -> Callable[[Tensor], None]:
        def accumulate(parameter: Tensor) -> None:
            # Autograd calls hooks also where no gradient has come.
            summed, slot.summed = slot.summed, False
            if parameter.grad is not None:
                grad, parameter.grad = parameter.grad.detach(), None
                self.add(slot.name, grad)
                summed = True
            if summed:
                self.arrived(slot.name)

        return accumulate

    # ------------------------------------------------------------------ reducing

    def _agree_on_received(self) -> None:
        slots = list(self._slots.values())
        agree_on_received(slots, self._mesh.dp_cp)
        experts = [slot for slot in slots if slot.info.expert]
        agree_on_received(experts, self._mesh.axis("edp"))
        agree_on_received(self._tied_slots(), self._mesh.axis("edges"))

    def _partial_slots(self) -> list[Slot]:
        return [
            slot
            for slot in self._slots.values()
            if is_tensor_partial(slot.info, sequence_parallel=self._sequence_parallel)
        ]

    def _tied_slots(self) -> list[Slot]:
        # A frozen tied parameter has no slot, on either stage.
        return [self._slots[name] for name in self._tied if name in self._slots]
