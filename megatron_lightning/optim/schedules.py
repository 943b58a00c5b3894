"""Learning rate and weight decay as functions of the position in a run, and the torch scheduler
that writes them.

The formulas are those of Megatron-LM's parameter scheduler: linear warm-up, then constant, linear,
cosine, inverse square root, or WSD (warm-up, stable, decay; arXiv 2404.06395). A position is a
number of steps, or of samples; one step of a run measured in samples moves the position by the
global batch size of that step, which may change during the run and when it is resumed.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from megatron_lightning.config.training import (
    DecayStyle,
    OptimizerConfig,
    SchedulerConfig,
    WeightDecayStyle,
    WsdDecayStyle,
)

WEIGHT_DECAY_GROUP_KEY = "decays"
UnitsAfter = Callable[[int, int], int]
"""(steps, units before them) -> units after them."""


@dataclass(frozen=True, kw_only=True)
class LearningRateCurve:
    """Learning rate at a position; all lengths in the same unit as the position."""

    max_lr: float
    min_lr: float = 0.0
    init_lr: float = 0.0
    warmup: int = 0
    decay: int
    """Position at which `min_lr` is reached, warm-up included."""
    style: DecayStyle = "cosine"
    wsd_decay: int | None = None
    """Length of WSD's final decay."""
    wsd_style: WsdDecayStyle = "exponential"

    def __call__(self, position: int) -> float:
        """Return the learning rate of the step that begins at `position`."""
        if self.warmup > 0 and position <= self.warmup:
            return self.init_lr + (self.max_lr - self.init_lr) * position / self.warmup
        if self.style == "constant":
            return self.max_lr
        if position > self.decay:
            return self.min_lr
        if self.style == "inverse_square_root":
            warmup, position = max(self.warmup, 1), max(position, 1)
            return max(self.min_lr, self.max_lr * warmup**0.5 / position**0.5)
        return self.min_lr + self._share(position) * (self.max_lr - self.min_lr)

    def _share(self, position: int) -> float:
        """Share of the way from `min_lr` to `max_lr`, 1 at the end of the warm-up."""
        if self.style == "wsd":
            assert self.wsd_decay is not None
            begin = self.decay - self.wsd_decay
            return (
                1.0
                if position <= begin
                else _wsd_share((position - begin) / self.wsd_decay, self.wsd_style)
            )
        ratio = (position - self.warmup) / (self.decay - self.warmup)
        return 1.0 - ratio if self.style == "linear" else 0.5 * (math.cos(math.pi * ratio) + 1.0)


def _wsd_share(ratio: float, style: WsdDecayStyle) -> float:
    if style == "linear":
        return 1.0 - ratio
    if style == "cosine":
        return 0.5 * (math.cos(math.pi * ratio) + 1.0)
    if style == "exponential":
        return 2.0 * 0.5**ratio - 1.0
    return 1.0 - ratio**0.5


@dataclass(frozen=True, kw_only=True)
class WeightDecayCurve:
    """Weight decay at a position: from `start` to `end` over `length`, then `end`."""

    start: float
    end: float
    length: int
    style: WeightDecayStyle = "constant"

    def __call__(self, position: int) -> float:
        """Return the weight decay of the step that begins at `position`."""
        if position > self.length or self.style == "constant":
            return self.end
        ratio = position / self.length
        share = ratio if self.style == "linear" else 0.5 * (math.cos(math.pi * (1.0 - ratio)) + 1.0)
        return self.start + share * (self.end - self.start)


class LearningRateSchedule(LRScheduler):
    """Writes both curves into an optimizer's groups, once a step (Lightning: `interval: step`).

    A group whose own learning rate differs from the curve's peak keeps that ratio throughout. The
    weight-decay curve goes to groups marked `decays` (those of `build_optimizer`), else to groups
    with a non-zero weight decay. Its state is the position alone: after a resume the curves are
    those of the current configuration.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        learning_rate: LearningRateCurve,
        weight_decay: WeightDecayCurve | None = None,
        *,
        units_after: UnitsAfter | None = None,
    ) -> None:
        self.learning_rate = learning_rate
        self.weight_decay = weight_decay
        self._units_after = units_after
        self._known = (0, 0)  # steps, and the units that they took
        for group in optimizer.param_groups:
            group.setdefault(WEIGHT_DECAY_GROUP_KEY, group.get("weight_decay", 0.0) != 0.0)
        super().__init__(optimizer)

    @property
    def position(self) -> int:
        """Units (steps or samples) taken so far."""
        if self._units_after is None:
            return self.last_epoch
        steps, units = self._known
        return self._units_after(self.last_epoch - steps, units)

    def get_lr(self) -> list[float]:
        """Return each group's learning rate at the current position."""
        lr, peak = self.learning_rate(self.position), self.learning_rate.max_lr
        return [
            lr if base == peak or not peak else lr * base / peak for base in self._group_peaks()
        ]

    def step(self, epoch: int | None = None) -> None:
        """Move on by one optimizer step and write learning rate and weight decay."""
        super().step(epoch)
        self._write_weight_decay()

    def state_dict(self) -> dict[str, Any]:
        """Return the position, in optimizer steps and, where lengths are in samples, in samples."""
        state = {"last_epoch": self.last_epoch, "step_count": self._step_count}
        return state if self._units_after is None else {**state, "samples": self.position}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go to a saved position and write the values that hold there."""
        self.last_epoch = state_dict["last_epoch"]
        self._step_count = state_dict["step_count"]
        # batches may have had another size in the run that saved
        samples = state_dict.get("samples")
        self._known = (0, 0) if samples is None else (self.last_epoch, samples)
        rates = self.get_lr()
        self._last_lr = list(rates)
        for group, lr in zip(self.optimizer.param_groups, rates, strict=True):
            group["lr"] = lr
        self._write_weight_decay()

    def _group_peaks(self) -> list[float]:
        # base_lrs are those of this configuration, where `initial_lr` may come from a checkpoint;
        # groups that were
        # added during the run (fine-tuning callbacks) are not in it.
        added = self.optimizer.param_groups[len(self.base_lrs) :]
        return [float(base) for base in self.base_lrs] + [
            group.setdefault("initial_lr", group["lr"]) for group in added
        ]

    def _write_weight_decay(self) -> None:
        if self.weight_decay is None:
            return
        value = self.weight_decay(self.position)
        for group in self.optimizer.param_groups:
            if group.get(WEIGHT_DECAY_GROUP_KEY, False):
                group["weight_decay"] = value


def build_schedule(
    optimizer: Optimizer,
    optimizer_config: OptimizerConfig,
    config: SchedulerConfig,
    *,
    total_steps: float,
    global_batch_size: int | None = None,
    samples_after: UnitsAfter | None = None,
) -> LearningRateSchedule:
    """Make the schedule of a run of `total_steps` optimizer steps
    (`trainer.estimated_stepping_batches`).

    `global_batch_size` (sequences per step) is needed when a length is in samples, or, where it
    changes during the run, `samples_after(steps, samples before them)`. A warm-up longer
    than the run is allowed (`fast_dev_run` shortens it to one step). ValueError where a needed
    length isn't known.
    """
    errors = config.check(optimizer_config)
    if errors:
        raise ValueError("; ".join(errors))
    lengths = _Lengths(config, total_steps, samples_after or _constant(global_batch_size))
    warmup = lengths.of("lr_warmup", required=False)
    decay = lengths.of("lr_decay", required=config.lr_decay_style != "constant")
    wsd = lengths.of("lr_wsd_decay", required=False) if config.lr_decay_style == "wsd" else None
    learning_rate = LearningRateCurve(
        max_lr=optimizer_config.lr,
        min_lr=config.min_lr,
        init_lr=config.lr_warmup_init,
        warmup=warmup,
        decay=decay,
        style=config.lr_decay_style,
        wsd_decay=wsd,
        wsd_style=config.lr_wsd_decay_style,
    )
    weight_decay = _weight_decay_curve(optimizer_config, config, lengths)
    return LearningRateSchedule(
        optimizer, learning_rate, weight_decay, units_after=lengths.samples_after
    )


def _constant(global_batch_size: int | None) -> UnitsAfter | None:
    if global_batch_size is None:
        return None
    return lambda steps, before: before + steps * global_batch_size


def _weight_decay_curve(
    optimizer: OptimizerConfig, config: SchedulerConfig, lengths: _Lengths
) -> WeightDecayCurve | None:
    if config.weight_decay_start is None and config.weight_decay_end is None:
        return None
    start = (
        optimizer.weight_decay if config.weight_decay_start is None else config.weight_decay_start
    )
    end = optimizer.weight_decay if config.weight_decay_end is None else config.weight_decay_end
    varies = config.weight_decay_style != "constant"
    length = lengths.of("weight_decay_incr", required=varies)
    return WeightDecayCurve(start=start, end=end, length=length, style=config.weight_decay_style)


class _Lengths:
    """Converts the lengths of a config into one unit: steps, or samples when any is given in
    samples.
    """

    def __init__(
        self, config: SchedulerConfig, total_steps: float, samples_after: UnitsAfter | None
    ) -> None:
        if config.by_samples and samples_after is None:
            raise ValueError(
                "scheduler.*_samples: lengths in samples need the global batch size; give it, or"
                " use *_steps"
            )
        self._config = config
        self._total_steps = total_steps
        self.samples_after = samples_after if config.by_samples else None
        """None: the unit is the step."""

    def of(self, name: str, *, required: bool) -> int:
        """Length `name` in units; the length of the run when not given, 0 if that is unknown and
        not required.
        """
        samples: int | None = getattr(self._config, f"{name}_samples")
        if samples is not None:
            return samples
        steps: float | None = getattr(self._config, f"{name}_steps")
        steps = self._total_steps if steps is None else steps
        if math.isfinite(steps) and steps >= 0:
            return int(steps) if self.samples_after is None else self.samples_after(int(steps), 0)
        if required:
            raise ValueError(
                f"scheduler.{name}_steps=None: the length of the run is unknown; set"
                f" Trainer(max_steps=...) or {name}_steps"
            )
        return 0
