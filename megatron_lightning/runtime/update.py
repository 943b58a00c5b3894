"""From a window's gradients to updated parameters: reduce, publish, step, and give to all ranks.

One object for the strategy, whatever is sharded over the data axis: masters of whole parameters
(`precision.masters`), or parts of parameters (`optim.distributed`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from megatron_lightning.checkpoint import BoxedTensor
from megatron_lightning.config.parallel import ParallelConfig
from megatron_lightning.optim.clip import global_grad_norm
from megatron_lightning.optim.distributed import DistributedOptimizer
from megatron_lightning.optim.local_parts import LocalParts
from megatron_lightning.optim.shards import ParameterShards
from megatron_lightning.parallel.collectives import all_reduce_
from megatron_lightning.parallel.data import GradientBuckets
from megatron_lightning.parallel.fsdp import ShardedGradients
from megatron_lightning.parallel.mesh import ParallelMesh
from megatron_lightning.precision.masters import MasterParameters
from megatron_lightning.precision.policy import PrecisionPolicy
from megatron_lightning.precision.state import discard_state, optimizer_state_tensors
from megatron_lightning.runtime.boxes import box_of, box_of_part, box_of_shard
from megatron_lightning.runtime.folded_step import FoldedStep
from megatron_lightning.runtime.layer_gate import LayerGate
from megatron_lightning.runtime.model import ParallelModel
from megatron_lightning.runtime.tail_norms import TailNorms
from megatron_lightning.runtime.weight_watch import WeightWatch

MOMENTS = {"float32": None, "bfloat16": torch.bfloat16}


class ParameterUpdate:
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
        self._model = model
        self._mesh = mesh
        self._in_parameter_dtype = not policy.has_masters
        self._norm: Tensor | None = None
        self._has_loads: bool | Tensor = False
        """Whether the window had any weight, which the device may know alone."""
        self.optimizers = list(optimizers)
        self.masters: MasterParameters | None = None
        self.distributed: DistributedOptimizer | None = None
        has_masters = model.plan is not None and policy.has_masters
        shards = self._shards(config, policy, has_masters=has_masters)
        if shards is not None:
            self.distributed = DistributedOptimizer(
                optimizers,
                shards,
                model.parameters,
                moments_dtype=MOMENTS[config.data_parallel.moments_dtype],
                seed=seed,
            )
        elif has_masters:
            self.masters = MasterParameters(
                self.optimizers,
                model.parameters,
                dtype=policy.main_params_dtype,
                initial=model.initial_values,
                agree=self._agree,
            )
        copies = has_masters or config.data_parallel.offload_optimizer
        self._watch = WeightWatch(
            model,
            mesh,
            shards if shards is not None else self.masters,
            suspects=suspects if copies else (),
            agree=self._agree,
        )
        self._gate: LayerGate | None = None
        if defer and isinstance(shards, ParameterShards):
            self._gate = LayerGate(model, shards.wait)
        self._folded: FoldedStep | None = None
        if isinstance(model.buckets, GradientBuckets):
            self._folded = FoldedStep.of(
                self.optimizers,
                self._copies,
                mesh.device,
                fold=fold,
                stages=shards.stages if isinstance(shards, ParameterShards) else None,
            )
        self._tail: TailNorms | None = None
        if self._folded is not None and isinstance(model.buckets, GradientBuckets):
            self._tail = TailNorms(model.buckets)

    def _shards(
        self, config: ParallelConfig, policy: PrecisionPolicy, *, has_masters: bool
    ) -> ParameterShards | LocalParts | None:
        """Parts of parameters that this rank updates; None where it updates them whole."""
        model = self._model
        if isinstance(model.buckets, ShardedGradients):
            return LocalParts(
                model.parameters,
                rounded=policy.params_dtype if has_masters else None,
                initial=model.initial_values,
                agree=self._agree,
            )
        if config.data_parallel.sharding != "optimizer" or model.buckets is None:
            return None
        return ParameterShards(
            model.buckets,
            dtype=policy.main_params_dtype if has_masters else None,
            offload=config.data_parallel.offload_optimizer,
            fp8=() if model.quantization is None else model.quantization.gathered,
            tensor=self._mesh.tp,
            initial=model.initial_values,
            agree=self._agree,
        )

    def _agree(self, verdicts: Tensor) -> None:
        """The least of all ranks that hold parts of this stage's parameters."""
        over = [self._mesh.axis("ep_etp"), self._mesh.tp]
        if isinstance(self._model.buckets, ShardedGradients):
            over.append(self._mesh.dp_cp)
        axes = {axis.ranks: axis for axis in over}
        for axis in axes.values():
            all_reduce_(verdicts, axis, "min")

    def _copies(self) -> Mapping[Parameter, Tensor]:
        """The weight, or part of one, that each master is rounded to."""
        if self.distributed is not None:
            return self.distributed.shards.copies()
        return {} if self.masters is None else self.masters.copies()

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
        if self.distributed is not None:  # a callback may have added a parameter group
            self.distributed.adopt()
            if stale:
                buckets.reset()  # weights lie elsewhere now, and layers find their sums by that
        elif self.masters is not None:
            self.masters.adopt()
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
        if self.distributed is not None:
            self.distributed.attach_gradients()
        elif self.masters is not None:
            self.masters.attach_gradients()
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
        if self.distributed is not None:
            self.distributed.finish_step(step, wait=self._gate is None, rounded=rounded)
        elif self.masters is not None:
            if not rounded:
                self.masters.copy_to_model()
            if self._model.buckets is not None:
                self.masters.detach_gradients()
        self._watch.finish_step()
        if self._folded is not None:
            self._folded.finish()

    def wait(self) -> None:
        """Wait until parameters may be read."""
        if self.distributed is not None:
            self.distributed.shards.wait()

    # ------------------------------------------------------------------ what is there

    def carriers(self) -> Mapping[str, Tensor]:
        """Return what carries published gradients until they are zeroed, by name."""
        return self._model.parameters if self.distributed is None else self.updated()

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

    def take_gradients(self) -> None:
        """After a backward under manual optimization: hand gradients to masters."""
        self._norm = None
        self._has_loads = True
        if self.masters is not None:
            self.masters.take_gradients()

    def updated(self) -> Mapping[str, Tensor]:
        """Return what the optimizers update, by canonical name, with `box` for its place."""
        if self.distributed is not None:
            return self.distributed.shards.parts()
        return self._model.parameters if self.masters is None else self.masters.named_masters()

    @property
    def has_masters(self) -> bool:
        """True when what is updated holds more than the model's parameters."""
        if self.distributed is not None:
            return self.distributed.shards.has_masters
        return self.masters is not None

    def box(self, name: str, value: Tensor) -> Tensor:
        """Return `value` (a master, gradient or state of parameter `name`) as boxes of the global
        tensor; 0-dim values as they are.
        """
        info = self._model.table[name]
        if self.distributed is None:
            return box_of(value, info)
        shards = self.distributed.shards
        if isinstance(shards, LocalParts):
            return box_of_shard(value, shards.begins[name], info)
        start, _ = shards.ranges[name]
        return box_of_part(value, self._model.parameters[name].shape, start, info)

    def state_tensors(
        self, optimizer: Optimizer, *, materialise: bool
    ) -> dict[str, dict[str, Tensor]]:
        """Return {name: {state key: tensor}} of one optimizer; see `optimizer_state_tensors`."""
        if self.distributed is not None:
            return self.distributed.state_tensors(optimizer, materialise=materialise)
        updated: Any = self.updated()
        return optimizer_state_tensors(optimizer, updated, materialise=materialise)

    def discard_state(self, optimizer: Optimizer, names: Iterable[str]) -> None:
        """Forget the optimizer state of parameters `names`."""
        updated: Any = self.updated()
        discard_state(optimizer, [updated[name] for name in names if name in updated])

    def copy_from_model(self) -> None:
        """Take the model's weights for masters."""
        if self.distributed is not None:
            self.distributed.shards.copy_from_model()
        elif self.masters is not None:
            self.masters.copy_from_model()

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

    def close(self, *, wait: bool = True) -> None:
        """End training; what is updated can still be saved. Without `wait` (after a failure, when
        other ranks may have left) values of parameters may be old.
        """
        if wait:
            self.take_writes()
        self._watch.end()
        if self._gate is not None:
            self._gate.detach()
        if self._folded is not None:
            self._folded.release()
        if self.distributed is not None:
            self.distributed.shards.close(wait=wait)

    def release(self) -> None:
        """Give parameters memory of their own again; nothing is left to be saved."""
        if self._folded is not None:
            self._folded.release()
        if self.distributed is not None:
            self.distributed.shards.release()
