"""What the tables of architectures with experts share: each expert has tensors of its own there,
all of them are stacked here.
"""

from __future__ import annotations

from typing import Any

from megatron_lightning.bridge.mapping import Rule, Stacked
from megatron_lightning.bridge.source_config import SourceConfig
from megatron_lightning.config.model import GPTConfig


def expert_rules(
    config: GPTConfig, there: str, *, gate: str, up: str, down: str, router: str = "gate"
) -> list[Rule]:
    """Router, and experts that are tensors of their own. `there`: the module in a layer; the others
    are names in it or in one of its experts.
    """
    assert config.moe is not None
    ours, theirs = "decoder.layers.{layer}.mlp.", f"model.layers.{{layer}}.{there}."
    count = config.moe.num_experts

    def names(*projections: str) -> tuple[str, ...]:
        return tuple(f"{theirs}experts.{e}.{x}.weight" for e in range(count) for x in projections)

    both, inner = Stacked(count, Stacked(2)), Stacked(count)
    return [
        Rule(f"{ours}router.weight", f"{theirs}{router}.weight"),
        Rule(f"{ours}experts.linear_fc1.weight", names(gate, up), both),
        Rule(f"{ours}experts.linear_fc2.weight", names(down), inner),
    ]


def num_experts(source: SourceConfig, *names: str) -> int:
    """The number of experts, by the first of these fields that the file has."""
    found = {name: value for name in names if (value := source.get(name)) is not None}
    if len(set(found.values())) > 1:
        raise source.refuse(next(iter(found)), f"the file says {found}")
    return source.need(next(iter(found), names[0]))


def balancing(source: SourceConfig) -> None:
    """Fields of the auxiliary loss of transformers, which counts all layers together and so is
    another than ours. They don't change logits; whoever trains sets `moe.aux_loss_coeff`.
    """
    source.number("router_aux_loss_coef")
    source.flag("output_router_logits", False)


def write_balancing() -> dict[str, Any]:
    """The counterpart of `balancing`: none."""
    return {"output_router_logits": False, "router_aux_loss_coef": 0.0}
