"""What a run's optimizers update, and what a checkpoint holds of it: the parameters themselves,
masters of them (`precision.masters`), or this rank's parts of either (`optim.distributed`).

Which of these it is stands here alone. All are known by canonical names, and each has its place in
the global tensor of that name.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from megatron_lightning.config.parallel import ParallelConfig
from megatron_lightning.optim.distributed import DistributedOptimizer
from megatron_lightning.optim.local_parts import LocalParts
from megatron_lightning.optim.shards import ParameterShards
from megatron_lightning.parallel.collectives import all_reduce_
from megatron_lightning.parallel.mesh import ParallelMesh
from megatron_lightning.parallel.sharded_gradients import ShardedGradients
from megatron_lightning.precision.masters import MasterParameters
from megatron_lightning.precision.policy import PrecisionPolicy
from megatron_lightning.precision.state import discard_state, optimizer_state_tensors
from megatron_lightning.runtime.boxes import box_of, box_of_part, box_of_shard
from megatron_lightning.runtime.model import ParallelModel

MOMENTS = {"float32": None, "bfloat16": torch.bfloat16}


class UpdatedParameters:
    """What the optimizers of a run update. They keep their identity, and so do their groups; only
    the parameters listed in these are exchanged.
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
    ) -> None:
        self._model = model
        self._mesh = mesh
        self.optimizers = list(optimizers)
        self.masters: MasterParameters | None = None
        self.distributed: DistributedOptimizer | None = None
        self._wants_masters = model.plan is not None and policy.has_masters
        shards = self._shards(config, policy)
        if shards is not None:
            self.distributed = DistributedOptimizer(
                optimizers,
                shards,
                model.parameters,
                moments_dtype=MOMENTS[config.data_parallel.moments_dtype],
                seed=seed,
            )
        elif self._wants_masters:
            self.masters = MasterParameters(
                self.optimizers,
                model.parameters,
                dtype=policy.main_params_dtype,
                initial=model.initial_values,
                agree=self._agree,
            )

    def _shards(
        self, config: ParallelConfig, policy: PrecisionPolicy
    ) -> ParameterShards | LocalParts | None:
        """Parts of parameters that this rank updates; None where it updates them whole."""
        model = self._model
        if isinstance(model.buckets, ShardedGradients):
            return LocalParts(
                model.parameters,
                rounded=policy.params_dtype if self._wants_masters else None,
                initial=model.initial_values,
                agree=self._agree,
            )
        if config.data_parallel.sharding != "optimizer" or model.buckets is None:
            return None
        return ParameterShards(
            model.buckets,
            dtype=policy.main_params_dtype if self._wants_masters else None,
            offload=config.data_parallel.offload_optimizer,
            fp8=() if model.quantization is None else model.quantization.gathered,
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

    @property
    def _holder(self) -> ParameterShards | LocalParts | MasterParameters | None:
        """What has them, if they are not the parameters themselves."""
        return self.masters if self.distributed is None else self.distributed.shards

    def _copies(self) -> Mapping[Parameter, Tensor]:
        """The weight, or part of one, that each master is rounded to."""
        if self.distributed is not None:
            return self.distributed.shards.copies()
        return {} if self.masters is None else self.masters.copies()

    # ------------------------------------------------------------------ one step

    def adopt(self) -> None:
        """Take in what was added to the optimizers, or unfrozen, since."""
        if self.distributed is not None:
            self.distributed.adopt()
        elif self.masters is not None:
            self.masters.adopt()

    def attach_gradients(self) -> None:
        """Give published gradients to what is updated."""
        if self.distributed is not None:
            self.distributed.attach_gradients()
        elif self.masters is not None:
            self.masters.attach_gradients()

    def take_gradients(self) -> None:
        """After a backward under manual optimization: hand gradients to masters."""
        if self.masters is not None:
            self.masters.take_gradients()

    def hand_out(self, step: int, *, wait: bool, rounded: bool) -> None:
        """After the optimizer's step: give what was updated to the model and to all ranks. Without
        `wait` a gather goes on; `rounded`: the step has rounded the model's copies itself.
        """
        if self.distributed is not None:
            self.distributed.finish_step(step, wait=wait, rounded=rounded)
        elif self.masters is not None:
            if not rounded:
                self.masters.copy_to_model()
            if self._model.buckets is not None:
                self.masters.detach_gradients()

    def wait(self) -> None:
        """Wait until parameters may be read."""
        if self.distributed is not None:
            self.distributed.shards.wait()

    # ------------------------------------------------------------------ what is there

    def updated(self) -> Mapping[str, Tensor]:
        """Return what the optimizers update, by canonical name, with `box` for its place."""
        if self.distributed is not None:
            return self.distributed.shards.parts()
        return self._model.parameters if self.masters is None else self.masters.named_masters()

    def carriers(self) -> Mapping[str, Tensor]:
        """Return what carries published gradients until they are zeroed, by name."""
        return self._model.parameters if self.distributed is None else self.updated()

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

    def close(self, *, wait: bool = True) -> None:
        """End training; what is updated can still be saved. Without `wait` (after a failure, when
        other ranks may have left) values of parameters may be old.
        """
        if self.distributed is not None:
            self.distributed.shards.close(wait=wait)

    def release(self) -> None:
        """Give parameters memory of their own again; nothing is left to be saved."""
        if self.distributed is not None:
            self.distributed.shards.release()
