"""`self.log` inside a schedule: recorded per micro-batch, averaged, reduced, and logged once on
every rank.

During a schedule `LightningModule.log` is shadowed on the instance, so that calls are recorded in
place of reaching Lightning (whose on_step value would be the last micro-batch's, and which later
stages' metrics would never reach). Afterwards every rank logs the same number: the mean over
micro-batches and data-parallel ranks, weighted by tokens when the step reports `num_tokens`, else
by samples (`reduce_fx` sum, max and min are honoured). A name that is logged several times in a
micro-batch counts each time. Over an accumulation window the on_step value is the window's mean so
far, hence the whole window's at the optimizer step.
"""

from __future__ import annotations

import inspect
import numbers
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor
from torchmetrics import Metric, MetricCollection

from megatron_lightning.utils.tensors import scalar

REDUCTIONS = ("mean", "sum", "max", "min")
_REDUCTION_NAMES: Mapping[Any, str] = {
    **{name: name for name in REDUCTIONS},
    "avg": "mean",
    torch.mean: "mean",
    torch.sum: "sum",
    torch.max: "max",
    torch.min: "min",
    sum: "sum",
    max: "max",
    min: "min",
}
"""What Lightning takes for `reduce_fx`."""
_OPTIONS = tuple(inspect.signature(LightningModule.log).parameters)[3:]
"""Options of `log`, in the order in which they may be given by position."""


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


class LogRecorder:
    """Records the `log` calls of one schedule run on this rank."""

    def __init__(self, module: LightningModule, device: torch.device, *, pipelined: bool) -> None:
        self._module = module
        self._device = device
        self._pipelined = pipelined
        self._current: list[tuple[LogKey, Tensor, Any]] = []
        self.totals: dict[LogKey, tuple[Tensor, Tensor]] = {}
        """Per key: weighted sum of values (or extreme value) and sum of weights, float64 scalars
        on the device."""

    @contextmanager
    def capture(self) -> Iterator[None]:
        """Shadow `module.log`, under a pipeline also `all_gather`, while the schedule runs."""
        original = self._module.log
        self._module.log = self._recorder(original)  # type: ignore[method-assign]
        if self._pipelined:
            self._module.all_gather = _refuse_all_gather  # type: ignore[method-assign]
        try:
            yield
        finally:
            del self._module.log
            if self._pipelined:
                del self._module.all_gather

    def _recorder(self, original: Callable[..., None]) -> Callable[..., None]:
        def log(name: str, value: Any, *args: Any, **kwargs: Any) -> None:
            kwargs = {**dict(zip(_OPTIONS, args, strict=False)), **kwargs}
            if isinstance(value, (Metric, MetricCollection)):
                if self._pipelined:
                    raise ValueError(
                        f"self.log({name!r}, <{type(value).__name__}>): a torchmetrics object "
                        f"can't be logged under"
                        " pipeline_parallel_size > 1, since other stages don't update it; log "
                        "value.compute() or a number"
                    )
                original(name, value, **kwargs)
            elif kwargs.get("rank_zero_only", False) and not self._pipelined:
                original(name, value, **kwargs)
            else:
                self._record(name, value, kwargs)

        return log

    def _record(self, name: str, value: Any, kwargs: Mapping[str, Any]) -> None:
        if not isinstance(value, (Tensor, numbers.Number)):
            raise ValueError(
                f"self.log({name!r}, <{type(value).__name__}>): log a single number or a tensor"
                " with one element"
            )
        reduce_fx = kwargs.get("reduce_fx", "mean")
        reduction = _REDUCTION_NAMES.get(
            reduce_fx.lower() if isinstance(reduce_fx, str) else reduce_fx
        )
        if reduction is None:
            raise ValueError(
                f"self.log({name!r}, reduce_fx={reduce_fx!r}): choose one of {REDUCTIONS}, since "
                f"the value is also"
                " reduced over micro-batches and ranks"
            )
        if kwargs.get("enable_graph", False):
            raise ValueError(
                f"self.log({name!r}, enable_graph=True): the schedule runs backward before the "
                f"logged value is reduced, so there is no graph to keep; leave it False"
            )
        if kwargs.get("sync_dist_group") is not None:
            raise ValueError(
                f"self.log({name!r}, sync_dist_group=...): what a step logs is always reduced over "
                f"all data-parallel ranks; leave the group out, or reduce the value yourself and "
                f"log it in a hook"
            )
        weight = kwargs.get("batch_size")
        options = {
            k: v
            for k, v in kwargs.items()
            if k not in ("batch_size", "sync_dist", "sync_dist_group")
        } | ({"reduce_fx": reduction} if "reduce_fx" in kwargs else {})
        key = LogKey(name, reduction, tuple(sorted(options.items(), key=lambda item: item[0])))
        number = scalar(value, self._device).detach()  # type: ignore[arg-type]
        if number.numel() != 1:
            raise ValueError(
                f"self.log({name!r}, ...): the value has {number.numel()} elements; log a single "
                f"number"
            )
        self._current.append((key, number.reshape(()), weight))

    def begin_micro_batch(self) -> None:
        """Forget what was logged on the way through a chunk that isn't the last."""
        self._current.clear()

    def end_micro_batch(self, weight: Tensor | float, share: Tensor | float = 1.0) -> None:
        """Add what the current micro-batch logged, with its weight (tokens or samples).

        `share`: the part of the micro-batch that is here, for weights that count all of it: a
        `batch_size` given to `self.log`.
        """
        for key, value, own_weight in self._current:
            w = scalar(weight if own_weight is None else own_weight * share, self._device)
            self.totals[key] = merge_total(key, self.totals.get(key), weighted_total(key, value, w))
        self._current.clear()


def _refuse_all_gather(*args: Any, **kwargs: Any) -> None:
    raise ValueError(
        "self.all_gather inside a step: under pipeline_parallel_size > 1 only the last stage gets"
        " behind the network, so the others would never take part; return the tensor, and gather in"
        " on_train_batch_end or another hook"
    )


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
    """The number to log, float32; 0 for a mean over nothing, as for the loss."""
    value, weight = total
    if key.reduction == "mean":
        value = value / torch.where(weight > 0, weight, torch.ones_like(weight))
    return value.to(torch.float32)


def silence_advice_to_reduce() -> None:
    """Lightning advises `sync_dist=True` for epoch values; what is logged here is reduced. And it
    says at each run that modules of this package move batches themselves.
    """
    warnings.filterwarnings("ignore", message=".*sync_dist=True.*when logging on epoch level.*")
    warnings.filterwarnings("ignore", message="You have overridden `transfer_batch_to_device` in")


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
        if not (on_step and on_epoch):
            module.log(key.name, running if on_step else value, **common)
            continue
        module.log(key.name, value, **common)
        if running is not value:
            _set_step_value(module, key.name, running)


def _set_step_value(module: LightningModule, name: str, value: Tensor) -> None:
    """Give a key that is logged per step and per epoch its own number for the step.

    Lightning keeps one entry for both: the epoch's mean collects every batch, and the number of the
    step is what the entry got last, here the mean over the accumulation window so far.
    """
    trainer: Any = module.trainer
    if not trainer.barebones:  # there nothing is logged at all
        trainer._results[f"{module._current_fx_name}.{name}"]._forward_cache = value.clone()
