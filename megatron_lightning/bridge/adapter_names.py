"""Adapters under the names that `peft` has for them: derived from an architecture's own table.

An adapter is beside a linear layer here; the rule for that layer's weight says which module it is
there. A is the same on both sides, B's rows lie as the weight's rows do.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from megatron_lightning.bridge.family import Family
from megatron_lightning.bridge.mapping import (
    Entry,
    Form,
    Rule,
    Same,
    Shape,
    TensorMap,
    Transposed,
)
from megatron_lightning.config.lora import ADAPTERS, is_adapter
from megatron_lightning.config.model import GPTConfig
from megatron_lightning.layers.lora import WHOLE
from megatron_lightning.models import MegatronModule

PREFIX = "base_model.model."
"""In front of every name in a file of `peft`."""
_KINDS = {"lora_a": "lora_A", "lora_b": "lora_B"}


@dataclass(frozen=True)
class Place:
    """Where an adapter belongs here."""

    path: str
    """Of the linear layer, relative to the network."""
    part: str
    """Projection of a packed layer, or `WHOLE`."""

    def name(self, kind: str) -> str:
        """Name of the parameter `lora_a` or `lora_b`."""
        return f"{self.path}.{ADAPTERS}.{self.part}.{kind}.weight"


@dataclass(frozen=True)
class Projection:
    """A module of transformers that may have an adapter."""

    module: str
    """Its name there."""
    form: Form
    """Of B."""
    transposed: bool
    """Whether it holds its weight as [in, out] (GPT-2's Conv1D)."""


def places(module: MegatronModule, family: Family, config: GPTConfig) -> dict[Place, Projection]:
    """Every adapter that the network may have, and the module there that it belongs to."""
    packed = module.adapter_parts()
    found: dict[Place, Projection] = {}
    for path in linear_paths(module):
        rule, names = _rule_of(family, config, f"{path}.weight")
        if rule is None or not all(name.endswith(".weight") for name in names):
            continue  # stacked experts are parameters of no linear module
        modules = [name.removesuffix(".weight") for name in names]
        transposed = isinstance(rule.form, Transposed)
        form = rule.form.inner if isinstance(rule.form, Transposed) else rule.form
        parts = next((p for end, p in packed.items() if f".{path}".endswith(f".{end}")), None)
        if len(modules) == 1:
            found[Place(path, WHOLE)] = Projection(modules[0], form, transposed)
        elif parts is not None and len(parts.names) == len(modules):
            for part, name in zip(parts.names, modules, strict=True):
                found[Place(path, part)] = Projection(name, Same(), transposed)
    return found


def linear_paths(module: MegatronModule) -> list[str]:
    """Paths of what may be a linear layer: whose weight has several dims."""
    prefix = f"{module.network_attribute}."
    return [
        name.removeprefix(prefix).removesuffix(".weight")
        for name, shape in module.global_shapes().items()
        if name.endswith(".weight") and len(shape) > 1 and not is_adapter(name)
    ]


def joined_layers(module: MegatronModule, family: Family) -> tuple[str, ...]:
    """Layers that pack projections here, and are one tensor in this architecture too."""
    config = module.config
    assert isinstance(config, GPTConfig)
    found = places(module, family, config)
    return tuple(
        end
        for end in module.adapter_parts()
        if any(p.part == WHOLE and f".{p.path}".endswith(f".{end}") for p in found)
    )


def adapter_table(
    found: Mapping[Place, Projection], shapes: Mapping[str, Shape], family: Family
) -> TensorMap:
    """The table of a network's adapters (name relative to the network -> shape). ValueError names
    those that this architecture has no module for.
    """
    entries: dict[str, Entry] = {}
    theirs: dict[str, Shape] = {}
    for name, shape in shapes.items():
        place, kind = _place_of(name)
        if place not in found:
            raise ValueError(_no_module(place, found, family))
        form = found[place].form if kind == "lora_b" else Same()
        there = f"{PREFIX}{found[place].module}.{_KINDS[kind]}.weight"
        entries[name] = Entry((there,), tuple(form.pieces(shape)))
        (theirs[there],) = form.shapes(shape)
    return TensorMap(entries, theirs)


def _place_of(name: str) -> tuple[Place, str]:
    path, _, rest = name.partition(f".{ADAPTERS}.")
    part, kind, _ = rest.split(".")
    return Place(path, part), kind


def _no_module(place: Place, found: Mapping[Place, Projection], family: Family) -> str:
    parts = [p.part for p in found if p.path == place.path]
    if not parts:
        return (
            f"{place.path}: {family.architecture} has no linear module for its adapter; leave it"
            " out of the targets, or export the merged model"
        )
    remedy = "True" if parts == [WHOLE] else "False"
    return (
        f"{place.path}: {family.architecture} has {'one module' if parts == [WHOLE] else parts}"
        f" there, and the adapter is for {place.part!r}; train with LoraConfig(joined={remedy})"
    )


def _rule_of(family: Family, config: GPTConfig, name: str) -> tuple[Rule | None, tuple[str, ...]]:
    for rule in family.rules(config):
        names = rule.match(name)
        if names is not None:
            return rule, names
    return None, ()
