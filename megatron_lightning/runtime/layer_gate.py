"""Waits for parameters that are still being gathered, layer by layer, where that is safe.

A `StagedNetwork` calls the gate before each of its layers. What is read before any layer is waited
for when a run begins, and what is read behind the layers (final norm, head) before the last of a
chunk's layers. A network of another form is waited for as a whole.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from torch import nn

from megatron_lightning.layers.staged import StagedNetwork
from megatron_lightning.runtime.model import ParallelModel


class LayerGate:
    """Knows which parameters each layer reads, and calls `wait` with their names in time."""

    def __init__(self, model: ParallelModel, wait: Callable[[Iterable[str]], None]) -> None:
        self._wait = wait
        self._names = {id(p): name for name, p in model.parameters.items()}
        self._of_layer: dict[str, list[str]] = {}
        self._networks = [n for n in model.networks if isinstance(n, StagedNetwork)]
        self._early = set(model.parameters)
        for network in self._networks:
            self._add(network, model)
            network.before_layer = self

    def __call__(self, layer: str) -> None:
        """Wait for what layer `layer` reads."""
        self._wait(self._of_layer[layer])

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        """None: a copy of a network (weight averaging) has parameters of its own."""

    def begin(self) -> None:
        """Wait for what is read before any layer."""
        self._wait(self._early)

    def detach(self) -> None:
        """Leave the networks alone."""
        for network in self._networks:
            network.before_layer = None

    def _add(self, network: StagedNetwork, model: ParallelModel) -> None:
        assert model.plan is not None
        layers = list(network.named_layers())
        if not layers:
            return
        for name, layer in layers:
            self._of_layer[name] = self._names_in(layer)
            self._early -= set(self._of_layer[name])
        modules = dict(network.named_modules())
        late: set[str] = set()
        for path in model.plan.last:
            late |= set(self._names_in(modules.get(path)))
        for path in model.plan.first:  # a head tied to the embedding is read at once
            late -= set(self._names_in(modules.get(path)))
        self._of_layer[layers[-1][0]] += sorted(late)
        self._early -= late

    def _names_in(self, module: nn.Module | None) -> list[str]:
        return [] if module is None else [self._names[id(p)] for p in module.parameters()]
