"""Who reads parameters between an optimizer step and the next forward pass.

Updated parameters of sharded optimizers are gathered while the next batch is fetched and its
forward pass begins. The strategy waits before it validates, saves or hands out a state dict; a
user's hook that looks at a weight in between would read an old value. So the gather is only put off
where no such hook exists, or where those that do say that they read none.
"""

from __future__ import annotations

from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import (
    DeviceStatsMonitor,
    EarlyStopping,
    GradientAccumulationScheduler,
    LearningRateMonitor,
    ModelCheckpoint,
    ModelSummary,
    ProgressBar,
    Timer,
)

from megatron_lightning.config.parallel import ParallelConfig
from megatron_lightning.utils.logging import warn_once

HOOKS = (
    "on_train_batch_end",
    "on_train_batch_start",
    "on_train_epoch_end",
    "on_train_epoch_start",
    "on_train_end",
    "on_validation_start",
    "on_validation_epoch_start",
    "on_save_checkpoint",
    "state_dict",
    "on_exception",
)
"""Hooks of callbacks and modules that run while a gather may be under way."""
MODULE_HOOKS = ("optimizer_step", "lr_scheduler_step", "on_before_batch_transfer")

UPDATE_HOOKS = (
    "on_before_backward",
    "on_after_backward",
    "on_before_zero_grad",
    "on_before_optimizer_step",
    "on_validation_batch_start",
    "on_validation_batch_end",
    "on_validation_epoch_end",
    "on_validation_end",
)
"""Further hooks between a save and the next optimizer step, which might change weights."""

GRADIENT_HOOKS = (
    "on_after_backward",
    "on_before_optimizer_step",
    "on_before_zero_grad",
    "on_train_batch_end",
)
"""Hooks of callbacks and modules that might look at `grad` of parameters."""
GRADIENT_MODULE_HOOKS = ("optimizer_step", "optimizer_zero_grad", "configure_gradient_clipping")

READS_NONE = (
    DeviceStatsMonitor,
    EarlyStopping,
    GradientAccumulationScheduler,
    LearningRateMonitor,
    ModelCheckpoint,  # through the strategy, which waits
    ModelSummary,
    ProgressBar,
    Timer,
)
"""Callbacks of Lightning, with their subclasses in Lightning, that read no parameter."""

DECLARATION = "reads_parameters"
"""A callback or module with this attribute set to False reads no parameter in these hooks."""

GRADIENT_DECLARATION = "reads_gradients"
"""The same for `grad` of parameters."""


def may_defer_gather(config: ParallelConfig, trainer: Trainer) -> bool:
    """Return whether parameters may still be on their way when a step has ended."""
    data_parallel = config.data_parallel
    if data_parallel.sharding != "optimizer" or not data_parallel.overlap_param_gather:
        return False
    found = readers(trainer)
    if found:
        warn_once(
            f"data_parallel.overlap_param_gather: {', '.join(found)} may read parameters after a"
            f" step, so that they are gathered at once; set `{DECLARATION} = False` on the class if"
            " it reads none"
        )
    return not found


def may_fold(trainer: Trainer) -> bool:
    """Return whether gradients may stay undivided and unclipped, since only the optimizer reads
    them.
    """
    if trainer.gradient_clip_algorithm == "value":
        return False
    module = trainer.lightning_module
    callbacks = [c for c in trainer.callbacks if not _is_known(c)]  # type: ignore[attr-defined]
    hooks = (*GRADIENT_HOOKS, *GRADIENT_MODULE_HOOKS)
    return not (
        any(_overrides(c, Callback, GRADIENT_HOOKS, GRADIENT_DECLARATION) for c in callbacks)
        or _overrides(module, LightningModule, hooks, GRADIENT_DECLARATION)
    )


def changers(trainer: Trainer) -> list[str]:
    """Names of the callbacks and modules whose hooks may change parameters before the next step."""
    return readers(trainer, UPDATE_HOOKS)


def readers(trainer: Trainer, more_hooks: tuple[str, ...] = ()) -> list[str]:
    """Names of the callbacks and modules whose hooks may read parameters."""
    module = trainer.lightning_module
    found = [
        type(callback).__name__
        for callback in trainer.callbacks  # type: ignore[attr-defined]
        if not _is_known(callback) and _overrides(callback, Callback, (*HOOKS, *more_hooks))
    ]
    if _overrides(module, LightningModule, (*HOOKS, *MODULE_HOOKS, *more_hooks)):
        found.append(type(module).__name__)
    return found


def _is_known(callback: Callback) -> bool:
    ours = type(callback).__module__.partition(".")[0] in ("lightning", "pytorch_lightning")
    return ours and isinstance(callback, READS_NONE)


def _overrides(
    owner: Any, base: type, hooks: tuple[str, ...], declaration: str = DECLARATION
) -> bool:
    if getattr(owner, declaration, True) is False:
        return False
    # Models read no parameter; callbacks ask the strategy for gradients, which sees to them.
    own = (
        "megatron_lightning."
        if declaration == GRADIENT_DECLARATION
        else "megatron_lightning.models."
    )
    return any(hook in vars(owner) or _is_foreign(owner, base, hook, own) for hook in hooks)


def _is_foreign(owner: Any, base: type, hook: str, own: str) -> bool:
    """Whether a hook is neither Lightning's empty one nor one of this package's modules `own`."""
    method = getattr(type(owner), hook, None)
    if method is getattr(base, hook, None):
        return False
    return not getattr(method, "__module__", "").startswith(own)
