"""Low-rank adapters beside linear layers (LoRA, arXiv 2106.09685).

An adapter is two linear layers of its own, so it is cut like any: beside a column-split layer A is
whole and B split, beside a row-split one A is split and B whole. What has to cross the tensor axis
is the inner activation of `rank` features. A layer that packs several projections into one weight
has a pair for each of them, as if they were apart.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

import torch
from torch import Tensor, nn

from megatron_lightning.config.lora import ADAPTERS, LoraConfig
from megatron_lightning.config.plan import (
    Gradient,
    ParallelPlan,
    Role,
    Split,
    column,
    experts,
    replicated,
    row,
)
from megatron_lightning.layers.dropout import Dropout
from megatron_lightning.layers.linear import Linear
from megatron_lightning.layers.moe.experts import ExpertLinear
from megatron_lightning.parallel.random import Constant, Uniform
from megatron_lightning.parallel.streams import Layout

WHOLE = "whole"
"""Key of an adapter for all of a layer's output."""


class Parts(ABC):
    """Names of the projections that a linear layer packs, and how their outputs lie in its own."""

    names: tuple[str, ...]

    @abstractmethod
    def features(self, name: str, output_shape: Sequence[int]) -> int:
        """Output features of one projection, of a layer with (local or global) `output_shape`."""

    @abstractmethod
    def join(self, outputs: Mapping[str, Tensor], like: Tensor) -> Tensor:
        """Outputs (..., features) of some projections -> the layer's (..., *output_shape), zero for
        the others.
        """


@dataclass(frozen=True)
class StackedParts(Parts):
    """Projections one after the other along dim 0 of the output: (..., parts, F)."""

    names: tuple[str, ...]

    def features(self, name: str, output_shape: Sequence[int]) -> int:
        """See `Parts.features`."""
        return output_shape[-1]

    def join(self, outputs: Mapping[str, Tensor], like: Tensor) -> Tensor:
        """See `Parts.join`."""
        zero = None if len(outputs) == len(self.names) else torch.zeros_like(like.select(-2, 0))
        return torch.stack([outputs.get(name, zero) for name in self.names], dim=-2)  # type: ignore[misc]


@dataclass(frozen=True)
class GroupedParts(Parts):
    """Projections packed per group: (..., groups * sum(sizes)), of each group first those of the
    first.
    """

    names: tuple[str, ...]
    sizes: tuple[int, ...]
    """Features of each in one group."""

    def features(self, name: str, output_shape: Sequence[int]) -> int:
        """See `Parts.features`."""
        groups = output_shape[-1] // sum(self.sizes)
        return groups * self.sizes[self.names.index(name)]

    def join(self, outputs: Mapping[str, Tensor], like: Tensor) -> Tensor:
        """See `Parts.join`."""
        groups = like.shape[-1] // sum(self.sizes)
        found = [
            outputs[name].unflatten(-1, (groups, size))
            if name in outputs
            else like.new_zeros(*like.shape[:-1], groups, size)
            for name, size in zip(self.names, self.sizes, strict=True)
        ]
        return torch.cat(found, dim=-1).flatten(-2)


class LowRank(nn.Module):
    """scale * B (A dropout(x)): (..., in_features) -> (..., *output_shape), zero at first."""

    def __init__(
        self,
        in_features: int,
        output_shape: int | Sequence[int],
        config: LoraConfig,
        layout: Layout,
    ) -> None:
        """Build on the meta device. `layout`: which dims of the input are split."""
        super().__init__()
        bound = 1.0 / math.sqrt(in_features)
        self.scale = config.scale
        self.dropout = Dropout(config.dropout, layout)
        self.lora_a = Linear(
            in_features, config.rank, bias=False, initial=Uniform(-bound, bound), device="meta"
        )
        self.lora_b = Linear(
            config.rank, output_shape, bias=False, initial=Constant(0.0), device="meta"
        )

    def forward(self, x: Tensor) -> Tensor:
        """(..., in_features) -> (..., *output_shape)."""
        return self.lora_b(self.lora_a(self.dropout(x))) * self.scale


class LowRankExperts(nn.Module):
    """The same for each of stacked experts: (R, in_features) rows sorted by expert, (E,) rows of
    each -> (R, *output_shape).
    """

    def __init__(
        self,
        num_experts: int,
        in_features: int,
        output_shape: Sequence[int],
        config: LoraConfig,
    ) -> None:
        """Build on the meta device."""
        super().__init__()
        bound = 1.0 / math.sqrt(in_features)
        first, second = Uniform(-bound, bound), Constant(0.0)
        self.scale = config.scale
        self.dropout = Dropout(config.dropout, Layout.FEATURES)  # no two ranks have the same rows
        self.lora_a = ExpertLinear(
            num_experts, in_features, (config.rank,), bias=False, initial=first, device="meta"
        )
        self.lora_b = ExpertLinear(
            num_experts, config.rank, output_shape, bias=False, initial=second, device="meta"
        )

    def forward(self, rows: Tensor, counts: Tensor, each: int | None = None) -> Tensor:
        """See `ExpertLinear.forward`."""
        inner = self.lora_a(self.dropout(rows), counts, each)
        return self.lora_b(inner, counts, each) * self.scale


class Adapters(nn.ModuleDict):
    """The adapters of one linear layer, by projection, or one for all of its output."""

    def __init__(
        self, adapters: Mapping[str, LowRank | LowRankExperts], parts: Parts | None
    ) -> None:
        super().__init__(adapters)
        self.parts = parts

    def forward(self, x: Tensor, y: Tensor, *counts: Tensor | int | None) -> Tensor:
        """Add to the layer's output `y` (..., *output_shape) what the adapters make of its input
        `x`; `counts`: rows of each of stacked experts, as of `ExpertLinear.forward`.
        """
        if self.parts is None:
            return y + self[WHOLE](x, *counts)
        made = {name: adapter(x, *counts) for name, adapter in self.items()}
        return y + self.parts.join(made, y)


def attach(
    network: nn.Module, plan: ParallelPlan, config: LoraConfig, parts: Mapping[str, Parts]
) -> dict[str, Split]:
    """Give the linear layers that `config.targets` names their adapters, on the meta device, and
    freeze all else. Returns the rows of the split table for them.

    `parts`: what layers pack, by the end of their path. ValueError lists targets that match nothing
    or name what can't have adapters.
    """
    problems = config.check()
    linears = {p for p, module in network.named_modules() if _takes_adapters(p, module, plan)}
    chosen = {} if problems else _choose(network, linears, config, parts, problems)
    if problems:
        raise ValueError("\n".join(problems))
    network.requires_grad_(False)
    rows: dict[str, Split] = {}
    for path, names in chosen.items():
        module = network.get_submodule(path)
        assert isinstance(module, (Linear, ExpertLinear))
        split = plan.split_of(f"{path}.weight")
        packed = None if names == (WHOLE,) else _parts_of(path, parts)
        made = {}
        for name in names:
            made[name] = _beside(module, split, config, packed, name)
            of_a, of_b = _rows(split, module.weight.dim(), is_part=packed is not None)
            glob = ".".join("*" if word.isdecimal() else word for word in path.split("."))
            rows[f"{glob}.{ADAPTERS}.{name}.lora_a.weight"] = of_a
            rows[f"{glob}.{ADAPTERS}.{name}.lora_b.weight"] = of_b
        module.adapters = Adapters(made, packed).train(module.training)
    return rows


def _beside(
    module: Linear | ExpertLinear,
    split: Split,
    config: LoraConfig,
    packed: Parts | None,
    name: str,
) -> LowRank | LowRankExperts:
    *shape, in_features = module.weight.shape
    if isinstance(module, Linear):
        layout = Layout.FEATURES if split.role is Role.ROW else Layout.HIDDEN
        output = shape if packed is None else [packed.features(name, shape)]
        return LowRank(in_features, output, config, layout)
    num_experts, *shape = shape
    output = shape if packed is None else [packed.features(name, shape)]
    return LowRankExperts(num_experts, in_features, output, config)


def _rows(base: Split, dims: int, *, is_part: bool) -> tuple[Split, Split]:
    """How A and B are split beside a weight of `dims` dims that is split so."""
    if base.role is Role.EXPERT:
        if base.dim is None:
            return experts(), experts()
        if base.dim % dims == dims - 1:
            return experts(2), experts()
        return experts(), experts(1 if is_part else base.dim)
    if base.role is Role.COLUMN:
        dim = 0 if is_part else base.dim
        assert dim is not None
        return replicated(Gradient.SEQUENCE), column(dim, gather_output=base.gather_output)
    if base.role is Role.ROW:
        return row(), replicated(Gradient.SEQUENCE)
    return replicated(base.gradient), replicated(base.gradient)


def _takes_adapters(path: str, module: nn.Module, plan: ParallelPlan) -> bool:
    kinds = (Linear, ExpertLinear)
    if not any(isinstance(module, k) and type(module).forward is k.forward for k in kinds):
        return False
    return plan.split_of(f"{path}.weight").role is not Role.VOCABULARY


def _parts_of(path: str, parts: Mapping[str, Parts]) -> Parts | None:
    return next((p for end, p in parts.items() if f".{path}".endswith(f".{end}")), None)


def _choose(
    network: nn.Module,
    linears: set[str],
    config: LoraConfig,
    parts: Mapping[str, Parts],
    problems: list[str],
) -> dict[str, tuple[str, ...]]:
    """Path of each chosen layer -> keys of its adapters; appends to `problems`."""
    chosen: dict[str, set[str]] = {}
    for target in config.targets:
        ending, _, part = target.partition(":")
        paths = [path for path in linears if fnmatchcase(f".{path}", f"*.{ending}")]
        if not paths:
            problems.append(_nothing(target, network, linears))
        for path in sorted(paths):
            packed = _parts_of(path, parts)
            names = (WHOLE,) if packed is None else packed.names
            if part and part not in names:
                problems.append(
                    f"lora.targets: {target!r}: in {path} no projection {part!r} has an adapter of"
                    f" its own; there are {list(names)}"
                )
                break
            chosen.setdefault(path, set()).update((part,) if part else names)
    order = [path for path, _ in network.named_modules() if path in chosen]
    return {path: _ordered(path, chosen[path], parts) for path in order}


def _ordered(path: str, names: set[str], parts: Mapping[str, Parts]) -> tuple[str, ...]:
    packed = _parts_of(path, parts)
    return (
        (WHOLE,)
        if WHOLE in names or packed is None
        else tuple(name for name in packed.names if name in names)
    )


def _nothing(target: str, network: nn.Module, linears: set[str]) -> str:
    ending = target.partition(":")[0]
    others = [p for p, _ in network.named_modules() if p and fnmatchcase(f".{p}", f"*.{ending}")]
    if others:
        kind = type(network.get_submodule(others[0])).__name__
        return f"lora.targets: {target!r} names {others[0]}, a {kind}, which can't have an adapter"
    known = sorted({path.rsplit(".", 1)[-1] for path in linears})
    return f"lora.targets: {target!r} matches no linear layer; there are {known}"
