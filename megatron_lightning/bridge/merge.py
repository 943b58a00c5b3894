"""Weights with their adapters in them, W + scale * B A, computed while they are written: each rank
for its own boxes, the product of one layer, or one of its experts, at a time, in float32.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from megatron_lightning.bridge.writing import Held, Shares
from megatron_lightning.checkpoint import Box, BoxedTensor
from megatron_lightning.checkpoint.ranks import RankGroup
from megatron_lightning.config.lora import ADAPTERS, is_adapter
from megatron_lightning.layers.lora import WHOLE, Parts
from megatron_lightning.models import MegatronModule

Pairs = Mapping[str, tuple[Tensor, Tensor]]
"""By projection: A (rank, in) and B (*out, rank), local; of stacked experts, all."""


@dataclass(frozen=True)
class Factors:
    """The adapters of one layer, for what this rank holds of its weight as a whole box."""

    parts: Parts | None
    pairs: Mapping[str, tuple[Callable[[], Tensor], ...]]
    """What gives `Pairs`."""
    offsets: tuple[int, ...]
    """Where the box begins in the weight."""
    shape: tuple[int, ...]
    """Of the box: (*out, in)."""
    scale: float

    @torch.no_grad()
    def read(self) -> Pairs:
        """A and B of each projection, in float32: small beside the weight."""
        return {name: (a().float(), b().float()) for name, (a, b) in self.pairs.items()}

    @torch.no_grad()
    def product(self, pairs: Pairs, expert: int | None) -> Tensor:
        """What the adapters that were read add to the box, in float32; of stacked experts to that
        of one.
        """
        if expert is not None:
            pairs = {name: (a[expert], b[expert]) for name, (a, b) in pairs.items()}
        deltas = {name: self._one(a, b) for name, (a, b) in pairs.items()}
        if self.parts is None:
            return deltas[WHOLE].movedim(0, -1)
        *out, inner = self.shape if expert is None else self.shape[1:]
        like = next(iter(deltas.values())).new_empty(inner, *out)
        return self.parts.join(deltas, like).movedim(0, -1)

    def _one(self, a: Tensor, b: Tensor) -> Tensor:
        """(in, *out): what the adapter makes of each input feature alone."""
        delta = a.t() @ b.flatten(0, -2).t() * self.scale
        return delta.unflatten(-1, b.shape[:-1])


@dataclass
class Merged:
    """See `writing.Held`: the values of another with adapters in them."""

    held: Held
    factors: Mapping[str, Factors]
    """By the name of the weight."""
    _read: tuple[str, Pairs] | None = field(default=None, init=False)
    """The last adapters, which several boxes may need."""
    _made: tuple[str, int | None, Tensor] | None = field(default=None, init=False)
    """The last product: of a weight, or of one of its experts."""

    def dtypes(self) -> Mapping[str, torch.dtype]:
        """See `Held`."""
        return {name: dtype for name, dtype in self.held.dtypes().items() if not is_adapter(name)}

    def share(self, ranks: RankGroup) -> Shares:
        """See `Held`."""
        return {name: own for name, own in self.held.share(ranks).items() if not is_adapter(name)}

    def values(self, name: str, box: Box) -> Tensor:
        """See `Held`."""
        values, factors = self.held.values(name, box), self.factors.get(name)
        if factors is None:
            return values
        if self._read is None or self._read[0] != name:
            self._read = name, factors.read()
        inside = box.shift(factors.offsets, sign=-1).slices()
        some_a, _ = next(iter(self._read[1].values()))
        if some_a.dim() == 2:
            return _sum(values, self._product(name, None)[inside])
        merged = torch.empty_like(values)
        for place, expert in enumerate(range(inside[0].start, inside[0].stop)):
            delta = self._product(name, expert)[inside[1:]]
            merged[place] = _sum(values[place], delta)
        return merged

    def _product(self, name: str, expert: int | None) -> Tensor:
        if self._made is None or self._made[:2] != (name, expert):
            assert self._read is not None
            self._made = name, expert, self.factors[name].product(self._read[1], expert)
        return self._made[2]


def _sum(values: Tensor, delta: Tensor) -> Tensor:
    return (values.float() + delta.to(values.device)).to(values.dtype)


def merged(
    module: MegatronModule,
    held: Held,
    merge: bool | None,
    factors: Callable[[], Mapping[str, Factors]],
) -> Held:
    """What is exported of a module: `held`, of one with adapters as `merge` says, with `factors()`.

    ValueError where there are adapters and `merge` is None.
    """
    if module.lora is None:
        return held
    if merge is None:
        raise ValueError(
            "the module has adapters: pass merge_adapters=True to write weights with the adapters"
            " in them, or False for the base alone (`convert`: --adapters merge or leave);"
            " save_adapters writes the adapters alone"
        )
    return Merged(held, factors() if merge else {})


def factors_of_rank(
    module: MegatronModule, model: Any, boxes: Mapping[str, BoxedTensor]
) -> dict[str, Factors]:
    """Factors of the weights that this rank holds: `boxes` of a whole module, or of this rank's
    part of it, `model`. All ranks call it.
    """
    prefix = f"{module.network_attribute}."
    named = module.canonical_parameters() if model is None else model.parameters
    local = {n.removeprefix(prefix): _whole_locally(p) for n, p in named.items() if is_adapter(n)}
    places: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = {}
    for name in weights_with_adapters(local):
        if model is None:
            shape = tuple(boxes[name].shape)
            places[name] = (0,) * len(shape), shape
        else:
            info = model.table[prefix + name]
            places[name] = info.offsets, info.sizes
    return factors_of(module, {n: _given(t) for n, t in local.items()}, places)


def weights_with_adapters(adapters: Mapping[str, Any]) -> list[str]:
    """Names of the weights that the named adapters are for."""
    return list(dict.fromkeys(name.partition(f".{ADAPTERS}.")[0] + ".weight" for name in adapters))


def factors_of(
    module: MegatronModule,
    adapters: Mapping[str, Callable[[], Tensor]],
    places: Mapping[str, tuple[tuple[int, ...], tuple[int, ...]]],
) -> dict[str, Factors]:
    """Factors of each weight from its adapters (names relative to the network) and its box
    (offsets, sizes).
    """
    assert module.lora is not None
    found = {}
    for weight, (offsets, sizes) in places.items():
        path = weight.removesuffix(".weight")
        begin = f"{path}.{ADAPTERS}."
        names = dict.fromkeys(
            n.removeprefix(begin).partition(".")[0] for n in adapters if n.startswith(begin)
        )
        pairs = {
            part: tuple(adapters[f"{begin}{part}.lora_{kind}.weight"] for kind in "ab")
            for part in names
        }
        packed = module.adapter_parts().items()
        parts = next((p for end, p in packed if f".{path}".endswith(f".{end}")), None)
        parts = None if WHOLE in pairs else parts
        found[weight] = Factors(parts, pairs, offsets, sizes, module.lora.scale)
    return found


def _whole_locally(parameter: Tensor) -> Tensor:
    """The tensor-parallel part of a parameter that may be sharded over the data axis."""
    value = parameter.detach()
    return value.full_tensor() if isinstance(value, DTensor) else value


def _given(tensor: Tensor) -> Callable[[], Tensor]:
    return lambda: tensor
