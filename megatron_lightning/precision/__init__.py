"""Precision policies, master weights, optimizer state, and the Lightning plugin."""

from megatron_lightning.precision.loss_scale import LossScaler
from megatron_lightning.precision.masters import MasterParameters
from megatron_lightning.precision.plugin import MegatronPrecision, requested_precision
from megatron_lightning.precision.policy import POLICIES, PrecisionPolicy, policy_for
from megatron_lightning.precision.state import (
    check_elementwise,
    discard_state,
    is_elementwise,
    materialise_state,
    optimizer_state_tensors,
)

__all__ = [
    "POLICIES",
    "LossScaler",
    "MasterParameters",
    "MegatronPrecision",
    "PrecisionPolicy",
    "check_elementwise",
    "discard_state",
    "is_elementwise",
    "materialise_state",
    "optimizer_state_tensors",
    "policy_for",
    "requested_precision",
]
