"""Rows of the split table for layers with experts.

Router, shared expert's gate and latent projections are whole on every tensor rank and see the own
part of the sequence; the shared expert is an ordinary MLP. Experts are dealt to the expert axes.
"""

from __future__ import annotations

from megatron_lightning.config.model import GPTConfig
from megatron_lightning.config.plan import (
    Gradient,
    Split,
    column,
    experts,
    follows,
    replicated,
    row,
)


def dense_mlp_splits(config: GPTConfig, mlp: str) -> dict[str, Split]:
    """Rows of an MLP whose module's glob is `mlp`."""
    fc1_dim = 1 if config.gated_linear_unit else 0
    splits = {f"{mlp}.linear_fc1.weight": column(fc1_dim), f"{mlp}.linear_fc2.weight": row()}
    if config.add_bias_linear:
        splits[f"{mlp}.linear_fc1.bias"] = follows(fc1_dim)
        splits[f"{mlp}.linear_fc2.bias"] = replicated(Gradient.SEQUENCE)
    return splits


def moe_splits(config: GPTConfig, mlp: str) -> dict[str, Split]:
    """Rows of a layer of experts whose module's glob is `mlp`."""
    moe, sequence = config.moe, replicated(Gradient.SEQUENCE)
    assert moe is not None
    fc1_dim = 2 if config.gated_linear_unit else 1
    splits = {
        f"{mlp}.router.weight": sequence,
        f"{mlp}.experts.linear_fc1.weight": experts(fc1_dim),
        f"{mlp}.experts.linear_fc2.weight": experts(2),
    }
    if moe.router_bias:
        splits[f"{mlp}.router.bias"] = sequence
    if config.add_bias_linear:
        splits[f"{mlp}.experts.linear_fc1.bias"] = experts(fc1_dim)
        splits[f"{mlp}.experts.linear_fc2.bias"] = experts()
    if moe.shared_expert_ffn_hidden_size:
        splits |= dense_mlp_splits(config, f"{mlp}.shared_experts")
    if moe.shared_expert_gate:
        splits[f"{mlp}.shared_expert_gate.weight"] = sequence
    if moe.latent_size:
        splits[f"{mlp}.latent_down.weight"] = splits[f"{mlp}.latent_up.weight"] = sequence
    return splits
