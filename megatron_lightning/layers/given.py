"""Initial values that are read from somewhere instead of drawn, a rank's box at a time."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor, nn

from megatron_lightning.config.plan import ParameterInfo
from megatron_lightning.parallel.random import Initial


class ValueSource(Protocol):
    """Where the values of a network's parameters come from, and those of some of its buffers."""

    def gives(self, name: str) -> bool:
        """Whether it has values for this name, relative to the network."""
        ...

    def fill(self, target: Tensor, name: str, offsets: Sequence[int], sizes: Sequence[int]) -> None:
        """Fill `target` with the box [offsets, offsets + sizes) of a parameter; `name` is relative
        to the network.
        """
        ...


@dataclass(frozen=True)
class GivenValues(Initial):
    """Values of a source, which is read once."""

    can_repeat: ClassVar[bool] = False
    source: ValueSource
    prefix: str
    """In front of canonical names, which the source does without."""

    def __deepcopy__(self, memo: dict[int, Any]) -> GivenValues:
        """Itself: copies of a network read from the same source."""
        return self

    def draw(
        self,
        *,
        seed: int,
        name: str,
        global_shape: Sequence[int],
        offsets: Sequence[int],
        sizes: Sequence[int],
        device: torch.device | str = "cpu",
    ) -> Tensor:
        """See `Initial.draw`."""
        box = torch.empty(tuple(sizes), dtype=torch.float32, device=device)
        self.source.fill(box, name.removeprefix(self.prefix), offsets, sizes)
        return box

    @torch.no_grad()
    def fill(
        self,
        tensor: Tensor,
        *,
        seed: int,
        name: str,
        global_shape: Sequence[int],
        offsets: Sequence[int],
        sizes: Sequence[int],
    ) -> None:
        """See `Initial.fill`; without the box in float32 on the way."""
        if tuple(sizes) != tuple(tensor.shape):
            tensor.zero_()
        target = tensor
        for dim, size in enumerate(sizes):
            target = target.narrow(dim, 0, size)
        self.source.fill(target, name.removeprefix(self.prefix), offsets, sizes)


def give_values(
    network: nn.Module,
    source: ValueSource,
    prefix: str,
    wanted: Callable[[str], bool] = lambda path: True,
) -> None:
    """Let every parameter of a network on the meta device get its values from `source` when it is
    materialised, in whatever layout; only of modules whose path is `wanted`. These must have
    `initials`.
    """
    for path, module in network.named_modules():
        names = [name for name, _ in module.named_parameters(recurse=False)]
        if not names or not wanted(path):
            continue
        assert hasattr(module, "initials"), f"{path} has no initial values to replace"
        owner: Any = module
        given = GivenValues(source, prefix)
        owner.initials = dict.fromkeys(owner.initials, given)
        for name, _ in module.named_buffers(recurse=False):
            if source.gives(f"{path}.{name}" if path else name):
                owner.initials[name] = given


def expect_values(network: nn.Module, table: Mapping[str, ParameterInfo], prefix: str) -> None:
    """Tell the sources of a network on the meta device how many values it will take from them, as
    it is cut now: `table` has its rows by prefix + name.
    """
    for name, parameter in network.named_parameters():
        path, _, last = name.rpartition(".")
        given = getattr(network.get_submodule(path), "initials", {}).get(last)
        source: Any = given.source if isinstance(given, GivenValues) else None
        if parameter.is_meta and hasattr(source, "expect"):
            source.expect(math.prod(table[prefix + name].sizes))
