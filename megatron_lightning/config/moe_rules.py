"""The choices that a MoEConfig offers, and one small function for each rule about its values.

A rule returns its violations as sentences: field, value, what would fit. Pure, no torch.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Literal, get_args

if TYPE_CHECKING:
    from megatron_lightning.config.moe import MoEConfig

ScoreFunction = Literal["softmax", "sigmoid", "sqrtsoftplus"]
LoadBalancing = Literal["none", "aux_loss", "seq_aux_loss", "global_aux_loss", "sinkhorn", "forced"]
DropPolicy = Literal["probability", "position"]
RouterDtype = Literal["float32", "float64"]


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
        of_groups = {"router_group_topk": chosen, "router_group_best": moe.router_group_best}
        return [
            f"{name}={value} needs router_num_groups, which is {groups}"
            for name, value in of_groups.items()
            if value > 0
        ]
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
    normalized = moe.router_score_function == "softmax" and not moe.router_pre_softmax
    if normalized and not moe.router_normalize_topk and moe.router_topk > 1:
        found.append(
            "router_normalize_topk=False with softmax over the chosen experts, whose sum is 1"
            " anyway: use router_pre_softmax=True, or leave it True"
        )
    if moe.load_balancing == "forced" and moe.router_num_groups:
        found.append(
            f"load_balancing='forced' with router_num_groups={moe.router_num_groups}: experts are"
            " dealt out and groups are not looked at; use 0"
        )
    if moe.drop_policy != "probability" and moe.capacity_factor is None:
        found.append(
            f"drop_policy={moe.drop_policy!r} without capacity_factor: nothing is dropped; give"
            " one, e.g. 1.0"
        )
    if moe.shared_expert_gate and not moe.shared_expert_ffn_hidden_size:
        found.append("shared_expert_gate=True needs shared_expert_ffn_hidden_size above 0")
    if moe.pad_to_capacity and moe.capacity_factor is None:
        found.append("pad_to_capacity=True needs capacity_factor, e.g. 1.0")
    return found


MOE_RULES: tuple[Callable[[MoEConfig], list[str]], ...] = (
    _sizes,
    _topk_within_experts,
    _choices,
    _pattern,
    _groups,
    _reals,
    _router_learns,
    _options_of_others,
)
