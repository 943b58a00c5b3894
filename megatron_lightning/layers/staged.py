"""The form of a network that the pipeline can cut: beginning, a row of layers, end.

To make an own network cuttable, derive it from `StagedNetwork`, give `layers_path`, and write the
three parts instead of `forward`. The rules:

- `inputs` (positional and keyword) are what the network is called with. Every stage gets the same
ones, so each part may read tokens, positions or labels from them. - What passes from layer to
layer, `carried`, is a floating-point tensor or a tuple of them; nothing else travels between
stages. Its shape may depend on the inputs only. - A stage holds only some of the modules; the
others are absent from the layer container, or None. So `begin` alone uses the modules that the plan
lists as first, `finish` alone those that it lists as last, and `apply_layer` uses the layer, the
carried value and the inputs. - A layer is known by its name in the container, which stays the same
on every stage.
"""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor, nn

Carried = Tensor | tuple[Tensor, ...]


@dataclass(frozen=True)
class LayerGroups:
    """How layers are run in groups, each through a region (see `parallel/recompute.py`)."""

    size: int
    """Layers of one group; the last group of a chunk may have fewer."""
    region: Callable[..., Any]
    """`region(function, *args)` runs `function(*args)`."""

    def __deepcopy__(self, memo: dict[int, Any]) -> LayerGroups:
        """Itself: copies of a network share it."""
        return self


class StagedNetwork(nn.Module, ABC):
    """A network in three parts; called as a whole, it runs them one after the other."""

    layers_path: ClassVar[str] = "layers"
    """Path of the ModuleDict or ModuleList of layers; `ParallelPlan.layers` names the same."""
    layer_groups: LayerGroups | None = None
    """Set when groups of layers are recomputed in the backward pass."""
    before_layer: Callable[[str], None] | None = None
    """Called with a layer's name before the layer runs: its parameters may still be on their
    way."""

    @abstractmethod
    def begin(self, *args: Any, **kwargs: Any) -> Carried:
        """Inputs -> what the first layer receives (embedding)."""

    @abstractmethod
    def apply_layer(
        self, name: str, layer: nn.Module, carried: Carried, *args: Any, **kwargs: Any
    ) -> Carried:
        """Run one layer; `name` is its key in the container."""

    @abstractmethod
    def finish(self, carried: Carried, *args: Any, **kwargs: Any) -> Any:
        """What the last layer returned -> the result of the network (norm, head, loss)."""

    def named_layers(self) -> Iterator[tuple[str, nn.Module]]:
        """Names and modules of the layers that are here, in order."""
        return self.get_submodule(self.layers_path).named_children()

    def run_layers(self, carried: Carried, *args: Any, **kwargs: Any) -> Carried:
        """Run the layers that are here, in order."""
        layers = list(self.named_layers())
        groups = self.layer_groups
        if groups is None:
            return self._run_group(layers, args, kwargs, carried)
        for start in range(0, len(layers), groups.size):
            group = layers[start : start + groups.size]
            run = functools.partial(self._run_group, group, args, kwargs)
            carried = groups.region(run, carried)
        return carried

    def _run_group(
        self,
        layers: Sequence[tuple[str, nn.Module]],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        carried: Carried,
    ) -> Carried:
        for name, layer in layers:
            if self.before_layer is not None:
                self.before_layer(name)
            carried = self.apply_layer(name, layer, carried, *args, **kwargs)
        return carried

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The whole network: begin, every layer, finish."""
        carried = self.begin(*args, **kwargs)
        carried = self.run_layers(carried, *args, **kwargs)
        return self.finish(carried, *args, **kwargs)
