"""Begins what updates parameters, at the start of training."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lightning.pytorch import Trainer

from megatron_lightning.precision.plugin import MegatronPrecision
from megatron_lightning.runtime.update import ParameterUpdate
from megatron_lightning.strategies.readers import changers, may_defer_gather, may_fold

if TYPE_CHECKING:
    from megatron_lightning.strategies.model_strategy import ModelStrategy


def begin_update(
    strategy: ModelStrategy, plugin: MegatronPrecision, trainer: Trainer
) -> ParameterUpdate:
    """Make it for the strategy's optimizers, and let the precision plugin know."""
    suspects = changers(trainer)
    module = trainer.lightning_module
    if not module.automatic_optimization:
        suspects.append(f"{type(module).__name__}.training_step")
    update = ParameterUpdate(
        strategy.parallel_model,
        strategy.mesh,
        strategy.config,
        plugin.policy,
        strategy.optimizers,
        seed=strategy.seed,
        defer=may_defer_gather(strategy.config, trainer),
        fold=may_fold(trainer),
        suspects=suspects,
    )
    plugin.fold_fn, plugin.before_step_fn = update.fold, update.before_step
    return update
