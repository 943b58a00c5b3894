"""Fully sharded parameters (`parallel.fsdp`) within a cut model: what is a unit, and how a pipeline
chunk is entered through the hooks that gather it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, register_fsdp_forward_method
from torch.utils._pytree import tree_leaves

from megatron_lightning.config.parallel import ParallelConfig
from megatron_lightning.config.plan import ParallelPlan
from megatron_lightning.parallel.frozen_units import FrozenUnits
from megatron_lightning.parallel.fsdp import (
    ShardOptions,
    data_mesh,
    is_sharded_over,
)
from megatron_lightning.parallel.mesh import ParallelMesh
from megatron_lightning.runtime.model import ParallelModel

ENTRY = "run_chunk"
"""Attribute of a chunk's network: the method that a pipelined run calls it by."""


def shard_options(
    mesh: ParallelMesh,
    config: ParallelConfig,
    params_dtype: torch.dtype | None,
    main_params_dtype: torch.dtype | None,
) -> ShardOptions | None:
    """How parameters are sharded; None where they aren't: another choice, or one data rank."""
    if config.data_parallel.sharding != "fsdp" or not is_sharded_over(mesh):
        return None
    return ShardOptions(
        mesh=data_mesh(mesh),
        expert_mesh=data_mesh(mesh, "edp") if config.folds_experts else None,
        reshard_after_forward=config.data_parallel.reshard_after_forward,
        compute_dtype=params_dtype,
        storage_dtype=main_params_dtype,
    )


def layers_of(network: nn.Module, plan: ParallelPlan) -> list[tuple[str, nn.Module]]:
    """(path, module) of the layers that are here. Empty where the plan names none: the network is
    one unit then.
    """
    if plan.layers is not None:
        here = dict(network.named_modules())
        containers = {path: here.get(path) for path in (plan.layers, *plan.further_layers)}
        return [
            (f"{path}.{name}", layer)
            for path, container in containers.items()
            if container is not None
            for name, layer in container.named_children()
        ]
    return list(network.named_children()) if isinstance(network, nn.Sequential) else []


class ChunkOutputs:
    """What the sharded modules of a chunk, or else its network, give while this context lasts:
    tensors with a gradient.

    The data ranks run the same collectives in their backward passes, so a rank whose step has no
    loss still has to go through its own, with gradients of zero.
    """

    def __init__(self, model: ParallelModel, chunk: int) -> None:
        self._model = model
        roots: Sequence[Any] = model.sharded_roots[chunk] if model.sharded_roots else ()
        self._roots: Sequence[Any] = roots or (model.networks[chunk],)
        self._handles: list[Any] = []
        self._tensors: list[Tensor] = []

    def __enter__(self) -> Self:
        """Watch the modules."""
        self._handles = [
            root.register_forward_hook(lambda _, __, output: self._note(output))
            for root in self._roots
        ]
        if self._model.pipelined is not None:
            self._model.pipelined.on_output = self._note
        return self

    def __exit__(self, *_: object) -> None:
        """Leave them alone."""
        for handle in self._handles:
            handle.remove()
        if self._model.pipelined is not None:
            self._model.pipelined.on_output = None

    def _note(self, output: Any) -> None:
        leaves = tree_leaves(output)
        self._tensors += [t for t in leaves if isinstance(t, Tensor) and t.requires_grad]

    def zero(self) -> Tensor:
        """A scalar that depends on all of them with gradients of zero. ValueError where there are
        none.
        """
        if not self._tensors:
            raise ValueError(
                "training_step returned None without a call of the network: with"
                " data_parallel.sharding='fsdp' or expert parallelism all data ranks have to call"
                " it, since they gather parameters, or pass tokens through experts, together; call"
                " it and return None afterwards, or mask the loss"
            )
        return torch.stack([(tensor * 0).sum().float() for tensor in self._tensors]).sum()


def enter_sharded(model: ParallelModel, roots: Sequence[tuple[FSDPModule, ...]]) -> None:
    """Note the sharded modules of each chunk, and enter pipeline chunks through their hooks.

    Chunks share no communication context (`share_comm_ctx`): the last backward of one would forget
    what others, whose last is still to come, prefetch by.
    """
    model.sharded_roots = tuple(roots)
    model.frozen_units = FrozenUnits(root for chunk in roots for root in chunk)
    if model.pipelined is None:
        return
    for chunk in model.pipelined.parts:
        network: Any = chunk.network
        setattr(network, ENTRY, chunk.run)
        register_fsdp_forward_method(network, ENTRY)
        chunk.entry = getattr(network, ENTRY)
