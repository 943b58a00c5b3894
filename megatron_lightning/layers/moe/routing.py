"""From router logits to experts and probabilities: plain functions of tensors.

Scores and top-k as in Switch Transformers (arXiv 2101.03961) and Mixtral (arXiv 2401.04088);
groups, sigmoid scores and the bias that only chooses as in DeepSeek-V3 (arXiv 2412.19437); balanced
assignment by Sinkhorn iterations as in arXiv 2202.01169. The formulas are listed in docs/moe.md.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_lightning.config.moe import MoEConfig
from megatron_lightning.parallel.axes import MeshAxis
from megatron_lightning.parallel.collectives import all_gather

SINKHORN_ITERATIONS = 50
_TINY = 1e-20


@dataclass(frozen=True, kw_only=True, eq=False)
class Routing:
    """Where the tokens of a rank go."""

    probs: Tensor
    """(T, K) weights of the experts' outputs, in the router's dtype, with gradient."""
    experts: Tensor
    """(T, K) int64 global numbers of the experts; a token's K are distinct."""
    dropped: Tensor | None = None
    """(T, K) bool, True where the expert has no room left; None: dropless."""
    capacity: int | None = None
    """Tokens for which every expert is filled up (pad_to_capacity); None: as many as come."""


def scores_of(logits: Tensor, config: MoEConfig) -> Tensor:
    """(T, E) logits -> scores of all experts."""
    if config.router_score_function == "sigmoid":
        return torch.sigmoid(logits)
    if config.router_score_function == "sqrtsoftplus":
        return F.softplus(logits).sqrt()
    return torch.softmax(logits, dim=-1)


def choose(selection: Tensor, config: MoEConfig) -> Tensor:
    """(T, E) values, larger is better -> (T, K) experts, best first."""
    if config.router_num_groups > 1:
        selection = _within_groups(selection, config)
    return selection.topk(config.router_topk, dim=-1).indices


def _within_groups(selection: Tensor, config: MoEConfig) -> Tensor:
    """Values of experts outside of each token's best groups become -inf."""
    groups, chosen = config.router_num_groups, config.router_group_topk
    grouped = selection.unflatten(-1, (groups, -1))  # (T, groups, E/groups)
    count = config.router_group_best or config.router_topk // chosen
    best = grouped.topk(count, dim=-1).values.sum(-1)  # (T, groups)
    outside = torch.ones_like(best, dtype=torch.bool)
    outside.scatter_(-1, best.topk(chosen, dim=-1).indices, False)
    return grouped.masked_fill(outside.unsqueeze(-1), float("-inf")).flatten(-2)


def evenly(num_tokens: int, config: MoEConfig, device: torch.device) -> Tensor:
    """(T, K) experts such that all get the same number of tokens, whatever the router says."""
    stride = config.num_experts // config.router_topk
    token = torch.arange(num_tokens, device=device).unsqueeze(1)
    choice = torch.arange(config.router_topk, device=device) * stride
    return (token + choice) % config.num_experts


def sinkhorn(logits: Tensor, axis: MeshAxis, padding: Tensor | None = None) -> Tensor:
    """(T, E) logits -> log of a matrix whose rows have equal sums, and whose columns have.

    The tokens of all ranks of `axis` are rows of one matrix, without those that `padding` (T,) bool
    marks. A fixed number of iterations, so that
    every layout does the same and the host waits for nothing.
    """
    across = torch.zeros(logits.shape[1], dtype=logits.dtype, device=logits.device)
    for _ in range(SINKHORN_ITERATIONS):
        down = -torch.logsumexp(logits + across, dim=1, keepdim=True)  # (T, 1)
        scaled = logits + down
        if padding is not None:
            scaled = scaled.masked_fill(padding.unsqueeze(1), -torch.inf)
        across = -_log_sum_rows(scaled, axis)  # (E,)
    return logits + down + across


def _log_sum_rows(values: Tensor, axis: MeshAxis) -> Tensor:
    local = torch.logsumexp(values, dim=0, keepdim=True)  # (1, E)
    return torch.logsumexp(all_gather(local, axis, 0), dim=0)


def probabilities(logits: Tensor, experts: Tensor, config: MoEConfig) -> Tensor:
    """Weights (T, K) of the chosen experts."""
    if config.router_score_function == "softmax" and not config.router_pre_softmax:
        probs = torch.softmax(logits.gather(1, experts), dim=-1)
    else:
        probs = scores_of(logits, config).gather(1, experts)
        if config.router_normalize_topk:
            probs = probs / (probs.sum(-1, keepdim=True) + _TINY)
    factor = config.router_topk_scaling_factor
    return probs if factor == 1.0 else probs * factor


def balance_scores(logits: Tensor, config: MoEConfig) -> Tensor:
    """(T, E) scores that add up to 1 for each token: what auxiliary losses take."""
    scores = scores_of(logits, config)
    if config.router_score_function == "softmax":
        return scores
    return scores / (scores.sum(-1, keepdim=True) + _TINY)


def chosen_mask(experts: Tensor, num_experts: int) -> Tensor:
    """(T, K) experts -> (T, E) bool."""
    mask = torch.zeros(len(experts), num_experts, dtype=torch.bool, device=experts.device)
    return mask.scatter_(1, experts, True)
