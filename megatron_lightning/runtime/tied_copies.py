"""Whether the first and the last pipeline stage treat their copies of a tied parameter alike.

Each has a parameter of its own, and under another name: who freezes `word_embeddings`, or sorts
parameters into groups by name, after the network was cut, would let the two drift apart, or one
stage wait for a sum that the other takes no part in.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torch.optim import Optimizer

from megatron_lightning.parallel.collectives import all_reduce_
from megatron_lightning.parallel.mesh import ParallelMesh
from megatron_lightning.runtime.model import ParallelModel

_KERNEL_OPTIONS = ("foreach", "fused", "capturable", "differentiable")


class TiedCopies:
    """Compares them as windows begin. Groups of optimizers are compared in the first one only,
    since rates change in every step; what is trained in each, and the result is read, which waits
    for the device, only where it changed here.
    """

    def __init__(self, model: ParallelModel, mesh: ParallelMesh) -> None:
        self._model = model
        self._axis = mesh.axis("edges")
        self._device = mesh.device
        self._begun = False
        self._trained: tuple[bool, ...] | None = None
        self._print: Tensor | None = None

    def check(self, optimizers: Sequence[Optimizer], updated: Mapping[str, Tensor]) -> None:
        """ValueError where the copies are treated differently. Both stages must call it.

        `updated`: what the optimizers hold, by canonical name.
        """
        names = self._model.tied
        if self._axis.size == 1 or not names:
            return
        trained = tuple(self._model.parameters[name].requires_grad for name in names)
        changed = trained != self._trained or not self._begun
        groups = [] if self._begun else [_group_of(updated.get(n), optimizers) for n in names]
        if changed or self._print is None:
            value = _number(f"{trained} {groups}")
            self._print = torch.tensor([value, -value], device=self._device)
        extremes = all_reduce_(self._print.clone(), self._axis, "max")
        first, self._begun, self._trained = not self._begun, True, trained
        if changed and int(extremes.sum()) != 0:
            here = ", ".join(
                f"{name}: requires_grad={flag}" + (f", {groups[i]}" if first else "")
                for i, (name, flag) in enumerate(zip(names, trained, strict=True))
            )
            raise ValueError(
                "tied parameters of which the first and the last pipeline stage hold a copy each"
                f" are treated differently there (here {here}): their names in named_parameters()"
                " differ between the stages; freeze them in configure_model, and make parameter"
                " groups by the names of trainer.strategy.parallel_model.parameters, which are the"
                " same on both"
            )
        if first:  # from now on without groups
            value = _number(f"{trained} []")
            self._print = torch.tensor([value, -value], device=self._device)


def _group_of(updated: Tensor | None, optimizers: Sequence[Optimizer]) -> str:
    for number, optimizer in enumerate(optimizers):
        for group in optimizer.param_groups:
            if any(parameter is updated for parameter in group["params"]):
                options = sorted(optimizer.defaults.keys() - set(_KERNEL_OPTIONS))
                values = ", ".join(f"{key}={_plain(group[key])}" for key in options)
                return f"optimizer {number} with {values}"
    return "in no optimizer"


def _plain(value: object) -> object:
    return value.tolist() if isinstance(value, Tensor) else value


def _number(text: str) -> int:
    """At most 62 bits, so that sums of two fit."""
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 2
