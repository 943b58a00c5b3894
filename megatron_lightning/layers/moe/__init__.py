"""Mixture of experts: router, balance, dispatch and grouped experts."""

from megatron_lightning.layers.moe.balance import AuxiliaryWeight, attach_loss
from megatron_lightning.layers.moe.dispatcher import (
    Dispatched,
    LocalDispatcher,
    TokenDispatcher,
)
from megatron_lightning.layers.moe.experts import ExpertLinear, GroupedExperts
from megatron_lightning.layers.moe.layer import MoELayer
from megatron_lightning.layers.moe.permute import (
    Order,
    permute,
    permute_probs,
    sort_by_expert,
    unpermute,
)
from megatron_lightning.layers.moe.router import Router
from megatron_lightning.layers.moe.routing import Routing
from megatron_lightning.layers.moe.statistics import RouterStatistics

__all__ = [
    "AuxiliaryWeight",
    "Dispatched",
    "ExpertLinear",
    "GroupedExperts",
    "LocalDispatcher",
    "MoELayer",
    "Order",
    "Router",
    "RouterStatistics",
    "Routing",
    "TokenDispatcher",
    "attach_loss",
    "permute",
    "permute_probs",
    "sort_by_expert",
    "unpermute",
]
