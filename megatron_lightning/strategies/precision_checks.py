"""What a precision can't do with a module or a device, known before a start."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from lightning.pytorch import LightningModule, Trainer

from megatron_lightning.precision.fp8 import blocks_problem
from megatron_lightning.precision.plugin import MegatronPrecision

if TYPE_CHECKING:
    from megatron_lightning.strategies.mesh_strategy import MeshStrategy


def precision_problems(
    strategy: MeshStrategy, trainer: Trainer, module: LightningModule
) -> Iterator[str]:
    """Yield explained problems of the Trainer's precision; needs no process group."""
    yield from _quantization(strategy, module)
    plugin = strategy.precision_plugin
    scales = isinstance(plugin, MegatronPrecision) and plugin.loss_scaler is not None
    if scales and not module.automatic_optimization:
        yield (
            "automatic_optimization=False with precision='16-mixed': the loss is scaled, and steps"
            " are skipped, where the strategy runs them; use automatic optimization, or"
            " precision='bf16-mixed'"
        )


_WITH_MASTERS = ("bf16-mixed", "16-mixed")


def _quantization(strategy: MeshStrategy, module: LightningModule) -> Iterator[str]:
    config = strategy.config.quantization
    if config is None or config.check():
        return
    if not config.simulate and strategy.root_device.type != "cuda":
        yield (
            f"quantization.recipe={config.recipe!r} with accelerator"
            f" {strategy.root_device.type!r}: there are no FP8 products on it; set simulate=True,"
            " which gives the recipe's numbers on any device"
        )
    elif not config.simulate and config.recipe == "fp8_blockwise":
        problem = blocks_problem()
        if problem is not None:
            yield f"quantization.recipe='fp8_blockwise': {problem}"
    if config.recipe == "fp8_delayed" and not module.automatic_optimization:
        yield (
            "automatic_optimization=False with quantization.recipe='fp8_delayed': histories of"
            " largest values are kept where the strategy runs the steps; use automatic"
            " optimization, or recipe='fp8_tensorwise', which scales tensors by themselves"
        )
    precision = str(strategy.precision_plugin.precision)
    sharding = strategy.config.data_parallel.sharding
    if config.fp8_gather and (sharding != "optimizer" or precision not in _WITH_MASTERS):
        yield (
            f"quantization.fp8_gather=True with data_parallel.sharding={sharding!r} and"
            f" precision={precision!r}: the sharded optimizer rounds from its masters; use"
            f" sharding='optimizer' and one of {_WITH_MASTERS}, or fp8_gather=False"
        )
    if precision == "64-true":
        yield (
            "quantization with precision='64-true': its products are summed in float32; use"
            " 'bf16-mixed', '16-mixed' or '32-true'"
        )
