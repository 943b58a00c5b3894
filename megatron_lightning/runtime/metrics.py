"""`self.log` inside a schedule: recorded per micro-batch, averaged, reduced, and logged once on
every rank.

During a schedule `LightningModule.log` is shadowed on the instance, so that calls are recorded in
place of reaching Lightning (whose on_step value would be the last micro-batch's, and which later
stages' metrics would never reach). Afterwards every rank logs the same number: the mean over
micro-batches and data-parallel ranks, weighted by tokens when the step reports `num_tokens`, else
by samples (`reduce_fx` sum, max and min are honoured). Over an accumulation window the on_step
value is the window's mean so far, hence the whole window's at the optimizer step.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor
from torchmetrics import Metric, MetricCollection

REDUCTIONS = ("mean", "sum", "max", "min")


@dataclass(frozen=True)
class LogKey:
    """One logged name with everything that Lightning wants to know about it except the value."""

    name: str
    reduction: str
    options: tuple[tuple[str, Any], ...]

    @property
    def keywords(self) -> dict[str, Any]:
        """Keyword arguments for `LightningModule.log`."""
        return dict(self.options)


@dataclass
class _MicroBatchLogs:
    values: dict[LogKey, tuple[Tensor, Any]] = field(default_factory=dict)


class LogRecorder:
    """Records the `log` calls of one schedule run on this rank."""

    def __init__(self, module: LightningModule, device: torch.device, *, pipelined: bool) -> None:
        self._module = module
        self._device = device
        self._pipelined = pipelined
        self._current = _MicroBatchLogs()
        self.totals: dict[LogKey, tuple[Tensor, Tensor]] = {}
        """Per key: weighted sum of values (or extreme value) and sum of weights, float64 scalars
        on the device."""

    @contextmanager
    def capture(self) -> Iterator[None]:
        """Shadow `module.log` while the schedule runs."""
        original = self._module.log
        self._module.log = self._recorder(original)  # type: ignore[method-assign]
        try:
            yield
        finally:
            del self._module.log

    def _recorder(self, original: Callable[..., None]) -> Callable[..., None]:
        def log(name: str, value: Any, *args: Any, **kwargs: Any) -> None:
            if args:
                raise TypeError("self.log(name, value, ...): give the options by keyword")
            if isinstance(value, (Metric, MetricCollection)):
                if self._pipelined:
                    raise ValueError(
                        f"self.log({name!r}, <{type(value).__name__}>): a torchmetrics object "
                        f"can't be logged under"
                        " pipeline_parallel_size > 1, since other stages don't update it; log "
                        "value.compute() or a number"
                    )
                original(name, value, **kwargs)
            elif kwargs.get("rank_zero_only", False):
                original(name, value, **kwargs)
            else:
                self._record(name, value, kwargs)

        return log

    def _record(self, name: str, value: Any, kwargs: Mapping[str, Any]) -> None:
        reduction = kwargs.get("reduce_fx", "mean")
        if reduction not in REDUCTIONS:
            raise ValueError(
                f"self.log({name!r}, reduce_fx={reduction!r}): choose one of {REDUCTIONS}, since "
                f"the value is also"
                " reduced over micro-batches and ranks"
            )
        weight = kwargs.get("batch_size")
        options = {
            k: v
            for k, v in kwargs.items()
            if k not in ("batch_size", "sync_dist", "sync_dist_group")
        }
        key = LogKey(name, reduction, tuple(sorted(options.items(), key=lambda item: item[0])))
        scalar = torch.as_tensor(value, device=self._device).detach().to(torch.float64)
        if scalar.numel() != 1:
            raise ValueError(
                f"self.log({name!r}, ...): the value has {scalar.numel()} elements; log a single "
                f"number"
            )
        self._current.values[key] = (scalar.reshape(()), weight)

    def end_micro_batch(self, weight: Tensor | float) -> None:
        """Add what the current micro-batch logged, with its weight (tokens or samples)."""
        for key, (value, own_weight) in self._current.values.items():
            w = torch.as_tensor(
                weight if own_weight is None else own_weight,
                device=self._device,
                dtype=torch.float64,
            )
            self.totals[key] = merge_total(key, self.totals.get(key), weighted_total(key, value, w))
        self._current = _MicroBatchLogs()


def weighted_total(key: LogKey, value: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """(what is added up or compared for this key, weight) of one value."""
    if key.reduction != "mean":
        return value, weight
    # a micro-batch without a token has weight 0, and its (possibly non-finite) value must not count
    return torch.where(weight > 0, value, torch.zeros_like(value)) * weight, weight


def merge_total(
    key: LogKey, old: tuple[Tensor, Tensor] | None, new: tuple[Tensor, Tensor]
) -> tuple[Tensor, Tensor]:
    """Join two totals of one key."""
    if old is None:
        return new
    (a, weight_a), (b, weight_b) = old, new
    joined = {"max": torch.maximum, "min": torch.minimum}.get(key.reduction, torch.add)(a, b)
    return joined, weight_a + weight_b


def value_of(key: LogKey, total: tuple[Tensor, Tensor]) -> Tensor:
    """The number to log, float32."""
    value, weight = total
    if key.reduction == "mean":
        value = value / weight
    return value.to(torch.float32)


def silence_advice_to_reduce() -> None:
    """Lightning advises `sync_dist=True` for epoch values; what is logged here is reduced already."""
    warnings.filterwarnings("ignore", message=".*sync_dist=True.*when logging on epoch level.*")


def log_published(
    module: LightningModule,
    published: Mapping[LogKey, tuple[Tensor, Tensor]],
    window: Mapping[LogKey, tuple[Tensor, Tensor]] | None,
) -> None:
    """Call Lightning's own `log` once per key with the reduced value; `window` holds running
    totals in training.
    """
    for key, total in published.items():
        options = key.keywords
        training = window is not None
        on_step = options.get("on_step")
        on_epoch = options.get("on_epoch")
        on_step = training if on_step is None else on_step
        on_epoch = not training if on_epoch is None else on_epoch
        value = value_of(key, total)
        running = value if window is None else value_of(key, window[key])
        common = {**options, "sync_dist": False, "batch_size": total[1]}
        if on_step and on_epoch and window is not None and window[key] is not total:
            _log_forked(module, key, running, value, common)
        else:
            module.log(key.name, running if on_step else value, **common)


def _log_forked(
    module: LightningModule, key: LogKey, running: Tensor, value: Tensor, common: dict[str, Any]
) -> None:
    """A key logged per step and per epoch within an accumulation window: the two want different
    numbers.
    """
    rest = {k: v for k, v in common.items() if k not in ("on_step", "on_epoch")}
    quiet = {**rest, "prog_bar": False, "logger": False}
    module.log(f"{key.name}_step", running, on_step=True, on_epoch=False, **rest)
    module.log(f"{key.name}_epoch", value, on_step=False, on_epoch=True, **rest)
    module.log(key.name, value, on_step=False, on_epoch=True, **quiet)
