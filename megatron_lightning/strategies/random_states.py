"""States of the process-wide random generators, saved and restored on each rank for itself.

Dropout of this package's models is drawn by position and needs none of them; modules of users draw
from torch's, NumPy's or Python's generators. They are small tensors beside the objects of a
checkpoint, restored where as many ranks resume: when the checkpoint is loaded, and again before the
first step, as Lightning draws from them in between when it begins to iterate in the middle of an
epoch.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch
from lightning.pytorch import Trainer
from torch import Tensor

import megatron_lightning.checkpoint as store
from megatron_lightning.checkpoint.ranks import ALONE
from megatron_lightning.checkpoint.saving import RANDOM_STATES
from megatron_lightning.strategies import _compat


def collect(rank: int, device: torch.device) -> dict[str, Tensor]:
    """The states of this rank by name in a checkpoint."""
    _, python, gauss = random.getstate()
    _, keys, position, has_gauss, cached = np.random.get_state(legacy=True)  # noqa: NPY002 - as it is
    states = {
        "torch": torch.get_rng_state(),
        "python": torch.tensor(python, dtype=torch.int64),
        "python_gauss": torch.tensor(float("nan") if gauss is None else gauss, dtype=torch.float64),
        "numpy": torch.tensor([*np.asarray(keys).tolist(), position, has_gauss]),
        "numpy_gauss": torch.tensor(cached, dtype=torch.float64),
    }
    if device.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state(device)
    return {f"{_prefix(rank)}{name}": state for name, state in states.items()}


class Generators:
    """The generators of this process in a run that was resumed."""

    def __init__(self) -> None:
        self._resumed: Mapping[str, Tensor] = {}
        self._device = torch.device("cpu")

    def resume(self, folder: Path, rank: int, world_size: int, device: torch.device) -> None:
        """Set them to what the checkpoint has of this rank, if as many ranks have saved it."""
        self._resumed, self._device = read(folder, rank, world_size, device), device
        restore(self._resumed, device)

    def before_step(self, trainer: Trainer) -> None:
        """Before a training step: set them again if it is the first one and not of an epoch."""
        if self._resumed and _compat.began_within_epoch(trainer):
            restore(self._resumed, self._device)
        self._resumed = {}


def read(folder: Path, rank: int, world_size: int, device: torch.device) -> dict[str, Tensor]:
    """The states of this rank in a checkpoint, by name; empty if it was saved by another number of
    ranks or holds none.
    """
    states = {name: state.clone() for name, state in collect(rank, device).items()}
    beyond = {f"{_prefix(world_size)}torch": torch.get_rng_state()}
    report = store.load(folder, states | beyond, strict="none", process_group=ALONE)
    missing = {*report.missing, *report.mismatched}
    if not missing.isdisjoint(states) or missing.isdisjoint(beyond):
        return {}
    return {name.removeprefix(_prefix(rank)): state for name, state in states.items()}


def restore(states: Mapping[str, Tensor], device: torch.device) -> None:
    """Set the generators of this process to what `read` gave."""
    if not states:
        return
    torch.set_rng_state(states["torch"])
    gauss = float(states["python_gauss"])
    python = tuple(states["python"].tolist())
    random.setstate((random.Random().getstate()[0], python, None if np.isnan(gauss) else gauss))
    *keys, position, has_gauss = states["numpy"].tolist()
    cached = float(states["numpy_gauss"])
    np.random.set_state(("MT19937", np.array(keys, np.uint32), position, has_gauss, cached))  # noqa: NPY002
    if device.type == "cuda" and "cuda" in states:
        torch.cuda.set_rng_state(states["cuda"], device)


def _prefix(rank: int) -> str:
    return f"{RANDOM_STATES}{rank:05d}/"
