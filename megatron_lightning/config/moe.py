"""Mixture of experts: which layers have experts, how tokens are routed and how load is balanced.

What each option computes, with its source, is in docs/moe.md; the code is in `layers/moe`, and the
rules are in `config/moe_rules.py`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from megatron_lightning.config.moe_rules import (
    MOE_RULES,
    DropPolicy,
    LoadBalancing,
    RouterDtype,
    ScoreFunction,
)
from megatron_lightning.config.names import NamesFields

if TYPE_CHECKING:
    from megatron_lightning.config.model import GPTConfig


@dataclass(frozen=True, kw_only=True)
class MoEConfig(NamesFields):
    """Experts in place of the MLP. Activation, gate and biases are those of the model's MLP."""

    num_experts: int
    """Experts E of a layer, over all ranks."""
    router_topk: int = 2
    """Experts K that a token is sent to."""
    ffn_hidden_size: int = 0
    """Width F of an expert; 0: the model's ffn_hidden_size."""
    shared_expert_ffn_hidden_size: int = 0
    """Width of the MLP that every token passes beside its experts (of all shared experts
    together); 0: none.
    """
    shared_expert_gate: bool = False
    """The shared expert's output is multiplied by sigmoid(w x), a number for each token."""
    latent_size: int = 0
    """Experts work in a hidden size of this, with a projection down before and up after all of
    them; 0: in the model's.
    """
    first_dense_layers: int = 0
    """Leading layers that keep the dense MLP."""
    layer_pattern: str = "E"
    """One letter a layer, repeated over the layers: E experts, D dense; "ED" puts experts into
    layers 0, 2, 4...
    """
    router_score_function: ScoreFunction = "softmax"
    """From logits to scores."""
    router_pre_softmax: bool = False
    """softmax only: over all experts, before the top K are taken; else over the K."""
    router_normalize_topk: bool = True
    """Divide a token's K probabilities by their sum (softmax over the K has sum 1 anyway)."""
    router_num_groups: int = 0
    """Groups of neighbouring experts; a token goes to experts of router_group_topk of them; 0: no
    groups.
    """
    router_group_topk: int = 0
    """Groups that a token may be sent to: those with the largest sums of their best scores."""
    router_group_best: int = 0
    """How many scores of a group are summed up; 0: router_topk / router_group_topk, as Megatron
    does. Models of transformers have 2.
    """
    router_topk_scaling_factor: float = 1.0
    """Factor on the probabilities, after normalisation."""
    router_bias: bool = False
    """The router's logits have a trained bias."""
    router_dtype: RouterDtype = "float32"
    """Dtype of logits, scores and losses of the router, whatever the model's."""
    input_jitter: float = 0.0
    """In training the router sees its input times uniform numbers of [1 - j, 1 + j]."""
    load_balancing: LoadBalancing = "aux_loss"
    """Auxiliary loss over a micro-batch, over each of its sequences, or with loads of the whole
    global batch; sinkhorn: experts by a balanced assignment; forced: the same number of tokens for
    every expert, whatever the router says (benchmarks).
    """
    aux_loss_coeff: float = 0.0
    """Weight of the auxiliary loss beside the model's."""
    z_loss_coeff: float = 0.0
    """Weight of the mean squared log-sum-exp of the logits."""
    expert_bias: bool = False
    """A bias on scores that only chooses experts, balanced without a loss: after each step it moves
    towards experts that had too few tokens.
    """
    expert_bias_update_rate: float = 1e-3
    """How far expert_bias moves in a step."""
    capacity_factor: float | None = None
    """An expert takes at most this times its even share of a micro-batch's tokens, the others pass
    it by; None: all (dropless).
    """
    drop_policy: DropPolicy = "probability"
    """Which tokens an expert keeps: those with the largest probabilities, or the first in the
    sequence.
    """
    pad_to_capacity: bool = False
    """Fill experts up to their capacity, so that shapes don't depend on routing; for batches of
    equal lengths, and with experts on several ranks by all_to_all (docs/moe.md).
    """

    def is_moe_layer(self, layer: int) -> bool:
        """True when layer number `layer` (from 0) has experts."""
        letter = self.layer_pattern[layer % len(self.layer_pattern)]
        return layer >= self.first_dense_layers and letter == "E"

    def capacity(self, num_tokens: int) -> int | None:
        """Tokens that an expert takes of a micro-batch of `num_tokens`; None: all."""
        if self.capacity_factor is None:
            return None
        share = num_tokens * self.router_topk / self.num_experts
        return min(num_tokens, math.ceil(share * self.capacity_factor))

    @property
    def has_losses(self) -> bool:
        """Whether routers have a loss of their own."""
        return self.aux_loss_coeff > 0 or self.z_loss_coeff > 0

    def check(self) -> list[str]:
        """Every violated rule as a sentence with field, value and remedy; empty when all is
        well.
        """
        return [f"moe.{message}" for rule in MOE_RULES for message in rule(self)]


def moe_problems(config: GPTConfig) -> list[str]:
    """What is wrong with a model's experts, as sentences; none without experts."""
    moe = config.moe
    if moe is None:
        return []
    found = moe.check()
    if not found and not any(moe.is_moe_layer(layer) for layer in range(config.num_layers)):
        found.append(
            f"moe.first_dense_layers={moe.first_dense_layers} with layer_pattern="
            f"{moe.layer_pattern!r}: none of the num_layers={config.num_layers} layers has experts;"
            " use moe=None for a dense model"
        )
    return found


def moe_weights(config: GPTConfig) -> int:
    """Weights of all experts, router and projections of one layer, without biases."""
    return _weights(config, experts=_moe(config).num_experts)


def moe_matmul_weights(config: GPTConfig) -> int:
    """Weights that a token meets in one layer: its own experts', and all others."""
    return _weights(config, experts=_moe(config).router_topk)


def moe_biases(config: GPTConfig) -> int:
    """Biases of one layer's experts, shared expert and router."""
    moe = _moe(config)
    halves = 2 if config.gated_linear_unit else 1
    count = moe.num_experts if moe.router_bias else 0
    if config.add_bias_linear:
        width, shared = expert_width(config), moe.shared_expert_ffn_hidden_size
        inner = moe.latent_size or config.hidden_size
        count += moe.num_experts * (halves * width + inner)
        count += halves * shared + config.hidden_size if shared else 0
    return count


def expert_width(config: GPTConfig) -> int:
    """Width F of one expert."""
    return _moe(config).ffn_hidden_size or config.ffn_hidden_size


def _weights(config: GPTConfig, *, experts: int) -> int:
    moe, hidden = _moe(config), config.hidden_size
    matrices = 3 if config.gated_linear_unit else 2
    inner = moe.latent_size or hidden
    return (
        experts * matrices * inner * expert_width(config)
        + moe.num_experts * hidden
        + matrices * hidden * moe.shared_expert_ffn_hidden_size
        + (hidden if moe.shared_expert_gate else 0)
        + 2 * moe.latent_size * hidden
    )


def _moe(config: GPTConfig) -> MoEConfig:
    assert config.moe is not None, "a dense model has no experts"
    return config.moe
