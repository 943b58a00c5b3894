"""What a checkpoint holds of this rank, under global names: its parts as boxes, and the rest as
objects.

`model.NAME`, `master.NAME` (float32 masters), `optimizer.I.KEY.NAME` and `quantization.NAME`; of a
tensor that is cut each rank has its box.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.optim import Optimizer

from megatron_lightning.config.plan import ParameterInfo, canonical_name
from megatron_lightning.runtime.boxes import box_of
from megatron_lightning.strategies.whole_module import ALIASES, aliases

if TYPE_CHECKING:
    from megatron_lightning.runtime.update import ParameterUpdate
    from megatron_lightning.strategies.checkpoint_strategy import CheckpointStrategy

MODEL, MASTER, OPTIMIZER = "model.", "master.", "optimizer."
QUANTIZATION = "quantization."
"""Largest values of past steps, by layer (delayed scaling)."""
GROUPS = "optimizer_param_groups"


def model_tensors(strategy: CheckpointStrategy) -> dict[str, Tensor]:
    """Parameters and persistent buffers that this rank holds, by canonical name."""
    module = strategy.lightning_module
    assert module is not None
    if strategy.update is not None:
        strategy.update.wait()
    tensors: dict[str, Tensor] = dict(strategy.parallel_model.parameters)
    parameter_names = {
        canonical_name(name) for name, _ in module.named_parameters(remove_duplicate=False)
    }
    for name, value in module.state_dict().items():
        canonical = canonical_name(name)
        if isinstance(value, Tensor) and canonical not in parameter_names:
            tensors[canonical] = value
    return tensors


def split(
    strategy: CheckpointStrategy, checkpoint: Mapping[str, Any]
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Weights by canonical name, and what is saved as objects."""
    objects = {k: v for k, v in checkpoint.items() if k not in ("state_dict", "optimizer_states")}
    # what a hook (on_save_checkpoint) left of the state dict counts, as everywhere in Lightning
    kept = checkpoint["state_dict"] if "state_dict" in checkpoint else model_tensors(strategy)
    weights = {canonical_name(n): v for n, v in kept.items() if isinstance(v, Tensor)}
    update = strategy.update if "optimizer_states" in checkpoint else None
    if update is not None:
        objects[GROUPS] = [_hyper_parameters(one) for one in update.optimizers]
    if further_names := aliases(strategy):
        objects[ALIASES] = further_names
    return weights, objects


def shared_tensors(
    strategy: CheckpointStrategy, weights: Mapping[str, Tensor], *, with_optimizer: bool
) -> dict[str, Tensor]:
    """What this rank adds to a checkpoint of all ranks: `tensors_to_save`, buffers from the first
    data-parallel replica alone. Those of others differ (statistics of batch norm), and the next
    forward pass replaces them by the first one's.
    """
    if strategy.mesh.dp_cp.rank != 0:
        parameters = strategy.parallel_model.parameters
        weights = {name: value for name, value in weights.items() if name in parameters}
    return tensors_to_save(strategy, weights, with_optimizer=with_optimizer)


def tensors_to_save(
    strategy: CheckpointStrategy, weights: Mapping[str, Tensor], *, with_optimizer: bool
) -> dict[str, Tensor]:
    """This rank's parts of what a checkpoint holds, by global name."""
    table = strategy.parallel_model.table
    dtypes = strategy.parallel_model.compute_dtypes
    tensors = {
        MODEL + name: boxed(value.to(dtypes.get(name, value.dtype)), table.get(name))
        for name, value in weights.items()
    }
    if with_optimizer:
        assert strategy.update is not None
        update = strategy.update
        update.take_writes(strategy.saves.before_update)
        left_out = strategy.parallel_model.parameters.keys() - weights.keys()
        tensors |= optimizer_tensors(update, materialise=False, without_masters=left_out)
        tensors |= histories(strategy)
    return tensors


def histories(strategy: CheckpointStrategy) -> dict[str, Tensor]:
    """Largest values of past steps, where scaling goes by them."""
    quantization = strategy.parallel_model.quantization
    if quantization is None or quantization.delayed is None:
        return {}
    found = quantization.delayed.tensors()
    return {f"{QUANTIZATION}{strategy.network_prefix}{n}": value for n, value in found.items()}


def boxed(value: Tensor, info: ParameterInfo | None) -> Tensor:
    """`value` as a box of the global tensor; a tensor without a table row is a replica of the
    whole.
    """
    return value if info is None else box_of(value, info)


def optimizer_tensors(
    update: ParameterUpdate, *, materialise: bool, without_masters: Collection[str] = ()
) -> dict[str, Tensor]:
    """Masters, but for those of `without_masters`, and optimizer state; with `materialise` also
    state that is yet to be made, to be loaded over.
    """
    tensors: dict[str, Tensor] = {}
    if update.has_masters:
        tensors |= {
            MASTER + name: update.box(name, value)
            for name, value in update.updated().items()
            if value.requires_grad and name not in without_masters  # frozen ones are the weights
        }
    for index, optimizer in enumerate(update.optimizers):
        for name, state in update.state_tensors(optimizer, materialise=materialise).items():
            for key, value in state.items():
                tensors[f"{OPTIMIZER}{index}.{key}.{name}"] = update.box(name, value)
    return tensors


def _hyper_parameters(optimizer: Optimizer) -> list[dict[str, Any]]:
    return [
        {key: value for key, value in group.items() if key != "params"}
        for group in optimizer.param_groups
    ]
