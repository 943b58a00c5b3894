"""Units of fully sharded parameters that are trained after all of them were frozen.

Torch's `fully_shard` finds out in a unit's first forward pass in which dtype its gradients are
reduced, by the parameters that are trained then, and a unit without any has none. Gathering a unit
by hand (`FSDPModule.unshard`) makes it look again.
"""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn
from torch.distributed.fsdp import FSDPModule


class FrozenUnits:
    """Which of the units at and below `roots` had no trained parameter when last looked at."""

    def __init__(self, roots: Iterable[FSDPModule]) -> None:
        self._own: dict[FSDPModule, list[nn.Parameter]] = {}
        for root in roots:
            _add_units(root, self._own)
        self._frozen = self._now()

    def refresh(self) -> None:
        """Before a forward pass, while nothing is gathered: make units of which a parameter is
        trained again ready for its gradient. They are gathered once for that, so all data ranks
        call this, having unfrozen the same.
        """
        before, self._frozen = self._frozen, self._now()
        for unit in before:
            if unit not in self._frozen:
                unit.unshard()
                unit.reshard()

    def _now(self) -> dict[FSDPModule, None]:
        """Those without a trained parameter, in an order equal on all ranks."""
        return {
            unit: None
            for unit, own in self._own.items()
            if not any(parameter.requires_grad for parameter in own)
        }


def _add_units(unit: FSDPModule, found: dict[FSDPModule, list[nn.Parameter]]) -> None:
    """Add a unit and those within it, with the parameters that lie in none of the latter."""
    own = found.setdefault(unit, [])
    waiting: list[nn.Module] = [unit]  # type: ignore[list-item]
    while waiting:
        module = waiting.pop()
        own += module.parameters(recurse=False)
        for child in module.children():
            if isinstance(child, FSDPModule):
                _add_units(child, found)
            else:
                waiting.append(child)
