"""What a rank holds of a module's values: all of a module that no strategy has cut, else its boxes,
with adapters added to them or left out where that is asked for.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from megatron_lightning.bridge.merge import factors_of_rank, merged
from megatron_lightning.bridge.writing import Held
from megatron_lightning.checkpoint import Box, BoxedTensor
from megatron_lightning.checkpoint.ranks import ALONE, RankGroup
from megatron_lightning.checkpoint.sharing import shares
from megatron_lightning.models import MegatronModule
from megatron_lightning.runtime.boxes import box_of


@dataclass(frozen=True)
class RankBoxes:
    """What a rank of a layout holds."""

    boxes: Mapping[str, BoxedTensor]
    computed_in: Mapping[str, torch.dtype] = field(default_factory=dict)
    """Dtypes in which the network reads parameters that are kept in another."""

    def dtypes(self) -> Mapping[str, torch.dtype]:
        """See `Held`."""
        return {n: self.computed_in.get(n, value.dtype) for n, value in self.boxes.items()}

    def share(self, ranks: RankGroup) -> Mapping[str, list[Box]]:
        """See `Held`."""
        return shares(self.boxes, ranks)

    def values(self, name: str, box: Box) -> Tensor:
        """See `Held`."""
        return self.boxes[name].view_of(box)


def held_boxes(module: MegatronModule) -> tuple[RankBoxes, bool]:
    """This rank's parts of the parameters, and whether other ranks have some."""
    prefix = f"{module.network_attribute}."
    strategy: Any = None if module._trainer is None else module.trainer.strategy
    model = _cut_model(strategy)
    if model is None:
        module.built_network()
        whole = {**module.canonical_parameters(), **module.canonical_buffers()}
        boxes = {n.removeprefix(prefix): BoxedTensor.of(p.detach()) for n, p in whole.items()}
        return RankBoxes(boxes), False
    if strategy.update is not None:
        strategy.update.wait()
    boxes = {
        name.removeprefix(prefix): BoxedTensor.of(box_of(parameter.detach(), model.table[name]))
        for name, parameter in model.parameters.items()
    }
    buffers = module.canonical_buffers().items()
    boxes |= {n.removeprefix(prefix): BoxedTensor.of(buffer) for n, buffer in buffers}
    dtypes = {name.removeprefix(prefix): dtype for name, dtype in model.compute_dtypes.items()}
    return RankBoxes(boxes, dtypes), True


def held_for_export(module: MegatronModule, merge_adapters: bool | None) -> tuple[Held, bool]:
    """This rank's parts of what is exported, and whether other ranks have some; see `to_hf`."""
    held, together = held_boxes(module)
    model = _cut_model(module.trainer.strategy) if together else None
    factors = partial(factors_of_rank, module, model, held.boxes)
    return merged(module, held, merge_adapters, factors), together


def ranks_of(module: MegatronModule, together: bool) -> RankGroup:
    """Those that hold the module together, or this one alone."""
    return RankGroup(module.trainer.strategy.mesh.control_group if together else ALONE)  # type: ignore[attr-defined]


def _cut_model(strategy: Any) -> Any:
    """This rank's part of the model; None where no strategy of this package has cut it, as in the
    process that started the ranks.
    """
    if not hasattr(type(strategy), "parallel_model"):
        return None
    try:
        return strategy.parallel_model
    except RuntimeError:
        return None
