"""From a dense model to one with experts: sparse upcycling (arXiv 2212.05055, 2410.07524).

Every expert of a layer begins as a copy of the layer's MLP, and the router is drawn. A token's
weights add up to 1 (`router_normalize_topk` with a scaling factor of 1), so the model begins with
the dense one's logits, whatever the router chooses, as long as no token is dropped.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron_lightning.config.model import GPTConfig
from megatron_lightning.config.moe import MoEConfig
from megatron_lightning.layers.given import ValueSource
from megatron_lightning.layers.moe.router import router_initials
from megatron_lightning.models.gpt import GPTModel

_EXPERTS = ".mlp.experts."
_ROUTER = ".mlp.router."


def upcycle(dense: GPTModel, moe: MoEConfig, *, seed: int = 0, **arguments: Any) -> GPTModel:
    """Make a model with experts from a dense one.

    `dense` holds its weights (`load_from_checkpoint`), or knows where they are (`from_hf`): then
    each rank reads its part when the network is built. `seed`: of the routers. `arguments` go to
    the constructor of the new model, after its config. ValueError names what has no source in the
    dense model.
    """
    config = dense.config.with_changes(moe=moe)
    problems = _problems(dense.config, moe) + config.check()
    if problems:
        raise ValueError("\n- ".join(["the model can't be upcycled:", *problems]))
    made = type(dense)(config, **arguments)
    source = dense.initial_values if dense.network is None else None
    made.initial_values = UpcycledValues(source or HeldValues(_parameters(dense)), config, seed)
    return made


def _problems(dense: GPTConfig, moe: MoEConfig) -> list[str]:
    found = []
    if dense.moe is not None:
        found.append(f"the model has {dense.moe.num_experts} experts already; give a dense one")
    if moe.ffn_hidden_size not in (0, dense.ffn_hidden_size):
        found.append(
            f"moe.ffn_hidden_size={moe.ffn_hidden_size}: an expert is a copy of an MLP of width"
            f" {dense.ffn_hidden_size}; use 0"
        )
    for name in ("latent_size", "shared_expert_ffn_hidden_size"):
        if size := getattr(moe, name):
            found.append(f"moe.{name}={size}: the dense model has nothing to copy there; use 0")
    return found


def _parameters(dense: GPTModel) -> dict[str, Tensor]:
    dense.configure_model()
    prefix, shapes = f"{dense.network_attribute}.", dense.global_shapes()
    return {
        name.removeprefix(prefix): parameter.detach()[tuple(map(slice, shapes[name]))]
        for name, parameter in dense.canonical_parameters().items()
    }


@dataclass(frozen=True)
class HeldValues:
    """Whole tensors in memory, by name relative to the network (see `ValueSource`)."""

    tensors: Mapping[str, Tensor]

    def gives(self, name: str) -> bool:
        """See `ValueSource.gives`."""
        return name in self.tensors

    @torch.no_grad()
    def fill(self, target: Tensor, name: str, offsets: Sequence[int], sizes: Sequence[int]) -> None:
        """See `ValueSource.fill`."""
        box = tuple(slice(o, o + s) for o, s in zip(offsets, sizes, strict=True))
        target.copy_(self.tensors[name][box])


@dataclass(frozen=True)
class UpcycledValues:
    """Values of a model with experts from those of a dense one (see `ValueSource`)."""

    dense: ValueSource
    config: GPTConfig
    """Of the model with experts."""
    seed: int

    def gives(self, name: str) -> bool:
        """See `ValueSource.gives`."""
        return _ROUTER not in name and self.dense.gives(name.replace(_EXPERTS, ".mlp."))

    @torch.no_grad()
    def fill(self, target: Tensor, name: str, offsets: Sequence[int], sizes: Sequence[int]) -> None:
        """See `ValueSource.fill`."""
        if _ROUTER in name:
            self._draw_router(target, name, offsets, sizes)
        elif _EXPERTS in name:
            dense = name.replace(_EXPERTS, ".mlp.")
            if len(target):
                self.dense.fill(target[0], dense, offsets[1:], sizes[1:])
                target[1:] = target[0]
        else:
            self.dense.fill(target, name, offsets, sizes)

    def _draw_router(
        self, target: Tensor, name: str, offsets: Sequence[int], sizes: Sequence[int]
    ) -> None:
        assert self.config.moe is not None
        kind = name.rpartition(".")[2]
        shape = (self.config.moe.num_experts, self.config.hidden_size)[: target.dim()]
        router_initials(self.config)[kind].fill(
            target, seed=self.seed, name=name, global_shape=shape, offsets=offsets, sizes=sizes
        )
