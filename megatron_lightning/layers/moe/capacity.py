"""Which tokens an expert has no room for.

An expert takes `capacity` of all tokens of a micro-batch, over the ranks that hold parts of it, so
that the same ones are dropped in every layout.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_lightning.config.moe import MoEConfig
from megatron_lightning.layers.moe.tokens import RoutedTokens
from megatron_lightning.parallel.axes import MeshAxis
from megatron_lightning.parallel.collectives import all_gather


@torch.no_grad()
def over_capacity(
    probs: Tensor,
    experts: Tensor,
    tokens: RoutedTokens,
    config: MoEConfig,
    capacity: int,
    axis: MeshAxis,
) -> Tensor:
    """(T, K) probabilities and experts of this rank's tokens -> (T, K) bool, True where dropped
    or no token.

    By probability an expert keeps the largest, of equal ones the earlier; by position the first
    tokens.
    """
    local, topk = experts.shape
    places = tokens.places
    experts = tokens.without_padding(experts, config.num_experts)
    probs, experts = all_gather(probs, axis, 0), all_gather(experts, axis, 0)  # (T_all, K)
    expert = experts.flatten()
    order = torch.arange(len(expert), device=expert.device)
    if places is not None:
        order = order.view(-1, topk)[all_gather(places, axis, 0).argsort()].flatten()
    if config.drop_policy == "probability":
        order = order[probs.flatten()[order].argsort(descending=True, stable=True)]
    order = order[expert[order].argsort(stable=True)]  # by expert, best first
    sorted_by = expert[order]
    first = torch.searchsorted(sorted_by, torch.arange(config.num_experts + 1, device=order.device))
    place = torch.empty_like(order)
    place[order] = torch.arange(len(order), device=order.device) - first[sorted_by]
    dropped = (place >= capacity).view_as(experts) | (experts == config.num_experts)
    return dropped.narrow(0, axis.rank * local, local)
