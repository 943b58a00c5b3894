"""What a precision can't do with a module or a device, known before a start."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from lightning.pytorch import LightningModule, Trainer

from megatron_lightning.precision.plugin import MegatronPrecision

if TYPE_CHECKING:
    from megatron_lightning.strategies.mesh_strategy import MeshStrategy


def precision_problems(
    strategy: MeshStrategy, trainer: Trainer, module: LightningModule
) -> Iterator[str]:
    """Yield explained problems of the Trainer's precision; needs no process group."""
    plugin = strategy.precision_plugin
    scales = isinstance(plugin, MegatronPrecision) and plugin.loss_scaler is not None
    if scales and not module.automatic_optimization:
        yield (
            "automatic_optimization=False with precision='16-mixed': the loss is scaled, and steps"
            " are skipped, where the strategy runs them; use automatic optimization, or"
            " precision='bf16-mixed'"
        )
