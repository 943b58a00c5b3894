"""Mixture of experts: which layers have experts, how tokens are routed and how load is balanced.

What each option computes, with its source, is in docs/moe.md; the code is in `layers/moe`. Rules
return their violations as sentences: field, value, what would fit.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, get_args

if TYPE_CHECKING:
    from megatron_lightning.config.model import GPTConfig

ScoreFunction = Literal["softmax", "sigmoid", "sqrtsoftplus"]
LoadBalancing = Literal["none", "aux_loss", "seq_aux_loss", "global_aux_loss", "sinkhorn", "forced"]
DropPolicy = Literal["probability", "position"]
RouterDtype = Literal["float32", "float64"]


@dataclass(frozen=True, kw_only=True)
class MoEConfig:
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
    """Fill experts up to their capacity, so that shapes don't depend on routing."""

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
        return [f"moe.{message}" for rule in _RULES for message in rule(self)]


def _sizes(moe: MoEConfig) -> list[str]:
    least = {
        "num_experts": 1,
        "router_topk": 1,
        "ffn_hidden_size": 0,
        "shared_expert_ffn_hidden_size": 0,
        "latent_size": 0,
        "first_dense_layers": 0,
        "router_num_groups": 0,
        "router_group_topk": 0,
        "router_group_best": 0,
    }
    return [
        f"{name}={value} must be at least {minimum}"
        for name, minimum in least.items()
        if (value := getattr(moe, name)) < minimum
    ]


def _topk_within_experts(moe: MoEConfig) -> list[str]:
    if moe.router_topk <= moe.num_experts:
        return []
    return [
        f"router_topk={moe.router_topk} is above num_experts={moe.num_experts}; use at most that"
    ]


def _choices(moe: MoEConfig) -> list[str]:
    choices = {
        "router_score_function": ScoreFunction,
        "router_dtype": RouterDtype,
        "load_balancing": LoadBalancing,
        "drop_policy": DropPolicy,
    }
    return [
        f"{name}={getattr(moe, name)!r} is unknown; use one of {get_args(kind)}"
        for name, kind in choices.items()
        if getattr(moe, name) not in get_args(kind)
    ]


def _pattern(moe: MoEConfig) -> list[str]:
    if moe.layer_pattern and not set(moe.layer_pattern) - {"E", "D"}:
        return []
    return [
        f"layer_pattern={moe.layer_pattern!r} must be letters E (experts) and D (dense), e.g. 'ED'"
    ]


def _groups(moe: MoEConfig) -> list[str]:
    groups, chosen = moe.router_num_groups, moe.router_group_topk
    if groups < 1 or moe.num_experts < 1 or moe.router_topk < 1:
        return (
            []
            if chosen < 1
            else [f"router_group_topk={chosen} needs router_num_groups, which is {groups}"]
        )
    if moe.num_experts % groups:
        fits = [n for n in range(1, moe.num_experts + 1) if moe.num_experts % n == 0]
        return [
            f"router_num_groups={groups} does not divide num_experts={moe.num_experts}; use one of"
            f" {fits}"
        ]
    if not 1 <= chosen <= groups:
        return [f"router_group_topk={chosen} must be in [1, router_num_groups={groups}]"]
    size = moe.num_experts // groups
    if moe.router_group_best > size:
        return [f"router_group_best={moe.router_group_best}: a group has only {size} experts"]
    if moe.router_topk % chosen and not moe.router_group_best:
        fits = [n for n in range(1, groups + 1) if moe.router_topk % n == 0]
        return [
            f"router_group_topk={chosen} does not divide router_topk={moe.router_topk}, whose"
            f" share ranks a group; use one of {fits}, or give router_group_best"
        ]
    if moe.router_topk > chosen * size:
        return [
            f"router_topk={moe.router_topk}: {chosen} groups of {size} experts have only"
            f" {chosen * size}; raise router_group_topk or lower router_topk"
        ]
    return []


def _reals(moe: MoEConfig) -> list[str]:
    not_negative = ("aux_loss_coeff", "z_loss_coeff", "expert_bias_update_rate")
    found = [
        f"{name}={value} must be a finite number of at least 0"
        for name in not_negative
        if not 0 <= (value := getattr(moe, name)) < math.inf
    ]
    factor, capacity = moe.router_topk_scaling_factor, moe.capacity_factor
    if not 0 < factor < math.inf:
        found.append(f"router_topk_scaling_factor={factor} must be a finite number above 0")
    if not 0 <= moe.input_jitter < 1:
        found.append(f"input_jitter={moe.input_jitter} must be in [0, 1)")
    if capacity is not None and not 0 < capacity < math.inf:
        found.append(f"capacity_factor={capacity} must be above 0, or None to drop no token")
    return found


def _router_learns(moe: MoEConfig) -> list[str]:
    soft = moe.router_score_function == "softmax"
    if moe.router_topk > 1 or moe.num_experts == 1:
        return []
    if soft and not moe.router_pre_softmax:
        return [
            "router_topk=1 with softmax over the chosen expert alone: its probability is 1 and the"
            " router would not learn; use router_pre_softmax=True with router_normalize_topk=False"
        ]
    if moe.router_normalize_topk:
        return [
            "router_topk=1 with router_normalize_topk=True: the probability is always 1 and the"
            " router would not learn; use router_normalize_topk=False"
        ]
    return []


def _options_of_others(moe: MoEConfig) -> list[str]:
    found = []
    balanced = moe.load_balancing in ("aux_loss", "seq_aux_loss", "global_aux_loss")
    if moe.aux_loss_coeff > 0 and not balanced:
        found.append(
            f"aux_loss_coeff={moe.aux_loss_coeff} with load_balancing={moe.load_balancing!r}: there"
            " is no auxiliary loss; use aux_loss, seq_aux_loss or global_aux_loss, or 0"
        )
    if moe.router_pre_softmax and moe.router_score_function != "softmax":
        found.append(
            f"router_pre_softmax=True with router_score_function={moe.router_score_function!r}:"
            " such scores are always taken before the choice; leave it False"
        )
    if moe.expert_bias and moe.router_score_function == "softmax" and not moe.router_pre_softmax:
        found.append(
            "expert_bias=True is added to scores before the choice: use router_score_function"
            "='sigmoid', or router_pre_softmax=True"
        )
    if moe.expert_bias and moe.load_balancing in ("sinkhorn", "forced"):
        found.append(
            f"expert_bias=True with load_balancing={moe.load_balancing!r}: both choose the experts;"
            " use one of them"
        )
    if moe.load_balancing == "sinkhorn" and moe.router_num_groups:
        found.append(
            f"load_balancing='sinkhorn' with router_num_groups={moe.router_num_groups}: the"
            " assignment knows no groups; use 0"
        )
    if moe.shared_expert_gate and not moe.shared_expert_ffn_hidden_size:
        found.append("shared_expert_gate=True needs shared_expert_ffn_hidden_size above 0")
    if moe.pad_to_capacity and moe.capacity_factor is None:
        found.append("pad_to_capacity=True needs capacity_factor, e.g. 1.0")
    return found


_RULES: tuple[Callable[[MoEConfig], list[str]], ...] = (
    _sizes,
    _topk_within_experts,
    _choices,
    _pattern,
    _groups,
    _reals,
    _router_learns,
    _options_of_others,
)


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
