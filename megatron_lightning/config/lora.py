"""Low-rank adapters (LoRA, arXiv 2106.09685): which layers get them, and their numbers."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from megatron_lightning.config.field_types import type_problems
from megatron_lightning.config.names import NamesFields

ADAPTERS = "adapters"
"""Name under which a linear layer holds its adapters, in the names of their parameters."""

DEFAULT_TARGETS = ("linear_*",)
"""All linear layers of attention and MLP, experts included."""


def is_adapter(name: str) -> bool:
    """Whether a parameter of that name belongs to an adapter."""
    return f".{ADAPTERS}." in name


@dataclass(frozen=True, kw_only=True)
class LoraConfig(NamesFields):
    """y = W x + scale * B (A dropout(x)) in chosen linear layers; A and B alone are trained."""

    rank: int = 8
    """Inner size of each pair A [rank, in], B [out, rank]."""
    alpha: float = 16.0
    """The product is scaled by alpha / rank."""
    targets: tuple[str, ...] = DEFAULT_TARGETS
    """Linear layers by the end of their path, globs allowed: `linear_qkv`, `mlp.linear_fc1`,
    `layers.0.*.linear_proj`. A part of a packed one by a colon: `linear_qkv:query`, `:key`,
    `:value`, `linear_fc1:gate`, `:up`."""
    dropout: float = 0.0
    """Probability with which elements of an adapter's input are dropped in training."""
    rank_stabilised: bool = False
    """Scale by alpha / sqrt(rank) (rsLoRA, arXiv 2312.03732)."""
    joined: bool | None = None
    """True: one pair for queries, keys and values together, and for gate and up; False: one for
    each. None: as the imported model has its projections, and one for each where none was
    imported."""
    checkpoint: Literal["all", "adapters"] = "all"
    """What a checkpoint of a run holds of the weights: all, or adapters alone; then the base has
    to be at hand when it is loaded."""

    @property
    def scale(self) -> float:
        """Factor on the product of A and B."""
        return self.alpha / (self.rank**0.5 if self.rank_stabilised else self.rank)

    def check(self) -> list[str]:
        """Every violation as one explained sentence; an empty list when there is none."""
        if wrong := type_problems(self):
            return [f"lora.{problem}" for problem in wrong]
        errors = []
        if self.rank < 1:
            errors.append(f"lora.rank={self.rank}: must be at least 1; 8 to 64 are usual")
        if not 0 < self.alpha < math.inf:
            errors.append(
                f"lora.alpha={self.alpha}: must be > 0 and finite; once or twice the rank is usual"
            )
        if not 0 <= self.dropout < 1:
            errors.append(f"lora.dropout={self.dropout}: must lie in [0, 1)")
        if not self.targets:
            errors.append("lora.targets=(): name the layers, e.g. linear_qkv, linear_proj")
        if isinstance(self.targets, str):
            errors.append(f"lora.targets={self.targets!r}: give a list of names")
        if self.checkpoint not in ("all", "adapters"):
            errors.append(f"lora.checkpoint={self.checkpoint!r}: choose 'all' or 'adapters'")
        return errors
