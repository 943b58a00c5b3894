"""Between Lightning's checkpoint dictionary and the checkpoint folder of this package.

Tensors go under global names, each rank's part as a box (`checkpoint_tensors.py`). Everything else
that Lightning collects (loops, callbacks, schedulers, data position, hyper-parameters) goes as
tagged JSON, from rank 0. No pickle is read or written.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.optim import Optimizer

import megatron_lightning.checkpoint as store
from megatron_lightning.checkpoint.config_codec import CODEC
from megatron_lightning.checkpoint.manifest import MANIFEST_FILE
from megatron_lightning.checkpoint.parts import is_part
from megatron_lightning.checkpoint.ranks import ALONE
from megatron_lightning.strategies import random_states
from megatron_lightning.strategies.checkpoint_tensors import (
    GROUPS,
    MASTER,
    MODEL,
    OPTIMIZER,
    QUANTIZATION,
    boxed,
    histories,
    model_tensors,
    optimizer_tensors,
    shared_tensors,
    split,
)
from megatron_lightning.utils.logging import get_logger, warn_once

if TYPE_CHECKING:
    from megatron_lightning.runtime.update import ParameterUpdate
    from megatron_lightning.strategies.checkpoint_strategy import CheckpointStrategy

KERNEL_OPTIONS = ("foreach", "fused", "capturable")
"""Options of a parameter group that belong to the device at hand, not to the training."""


def save(
    strategy: CheckpointStrategy, checkpoint: dict[str, Any], filepath: Any, storage_options: Any
) -> None:
    """Write `checkpoint` to the folder `filepath`, in the background if asked for. All ranks call
    it; errors are raised on all of them.
    """
    if storage_options is not None:
        raise TypeError(
            "save_checkpoint(storage_options=...): this strategy writes folders itself and takes "
            "no options"
        )
    weights, objects = split(strategy, checkpoint)
    tensors = shared_tensors(strategy, weights, with_optimizer=GROUPS in objects)
    metadata = {"global_step": checkpoint.get("global_step"), "layout": strategy.mesh.describe()}
    whole = GROUPS in objects
    own = random_states.collect(strategy.mesh.rank, strategy.root_device) if whole else {}
    strategy.saves.save(filepath, tensors, objects, metadata, weights, own)


def load(strategy: CheckpointStrategy, path: Any) -> dict[str, Any]:
    """Put weights and, when fitting, optimizer state in place; return the rest for Lightning."""
    folder = Path(path)
    objects = store.load_objects(folder, codec=CODEC)
    stored = store.list_tensors(folder)
    _load_model(
        strategy,
        folder,
        with_masters=any(name.startswith(MASTER) for name in stored),
        elsewhere=_elsewhere(strategy, objects),
    )
    groups = objects.pop(GROUPS, None)
    if strategy.optimizers and groups is not None:
        _load_hyper_parameters(strategy.optimizers, groups, folder)
        _load_optimizer(strategy, folder)
        _load_histories(strategy, folder)
        strategy.generators.resume(
            folder, strategy.mesh.rank, strategy.mesh.world_size, strategy.root_device
        )
    elif strategy.update is not None:
        strategy.update.copy_from_model()
        _masters_from_weights(strategy, strategy.update, folder, strategy.update.updated())
    if strategy.update is not None:
        strategy.update.remember_weights()
    return {**objects, "state_dict": model_tensors(strategy), "optimizer_states": []}


def _readers_of(folder: Path, strategy: CheckpointStrategy) -> Any:
    """Who reads a checkpoint: all ranks together, or each its own part (`checkpoint.local`)."""
    return ALONE if is_part(folder) else strategy.mesh.control_group


def check_loaded(strategy: CheckpointStrategy, checkpoint: Mapping[str, Any]) -> None:
    """Refuse a hook that has changed what is to be loaded: it is in place already."""
    given, loaded = checkpoint["state_dict"], model_tensors(strategy)
    changed = [
        name
        for name, value in given.items()
        if name not in loaded or value.data_ptr() != loaded[name].data_ptr()
    ]
    changed += [name for name in loaded if name not in given]
    if changed:
        raise ValueError(
            f"on_load_checkpoint: the state dict was changed ({changed[:3]}), but each rank has "
            f"read its part of the weights into place before; change tensors in place, or load the "
            f"checkpoint with load_weights and edit the module"
        )


def remove(strategy: CheckpointStrategy, filepath: Any) -> None:
    """Delete a checkpoint, on rank 0, once a save that is under way, which may replace it, is
    committed.
    """
    if strategy.is_global_zero:
        strategy.saves.after_commit(lambda: _remove(strategy, Path(filepath)))


def _remove(strategy: CheckpointStrategy, path: Path) -> None:
    if (path / MANIFEST_FILE).is_file():
        strategy.saves.delete(path)
    elif path.is_dir():
        get_logger(__name__).warning("%s is not a checkpoint of this package; not removed", path)
    else:
        strategy.checkpoint_io.remove_checkpoint(path)


def _elsewhere(strategy: CheckpointStrategy, objects: Mapping[str, Any]) -> frozenset[str]:
    """Parameters that a checkpoint leaves to what the module was made of (adapters alone)."""
    module: Any = strategy.lightning_module
    return module.names_elsewhere(objects) if hasattr(module, "names_elsewhere") else frozenset()


def _load_model(
    strategy: CheckpointStrategy, folder: Path, *, with_masters: bool, elsewhere: frozenset[str]
) -> None:
    strategy.parallel_model.reshard()
    table = strategy.parallel_model.table
    group = _readers_of(folder, strategy)
    tensors = {
        MODEL + name: boxed(value, table.get(name))
        for name, value in model_tensors(strategy).items()
        if name not in elsewhere
    }
    module = strategy.lightning_module
    assert module is not None
    report = store.load(
        folder,
        tensors,
        strict="all" if module.strict_loading else "none",
        scope=MODEL,
        process_group=group,
    )
    if report.mismatched:  # strict_loading=False is about names, as in torch
        raise ValueError(f"{folder}: shape or dtype differs for {list(report.mismatched)[:3]}")
    update = strategy.update
    if with_masters and (update is None or not update.has_masters):
        # float32 weights of a bfloat16 run: take the masters, which hold more than the rounded
        # weights
        exact = {
            MASTER + name: boxed(value, table[name])
            for name, value in strategy.parallel_model.parameters.items()
            if value.dtype == torch.float32
        }
        store.load(folder, exact, strict="none", scope=MASTER, process_group=group)


def _load_optimizer(strategy: CheckpointStrategy, folder: Path) -> None:
    update = strategy.update
    assert update is not None
    tensors = optimizer_tensors(update, materialise=True)
    report = store.load(
        folder,
        tensors,
        strict="missing_ok",
        scope=(MASTER, OPTIMIZER),
        process_group=_readers_of(folder, strategy),
    )
    if not update.has_masters:
        update.copy_from_model()
    elif without := {n.removeprefix(MASTER) for n in report.missing if n.startswith(MASTER)}:
        _masters_from_weights(strategy, update, folder, without)
    fresh = [name for name in report.missing if name.startswith(OPTIMIZER)]
    if fresh:
        warn_once(
            f"{folder}: no optimizer state for {len(fresh)} tensors, first {fresh[0]!r}; they "
            f"begin afresh"
        )
    for index, optimizer in enumerate(strategy.optimizers):
        prefix = f"{OPTIMIZER}{index}."
        names = {
            name.removeprefix(prefix).partition(".")[2] for name in fresh if name.startswith(prefix)
        }
        update.discard_state(optimizer, names)


def _masters_from_weights(
    strategy: CheckpointStrategy, update: ParameterUpdate, folder: Path, names: Collection[str]
) -> None:
    """Take the weights for the masters of these names, as exactly as they are stored (float32 ones
    of a float32 run).
    """
    if update.has_masters:
        tensors = {
            MODEL + name: update.box(name, value)
            for name, value in update.updated().items()
            if name in names
        }
        group = _readers_of(folder, strategy)
        store.load(folder, tensors, strict="none", scope=MODEL, process_group=group)


def _load_histories(strategy: CheckpointStrategy, folder: Path) -> None:
    """Largest values of past steps, where the checkpoint has them in this length."""
    quantization = strategy.parallel_model.quantization
    if quantization is None or quantization.delayed is None:
        return
    group = _readers_of(folder, strategy)
    tensors = histories(strategy)
    report = store.load(folder, tensors, strict="none", scope=QUANTIZATION, process_group=group)
    lacking = (*report.missing, *report.mismatched)
    if lacking:
        warn_once(
            f"{folder}: no history of largest values (of amax_history_length) for"
            f" {len(lacking)} layers, first {lacking[0]!r}; delayed scaling begins afresh there"
        )
    quantization.delayed.loaded()


def _load_hyper_parameters(
    optimizers: list[Optimizer], stored: list[list[dict[str, Any]]], folder: Path
) -> None:
    counts = [len(optimizer.param_groups) for optimizer in optimizers]
    stored_counts = [len(groups) for groups in stored]
    if counts != stored_counts:
        raise ValueError(
            f"{folder}: its optimizers have {stored_counts} parameter groups, "
            f"configure_optimizers made {counts}; build the"
            " same groups, or load the weights alone"
        )
    for optimizer, groups in zip(optimizers, stored, strict=True):
        for group, values in zip(optimizer.param_groups, groups, strict=True):
            group.update({key: v for key, v in values.items() if key not in KERNEL_OPTIONS})
