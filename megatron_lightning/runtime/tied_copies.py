"""Whether the first and the last pipeline stage treat their copies of a tied parameter alike.

Each has a parameter of its own, and under another name: who freezes `word_embeddings`, writes to
it, or sorts parameters into groups by name, after the network was cut, would let the two drift
apart, or one stage wait for a sum that the other takes no part in.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torch.optim import Optimizer

from megatron_lightning.parallel.collectives import all_reduce_
from megatron_lightning.parallel.mesh import ParallelMesh
from megatron_lightning.precision.changes import WeightWrites, print_of
from megatron_lightning.runtime.model import ParallelModel

_KERNEL_OPTIONS = ("foreach", "fused", "capturable", "differentiable")


class TiedCopies:
    """Compares them as windows begin. Groups of optimizers are compared in the first one only,
    since rates change in every step; what is trained in each, and values once user code has
    written to them. The result is read, which waits for the device, only where something changed
    here.
    """

    def __init__(self, model: ParallelModel, mesh: ParallelMesh) -> None:
        self._model = model
        self._axis = mesh.axis("edges")
        self._device = mesh.device
        self._begun = False
        self._trained: tuple[bool, ...] | None = None
        self._print: Tensor | None = None
        self._written = False
        names = model.tied if self._axis.size > 1 else ()
        self._writes = WeightWrites({name: model.parameters[name] for name in names})

    def look(self) -> bool:
        """Before anybody but user code writes to them: whether that has."""
        self._written = bool(self._writes.names()) or self._written
        return self._written

    def note(self) -> None:
        """After this package has written to them, or moved them."""
        self._writes.forget()

    def check(self, optimizers: Sequence[Optimizer], updated: Mapping[str, Tensor]) -> None:
        """ValueError where the copies are treated differently. Both stages must call it, with
        weights that may be read if `look` says so.

        `updated`: what the optimizers hold, by canonical name.
        """
        names = self._model.tied
        if self._axis.size == 1 or not names:
            return
        copies = [self._model.parameters[name] for name in names]
        trained = tuple(copy.requires_grad for copy in copies)
        values = [int(print_of(copy)) for copy in copies] if self._written else []
        changed = trained != self._trained or not self._begun or self._written
        groups = [] if self._begun else [_group_of(updated.get(n), optimizers) for n in names]
        if changed or self._print is None:
            value = _number(f"{trained} {groups} {values}")
            self._print = torch.tensor([value, -value], device=self._device)
        extremes = all_reduce_(self._print.clone(), self._axis, "max")
        first, self._begun, self._trained = not self._begun, True, trained
        written, self._written = self._written, False
        if changed and int(extremes.sum()) != 0:
            here = ", ".join(
                f"{name}: requires_grad={flag}"
                + (f", {groups[i]}" if first else "")
                + (", written to" if written else "")
                for i, (name, flag) in enumerate(zip(names, trained, strict=True))
            )
            raise ValueError(
                "tied parameters of which the first and the last pipeline stage hold a copy each"
                f" are treated differently there (here {here}): their names in named_parameters()"
                " differ between the stages; freeze them in configure_model, and make parameter"
                " groups by the names of trainer.strategy.parallel_model.parameters, which are the"
                " same on both; write the same to both"
            )
        if first or written:  # from now on without groups, and values
            value = _number(f"{trained} [] []")
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
