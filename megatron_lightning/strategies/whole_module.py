"""`load_from_checkpoint` of users' own modules: a checkpoint folder as Lightning's dictionary.

A module of this package reads the folder itself. For any other, Lightning unpickles a file; where
the path is a folder of ours, it gets the same dictionary made of JSON and tensors instead.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import lightning
import torch
from lightning.pytorch import LightningModule
from torch import Tensor

import megatron_lightning.checkpoint as store
from megatron_lightning.checkpoint.config_codec import CODEC
from megatron_lightning.checkpoint.manifest import MANIFEST_FILE
from megatron_lightning.checkpoint.ranks import ALONE
from megatron_lightning.config.plan import ParallelPlan, canonical_name

if TYPE_CHECKING:
    from megatron_lightning.strategies.checkpoint_strategy import CheckpointStrategy

ALIASES = "parameter_aliases"
"""Entry of a checkpoint: further names of parameters that a module has under several names."""
_MODEL, _MASTER = "model.", "master."


def is_folder(path: Any) -> bool:
    """Whether `path` is a checkpoint folder of this package, whole or damaged."""
    return isinstance(path, (str, Path)) and Path(path, MANIFEST_FILE).is_file()


def read_folder(path: str | Path, map_location: Any = None) -> dict[str, Any]:
    """Everything that Lightning's dictionary holds, but for optimizer states; each process reads
    for itself.

    Weights are whole tensors, as exact as they are stored (masters of low-precision weights), on
    the CPU or the device that `map_location` names.
    """
    checkpoint = store.load_objects(path, codec=CODEC)
    stored = store.list_tensors(path)
    source = {
        name.removeprefix(_MODEL): name.replace(_MODEL, _MASTER, 1)
        if name.replace(_MODEL, _MASTER, 1) in stored
        else name
        for name in stored
        if name.startswith(_MODEL)
    }
    whole = {
        name: torch.empty(stored[n].shape, dtype=stored[n].dtype) for name, n in source.items()
    }
    wanted = {source[name]: tensor for name, tensor in whole.items()}
    store.load(path, wanted, strict="unexpected_ok", process_group=ALONE)
    for alias, owner in checkpoint.pop(ALIASES, {}).items():
        if owner in whole:
            whole.setdefault(alias, whole[owner])
    checkpoint.setdefault("pytorch-lightning_version", lightning.__version__)
    checkpoint["state_dict"] = {name: _moved(t, map_location) for name, t in whole.items()}
    return checkpoint


def _moved(tensor: Tensor, map_location: Any) -> Tensor:
    """On the device that is named; functions and tables of devices leave what is on the CPU."""
    named = isinstance(map_location, (str, torch.device))
    return tensor.to(map_location) if named else tensor


def aliases(strategy: CheckpointStrategy) -> dict[str, str]:
    """Further name -> name under which the checkpoint has the parameter."""
    module = strategy.lightning_module
    assert module is not None
    found = _shared(module)
    plan: ParallelPlan | None = strategy.parallel_model.plan
    if plan is not None:
        prefix = strategy.network_prefix
        found |= {f"{prefix}{user}": f"{prefix}{owner}" for owner, user in plan.tied}
    return found


def _shared(module: LightningModule) -> dict[str, str]:
    first: dict[int, str] = {}
    found = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        canonical = canonical_name(name)
        owner = first.setdefault(id(parameter), canonical)
        if owner != canonical:
            found[canonical] = owner
    return found
