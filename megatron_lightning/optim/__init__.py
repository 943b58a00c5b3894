"""Optimizers, schedules and gradient clipping."""

from megatron_lightning.optim.build import build_optimizer
from megatron_lightning.optim.clip import clip_by_value, global_grad_norm
from megatron_lightning.optim.distributed import DistributedOptimizer
from megatron_lightning.optim.local_parts import LocalParts
from megatron_lightning.optim.schedules import (
    LearningRateCurve,
    LearningRateSchedule,
    WeightDecayCurve,
    build_schedule,
)
from megatron_lightning.optim.shards import ParameterShards
from megatron_lightning.utils.gradients import clip_by_norm

__all__ = [
    "DistributedOptimizer",
    "LearningRateCurve",
    "LearningRateSchedule",
    "LocalParts",
    "ParameterShards",
    "WeightDecayCurve",
    "build_optimizer",
    "build_schedule",
    "clip_by_norm",
    "clip_by_value",
    "global_grad_norm",
]
