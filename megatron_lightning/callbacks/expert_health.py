"""How evenly experts are used: numbers in the log, a table, a heat map, and a warning in time."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
from lightning.pytorch.utilities import rank_zero_warn
from torch import nn
from typing_extensions import override

from megatron_lightning.callbacks.expert_load import ExpertLoad, ExpertReading, read, routers_of
from megatron_lightning.callbacks.expert_picture import draw_loads
from megatron_lightning.layers.moe.remote import AllToAllDispatcher
from megatron_lightning.layers.moe.remote_deep_ep import DeepEPDispatcher
from megatron_lightning.layers.moe.router import Router
from megatron_lightning.parallel.expert_clock import ExchangeClock
from megatron_lightning.strategies import MegatronStrategy

_FIELDS = ("step", "layer", "entropy", "max_over_mean", "min_over_mean", "dropped", "aux_loss")


class ExpertHealth(L.Callback):
    """Reads the routers every so many optimizer steps; other steps cost nothing.

    Logged by layer: `moe/max_over_mean/N` and `moe/min_over_mean/N` (load of the busiest and the
    idlest expert), `moe/entropy/N` (nats a token; log of the number of experts is even),
    `moe/dropped/N` (share of places), `moe/aux_loss/N`, `moe/z_loss/N`; and of the exchange of rows
    between experts' ranks (not with `all_gather`) `moe/exchange_ms_p50`, `moe/exchange_ms_p95` (of
    the rank where it takes longest, waits included) and `moe/exchange_slowest_rank` (the one that
    others wait for).

    Parameters
    ----------
    every_n_steps
        Optimizer steps between readings.
    directory
        Where `expert_load.csv` (with every expert's tokens) and `expert_load.png` go. None: the
        Trainer's log directory, else its ``default_root_dir``.
    starving
        Warn of an expert whose load is below so many times the mean one, ``patience`` times.
    overloaded
        Warn of an expert whose load is above so many times the mean one, ``patience`` times.
    patience
        Readings one after the other in which a load must be so. Each layer is warned of once for
        each of both.

    Raises
    ------
    ValueError
        The model has no experts, or the strategy is not MegatronStrategy.

    """

    reads_parameters = False
    """See `strategies/readers.py`."""

    def __init__(
        self,
        every_n_steps: int = 50,
        *,
        directory: str | Path | None = None,
        starving: float = 0.05,
        overloaded: float = 5.0,
        patience: int = 3,
    ) -> None:
        for name, value in (("every_n_steps", every_n_steps), ("patience", patience)):
            if value < 1:
                raise ValueError(f"{name}={value}: give at least 1")
        if not 0 <= starving < 1 < overloaded:
            raise ValueError(
                f"starving={starving}, overloaded={overloaded}: shares of the mean load, the first"
                " below 1 and the second above, e.g. 0.05 and 5"
            )
        self.every_n_steps, self.directory = every_n_steps, directory
        self.starving, self.overloaded, self.patience = starving, overloaded, patience
        self.readings: list[ExpertReading] = []
        """Of this fit, the same on all ranks."""
        self._routers: dict[str, Router] = {}
        self._clocks: list[ExchangeClock] = []
        self._strikes: dict[tuple[str, str], np.ndarray] = {}
        self._warned: set[tuple[str, str]] = set()
        self._folder = Path()

    @override
    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if not isinstance(trainer.strategy, MegatronStrategy):
            raise ValueError(
                f"ExpertHealth with {type(trainer.strategy).__name__}: it reads the experts of"
                " MegatronStrategy; use that strategy, or leave the callback out"
            )
        self._routers = routers_of(pl_module)
        if not trainer.strategy.reduce_boolean_decision(bool(self._routers), all=False):
            raise ValueError(
                f"ExpertHealth: {type(pl_module).__name__} has no experts (config.moe is None);"
                " leave the callback out"
            )
        self._clocks = clocks_of(pl_module)
        self.readings, self._strikes = [], {}
        self._folder = Path(self.directory or trainer.log_dir or trainer.default_root_dir)
        if trainer.is_global_zero:
            _begin_table(self._folder / "expert_load.csv", trainer.global_step)

    @override
    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        for clock in self._clocks:
            clock.watching = (trainer.global_step + 1) % self.every_n_steps == 0

    @override
    def on_train_batch_end(
        self,
        trainer: L.Trainer,
        pl_module: L.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        step = trainer.global_step
        last = self.readings[-1].step if self.readings else -1
        if step == 0 or step % self.every_n_steps or step == last:
            return
        strategy = trainer.strategy
        assert isinstance(strategy, MegatronStrategy)
        exchanges = [duration for clock in self._clocks for duration in clock.take()]
        reading = read(step, self._routers, exchanges, strategy.mesh)
        self.readings.append(reading)
        self._warn(reading)
        if trainer.is_global_zero:
            for logger in trainer.loggers:
                logger.log_metrics(metrics(reading), step=step)
            _append(self._folder / "expert_load.csv", reading)

    @override
    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        for clock in self._clocks:
            clock.watching = False
        if trainer.is_global_zero and self.readings:
            draw_loads(self.readings, self._folder / "expert_load.png")

    def _warn(self, reading: ExpertReading) -> None:
        for name, load in reading.layers.items():
            for kind, bad in (
                ("starving", load.relative < self.starving),
                ("overloaded", load.relative > self.overloaded),
            ):
                strikes = self._strikes.get((name, kind), np.zeros(len(bad), np.int64))
                strikes = self._strikes[name, kind] = np.where(bad, strikes + 1, 0)
                if (name, kind) not in self._warned and strikes.max() >= self.patience:
                    self._warned.add((name, kind))
                    rank_zero_warn(self._words(kind, name, load, strikes, reading.step))

    def _words(self, kind: str, name: str, load: ExpertLoad, strikes: np.ndarray, step: int) -> str:
        experts = np.flatnonzero(strikes >= self.patience)
        first = experts[0]
        others = f" (and {len(experts) - 1} others)" if len(experts) > 1 else ""
        return (
            f"step {step}, layer {name}: expert {first}{others} is {kind}, at"
            f" {load.relative[first]:.2f} of the mean load in the last {self.patience} readings;"
            " raise moe.aux_loss_coeff, or balance by moe.expert_bias=True"
        )


def clocks_of(module: nn.Module) -> list[ExchangeClock]:
    """The clocks of the dispatchers that exchange rows with other ranks, each once."""
    clocks: dict[int, ExchangeClock] = {}
    for part in module.modules():
        dispatcher: Any = getattr(part, "dispatcher", None)
        while dispatcher is not None:
            if isinstance(dispatcher, AllToAllDispatcher | DeepEPDispatcher):
                clocks[id(dispatcher.ranks.clock)] = dispatcher.ranks.clock
            dispatcher = getattr(dispatcher, "inner", None)
    return list(clocks.values())


def metrics(reading: ExpertReading) -> dict[str, float]:
    """What is logged of a reading."""
    found: dict[str, float] = {}
    for name, load in reading.layers.items():
        found[f"moe/max_over_mean/{name}"] = float(load.relative.max())
        found[f"moe/min_over_mean/{name}"] = float(load.relative.min())
        found[f"moe/entropy/{name}"] = load.entropy
        found[f"moe/dropped/{name}"] = load.dropped_share
        found[f"moe/aux_loss/{name}"] = load.aux_loss
        found[f"moe/z_loss/{name}"] = load.z_loss
    if reading.exchanges:
        longest = max(reading.exchanges, key=lambda times: times.median)
        found["moe/exchange_ms_p50"] = longest.median
        found["moe/exchange_ms_p95"] = longest.p95
        assert reading.slowest_rank is not None
        found["moe/exchange_slowest_rank"] = reading.slowest_rank
    return found


def _begin_table(path: Path, step: int) -> None:
    """Make the file, keeping what a continued run has written up to `step`."""
    kept: list[list[str]] = []
    if step and path.is_file():
        with path.open(newline="", encoding="utf-8") as file:
            kept = [row for row in list(csv.reader(file))[1:] if row and int(row[0]) <= step]
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows([[*_FIELDS, "z_loss", "tokens_of_experts"], *kept])


def _append(path: Path, reading: ExpertReading) -> None:
    with path.open("a", newline="", encoding="utf-8") as file:
        for name, load in reading.layers.items():
            numbers = (load.entropy, load.relative.max(), load.relative.min(), load.dropped_share)
            tokens = " ".join(map(str, load.tokens.tolist()))
            row = (*numbers, load.aux_loss, load.z_loss)
            csv.writer(file).writerow([reading.step, name, *(f"{x:.6g}" for x in row), tokens])
