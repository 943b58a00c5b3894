"""What sharded optimizer state, or sharded parameters, can't do of what Lightning offers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import (
    BaseFinetuning,
    ModelPruning,
    StochasticWeightAveraging,
    WeightAveraging,
)

from megatron_lightning.parallel.fsdp import unit_problems

if TYPE_CHECKING:
    from megatron_lightning.strategies.mesh_strategy import MeshStrategy


def sharding_problems(
    strategy: MeshStrategy, trainer: Trainer, module: LightningModule
) -> Iterator[str]:
    """Yield explained problems of `data_parallel.sharding`; needs no process group."""
    sharding = strategy.config.data_parallel.sharding
    if sharding == "none":
        return
    if not module.automatic_optimization:
        yield (
            f"automatic_optimization=False with data_parallel.sharding={sharding!r}: gradients are"
            " reduced to parts once for each optimizer step, which manual optimization does not"
            " announce; use automatic optimization, or sharding='none'"
        )
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if isinstance(callback, BaseFinetuning):
            yield (
                f"callback {type(callback).__name__} with data_parallel.sharding={sharding!r}: it"
                " looks for the module's parameters in the optimizer, which holds parts of them;"
                " freeze in configure_model, or use sharding='none'"
            )
    if sharding == "fsdp":
        yield from _whole_parameter_callbacks(trainer)
        if strategy.user_plan is None and not hasattr(module, "parallel_plan"):
            yield from unit_problems(module)


def _whole_parameter_callbacks(trainer: Trainer) -> Iterator[str]:
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if isinstance(callback, (ModelPruning, StochasticWeightAveraging, WeightAveraging)):
            yield (
                f"callback {type(callback).__name__} with data_parallel.sharding='fsdp': it works"
                " on whole parameters, and a rank holds parts of them; use sharding='optimizer'"
            )
