"""Optimizer and schedule settings: frozen dataclasses, checked before anything is built.

The vocabulary is Megatron-LM's. `check` returns explained errors instead of raising, so that all
violations can be shown at once. Gradient clipping, accumulation and the number of steps stay with
Lightning's Trainer.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from megatron_lightning.config.field_types import type_problems
from megatron_lightning.config.names import NamesFields

OptimizerName = Literal["adamw", "adam", "sgd"]
DecayStyle = Literal["constant", "linear", "cosine", "inverse_square_root", "wsd"]
WsdDecayStyle = Literal["linear", "cosine", "exponential", "minus_sqrt"]
WeightDecayStyle = Literal["constant", "linear", "cosine"]

_STEPS_OR_SAMPLES = ("lr_warmup", "lr_decay", "lr_wsd_decay", "weight_decay_incr")


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig(NamesFields):
    """Which optimizer, its numbers, and which parameters are spared weight decay."""

    name: OptimizerName = "adamw"
    """Algorithm: adamw (decoupled decay), adam (decay added to the gradient) or sgd."""
    lr: float = 3e-4
    """Peak learning rate, reached at the end of the warm-up."""
    weight_decay: float = 0.1
    """Decay per unit of learning rate of the parameters that decay."""
    adam_beta1: float = 0.9
    """Decay per step of Adam's running mean of gradients, in [0, 1)."""
    adam_beta2: float = 0.95
    """Decay per step of Adam's running mean of squared gradients, in [0, 1)."""
    adam_eps: float = 1e-8
    """Added to the root of Adam's second moment."""
    momentum: float = 0.9
    """SGD's momentum, in [0, 1); 0 keeps no state."""
    decay_vectors: bool = False
    """True: parameters with one dim (or none) and biases decay too. False: they don't, as Megatron
    does it.
    """
    no_decay: tuple[str, ...] = ()
    """Globs over parameter names that don't decay either. One that matches nothing is an error."""

    def check(self) -> list[str]:
        """Return every violation as one explained sentence; an empty list when there is none."""
        if wrong := type_problems(self, "optimizer.", choices=True):
            return wrong
        errors = []
        if self.lr < 0:
            errors.append(f"optimizer.lr={self.lr}: a learning rate is >= 0; 3e-4 suits most runs")
        if self.weight_decay < 0:
            errors.append(
                f"optimizer.weight_decay={self.weight_decay}: must be >= 0; 0 switches it off"
            )
        for field in ("adam_beta1", "adam_beta2", "momentum"):
            value: float = getattr(self, field)
            if not 0 <= value < 1:
                errors.append(f"optimizer.{field}={value}: must lie in [0, 1)")
        if self.adam_eps <= 0:
            errors.append(f"optimizer.adam_eps={self.adam_eps}: must be > 0; 1e-8 is usual")
        return errors


@dataclass(frozen=True, kw_only=True)
class SchedulerConfig(NamesFields):
    """Learning rate and weight decay over a run: linear warm-up, then a decay to `min_lr`.

    Lengths are given in optimizer steps or in samples. As soon as one is in samples, all are
    converted by the global batch size: one step is worth `global_batch_size` samples.
    """

    lr_decay_style: DecayStyle = "cosine"
    """Shape after the warm-up."""
    lr_warmup_steps: int = 0
    """Optimizer steps from `lr_warmup_init` up to the peak."""
    lr_warmup_samples: int | None = None
    """The same in samples, instead of `lr_warmup_steps`."""
    lr_warmup_init: float = 0.0
    """Learning rate before the first step when there is a warm-up."""
    lr_decay_steps: int | None = None
    """Optimizer steps, warm-up included, after which `min_lr` is reached; None: the length of the
    run.
    """
    lr_decay_samples: int | None = None
    """The same in samples, instead of `lr_decay_steps`."""
    min_lr: float = 0.0
    """Learning rate at and after the end of the decay ("constant" never falls)."""
    lr_wsd_decay_steps: int | None = None
    """wsd (warm-up, stable, decay): optimizer steps of the final decay."""
    lr_wsd_decay_samples: int | None = None
    """The same in samples, instead of `lr_wsd_decay_steps`."""
    lr_wsd_decay_style: WsdDecayStyle = "exponential"
    """Shape of the final decay of wsd."""
    weight_decay_style: WeightDecayStyle = "constant"
    """Shape of the way from `weight_decay_start` to `weight_decay_end`."""
    weight_decay_start: float | None = None
    """Weight decay at the first step; None: that of the optimizer."""
    weight_decay_end: float | None = None
    """Weight decay from the end of its schedule on; None: that of the optimizer."""
    weight_decay_incr_steps: int | None = None
    """Optimizer steps from start to end; None: the length of the run."""
    weight_decay_incr_samples: int | None = None
    """The same in samples, instead of `weight_decay_incr_steps`."""

    @property
    def by_samples(self) -> bool:
        """True when any length is given in samples."""
        return any(getattr(self, f"{name}_samples") is not None for name in _STEPS_OR_SAMPLES)

    def check(self, optimizer: OptimizerConfig | None = None) -> list[str]:
        """Return every violation as one explained sentence; `optimizer` adds the checks against its
        numbers.
        """
        if wrong := type_problems(self, "scheduler.", choices=True):
            return wrong
        errors = self._check_lengths() + self._check_wsd()
        for field in ("min_lr", "lr_warmup_init", "weight_decay_start", "weight_decay_end"):
            value: float | None = getattr(self, field)
            if value is not None and value < 0:
                errors.append(f"scheduler.{field}={value}: must be >= 0")
        start, end = self.weight_decay_start, self.weight_decay_end
        if optimizer is not None:
            start = optimizer.weight_decay if start is None else start
            end = optimizer.weight_decay if end is None else end
            for field in ("min_lr", "lr_warmup_init"):
                low: float = getattr(self, field)
                if low > optimizer.lr:
                    errors.append(
                        f"scheduler.{field}={low}: above the peak optimizer.lr={optimizer.lr};"
                        " lower it or raise lr"
                    )
        if self.weight_decay_style == "constant" and None not in (start, end) and start != end:
            errors.append(
                f"scheduler.weight_decay_style='constant' with weight_decay_start={start} and"
                f" weight_decay_end={end}: give both the same value, or choose 'linear' or 'cosine'"
            )
        return errors

    def _check_lengths(self) -> list[str]:
        errors = []
        for name in _STEPS_OR_SAMPLES:
            steps: int | None = getattr(self, f"{name}_steps")
            samples: int | None = getattr(self, f"{name}_samples")
            if samples is not None and steps:
                errors.append(
                    f"scheduler.{name}_steps={steps} and {name}_samples={samples}: give one of"
                    " the two"
                )
            smallest = 0 if name == "lr_warmup" else 1
            for field, value in ((f"{name}_steps", steps), (f"{name}_samples", samples)):
                if value is not None and value < smallest:
                    errors.append(f"scheduler.{field}={value}: must be >= {smallest}")
        for unit in ("steps", "samples"):
            decay: int | None = getattr(self, f"lr_decay_{unit}")
            warmup: int | None = getattr(self, f"lr_warmup_{unit}")
            if decay is not None and warmup is not None and warmup >= decay:
                errors.append(
                    f"scheduler.lr_warmup_{unit}={warmup}: must be below lr_decay_{unit}={decay},"
                    " which includes the warm-up"
                )
        return errors

    def _check_wsd(self) -> list[str]:
        given = self.lr_wsd_decay_steps is not None or self.lr_wsd_decay_samples is not None
        if self.lr_decay_style == "wsd" and not given:
            return [
                "scheduler.lr_wsd_decay_steps=None: lr_decay_style='wsd' needs the length of its"
                " final decay"
            ]
        if self.lr_decay_style != "wsd" and given:
            return [
                "scheduler.lr_wsd_decay_steps: has no meaning for"
                f" lr_decay_style={self.lr_decay_style!r}; leave it out or choose 'wsd'"
            ]
        return []
