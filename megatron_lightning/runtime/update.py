"""From a window's gradients to updated parameters: reduce, publish, step, and give to all ranks.

What is updated, and how it lies on the ranks, is in `updated_parameters.py`; here is the order in
which a window and its step go about it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from megatron_lightning.checkpoint import BoxedTensor
from megatron_lightning.config.parallel import ParallelConfig
from megatron_lightning.optim.clip import global_grad_norm
from megatron_lightning.optim.shards import ParameterShards
from megatron_lightning.parallel.data import GradientBuckets
from megatron_lightning.parallel.mesh import ParallelMesh
from megatron_lightning.precision.policy import PrecisionPolicy
from megatron_lightning.runtime.folded_step import FoldedStep
from megatron_lightning.runtime.layer_gate import LayerGate
from megatron_lightning.runtime.model import ParallelModel
from megatron_lightning.runtime.tail_norms import TailNorms
from megatron_lightning.runtime.updated_parameters import UpdatedParameters
from megatron_lightning.runtime.weight_watch import WeightWatch


class ParameterUpdate(UpdatedParameters):
    """What a run's optimizers update, and how gradients get there.

    A window is: `open`, the runs of its batches, `reduce`, clipping and hooks, a step of the
    optimizers, `finish_step`. `defer` lets the gather of sharded parameters go on into the next
    forward pass; then every other reader of parameters calls `wait` first. `suspects`: classes of
    which hooks may write to weights.
    """

    def __init__(
        self,
        model: ParallelModel,
        mesh: ParallelMesh,
        config: ParallelConfig,
        policy: PrecisionPolicy,
        optimizers: Sequence[Optimizer],
        *,
        seed: int = 0,
        defer: bool = False,
        fold: bool = False,
        suspects: Sequence[str] = (),
    ) -> None:
        super().__init__(model, mesh, config, policy, optimizers, seed=seed)
        self._in_parameter_dtype = not policy.has_masters
        self._norm: Tensor | None = None
        self._has_loads: bool | Tensor = False
        """Whether the window had any weight, which the device may know alone."""
        copies = self._wants_masters or config.data_parallel.offload_optimizer
        self._watch = WeightWatch(
            model,
            mesh,
            self._holder,
            suspects=suspects if copies else (),
            agree=self._agree,
        )
        shards = self._holder if isinstance(self._holder, ParameterShards) else None
        self._gate: LayerGate | None = None
        if defer and shards is not None:
            self._gate = LayerGate(model, shards.wait)
        self._folded: FoldedStep | None = None
        if isinstance(model.buckets, GradientBuckets):
            self._folded = FoldedStep.of(
                self.optimizers,
                self._copies,
                mesh.device,
                fold=fold,
                stages=None if shards is None else shards.stages,
            )
        self._tail: TailNorms | None = None
        if self._folded is not None and isinstance(model.buckets, GradientBuckets):
            self._tail = TailNorms(model.buckets)

    # ------------------------------------------------------------------ one window

    def open(self) -> None:
        """Begin a window: zero gradients, and buckets for what is trainable now."""
        if self._tail is not None:
            self._tail.begin()
        buckets = self._model.buckets
        assert buckets is not None
        self._watch.open(self.optimizers, self.updated())
        stale = buckets.is_stale
        if stale:
            self.wait()
            buckets.rebuild()
        else:
            buckets.reset()
        self.adopt()  # a callback may have added a parameter group
        if stale and self.distributed is not None:
            buckets.reset()  # weights lie elsewhere now, and layers find their sums by that
        self._watch.follow()

    def begin_run(self) -> None:
        """Before the forward passes of a batch: take gradients away, and wait for parameters that
        are read before any layer.
        """
        assert self._model.buckets is not None
        self._model.buckets.begin_run()
        if self.distributed is not None:
            self.distributed.detach_gradients()
        self._norm = None
        if self._gate is not None:
            self._gate.begin()

    def end_run(self) -> None:
        """After the passes of a batch: put gradients where zeroing doesn't reach them."""
        assert self._model.buckets is not None
        self._model.buckets.end_run()

    def reduce(self, weight: Tensor | float) -> bool:
        """Sum the window's gradients, divide by `weight` and publish them; False, and none
        published, where the weight is 0.

        Where the optimizer's step is folded, the host doesn't know the weight yet: gradients are
        published in any case, the step leaves everything as it is on the device, and it is a later
        window that gives False.
        """
        buckets = self._model.buckets
        assert buckets is not None
        if self._model.quantization is not None:
            self._model.quantization.finish_window()
        empty = False
        self._has_loads = True
        if self._folded is not None:
            assert isinstance(buckets, GradientBuckets)
            self._folded.reduce(buckets, weight)
            empty = self._folded.heard_of_empty_window()
            self._has_loads = self._folded.active
        else:
            buckets.finish(weight)
            if float(weight) == 0:
                buckets.withdraw()
                self._has_loads = False
                return False
        buckets.publish(in_parameter_dtype=self._in_parameter_dtype)
        self.attach_gradients()
        return not empty

    def fold(self, factor: Tensor) -> bool:
        """Let gradients be multiplied by `factor` in the optimizer's step; False where they must be
        at once.
        """
        return self._folded is not None and self._folded.fold(factor)

    def before_step(self) -> None:
        """Right before the optimizer's step, after clipping."""
        self._watch.before_step()
        if self._folded is not None:
            self._folded.before_step()

    def finish_step(self, step: int) -> None:
        """After the optimizer's step: give what was updated to the model and to all ranks."""
        if self._model.expert_balance is not None:
            self._model.expert_balance.finish_window(follow=self._has_loads)
        self._has_loads = False
        rounded = self._folded is not None and self._folded.is_rounded
        self.hand_out(step, wait=self._gate is None, rounded=rounded)
        self._watch.finish_step()
        if self._folded is not None:
            self._folded.finish()

    # ------------------------------------------------------------------ what is there

    def gradients(self) -> dict[str, Tensor]:
        """Return what is published of the gradients on this rank: whole local tensors, or flat
        parts.
        """
        if self._folded is not None:
            self._folded.settle()
        return self._published()

    def _published(self) -> dict[str, Tensor]:
        return {name: p.grad for name, p in self.updated().items() if p.grad is not None}

    def gradient_boxes(self) -> dict[str, BoxedTensor]:
        """Return the published gradients as boxes of the global tensors, by canonical name."""
        return {
            name: BoxedTensor.of(self.box(name, grad)) for name, grad in self.gradients().items()
        }

    def grad_norm(self) -> Tensor:
        """Global L2 norm of the published gradients, a 0-dim tensor equal on all ranks. All ranks
        must call it.
        """
        if self._norm is None:
            unscaled = self._folded is not None and self._folded.factor is not None
            if self._tail is not None:
                self._tail.asked(unchanged=unscaled)
            self._norm = global_grad_norm(
                self._published(),
                self._model.table,
                self._mesh,
                sharded=self.distributed is not None,
                known=self._tail.norms if self._tail is not None and unscaled else None,
            )
            if self._folded is not None and self._folded.factor is not None:
                self._norm = self._norm * self._folded.factor.abs()
        return self._norm

    def gradients_are_finite(self) -> bool:
        """Whether all published gradients are finite, equal on all ranks. All ranks must call it;
        waits for the device.
        """
        norm = self.grad_norm()
        self._norm = None  # hooks may still change gradients
        return bool(torch.isfinite(norm))

    @override
    def take_gradients(self) -> None:
        self._norm = None
        self._has_loads = True
        super().take_gradients()

    # ------------------------------------------------------------------ what user code does

    def remember_weights(self) -> None:
        """Note what weights are, now that masters are as they are meant to be. All ranks must call
        it.
        """
        self._watch.remember()

    def take_changes(self) -> None:
        """Before the first batch: take for masters what hooks have made of weights meanwhile. All
        ranks must call it; it waits for the device, once.
        """
        self._watch.take_changes()

    def take_writes(self, before: Callable[[], None] = lambda: None) -> None:
        """Take for masters what user code has written to weights since these were last made of
        them; `before` is called first if there is any.
        """
        self._watch.take_writes(before)

    # ------------------------------------------------------------------ end

    @override
    def close(self, *, wait: bool = True) -> None:
        if wait:
            self.take_writes()
        self._watch.end()
        if self._gate is not None:
            self._gate.detach()
        if self._folded is not None:
            self._folded.release()
        super().close(wait=wait)

    @override
    def release(self) -> None:
        if self._folded is not None:
            self._folded.release()
        super().release()
