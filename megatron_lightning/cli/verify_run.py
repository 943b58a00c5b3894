"""Runs a baseline and candidate layouts on the same data and seed, and compares them."""

from __future__ import annotations

import dataclasses
import shutil
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning as L
from lightning.pytorch import seed_everything

from megatron_lightning.cli.verify_boxes import Record
from megatron_lightning.cli.verify_compare import compare
from megatron_lightning.cli.verify_findings import Comparison
from megatron_lightning.cli.verify_layouts import Candidate
from megatron_lightning.cli.verify_ranks import RunFailed, load_records, run_ranks
from megatron_lightning.cli.verify_record import Recorder
from megatron_lightning.cli.verify_source import Source
from megatron_lightning.cli.verify_tolerances import LIMITS, Limits
from megatron_lightning.config.parallel import ParallelConfig
from megatron_lightning.config.validate import check_layout, check_world
from megatron_lightning.strategies import MegatronStrategy
from megatron_lightning.strategies.module_checks import module_problems
from megatron_lightning.utils.wording import counted

Plant = Callable[[int], None]
"""Called in a candidate's rank before it trains: where tests break something."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """How long and where the runs are made."""

    steps: int = 3
    """Optimizer steps of each run."""
    seed: int = 1234
    accelerator: str = "cpu"
    """cpu (gloo) or gpu (NCCL)."""
    timeout_seconds: float = 1800.0
    """Limit for one run."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """One candidate."""

    candidate: Candidate
    comparison: Comparison | None
    """None where the run failed."""
    failure: str = ""
    seconds: float = 0.0

    @property
    def passed(self) -> bool:
        """Whether it ran and everything was within its tolerance."""
        return self.comparison is not None and self.comparison.passed


@dataclass(frozen=True, kw_only=True)
class Verification:
    """Everything that is reported."""

    source: Source
    settings: Settings
    baseline: Candidate
    limits: Limits
    outcomes: tuple[Outcome, ...]
    warnings: tuple[str, ...] = ()

    @property
    def passed(self) -> bool:
        """Whether every candidate passed."""
        return all(outcome.passed for outcome in self.outcomes)


def limits_of(source: Source) -> Limits:
    """The table's limits for the source's precision and depth. KeyError for another precision."""
    limits = LIMITS[source.precision]
    return limits if source.config is None else limits.at_depth(source.config.num_layers)


def problems_of(source: Source, candidates: Sequence[Candidate]) -> list[str]:
    """Everything that keeps a candidate from running, before any process is started."""
    problems = []
    if source.precision not in LIMITS:
        problems.append(
            f"precision={source.precision!r}: there are tolerances for {sorted(LIMITS)}; use one"
        )
    module, data = source.make_module(), source.make_data()
    sizes = {
        name: getattr(data, name, None)
        for name in ("seq_length", "micro_batch_size", "global_batch_size")
    }
    if sizes["global_batch_size"] is None:
        problems.append(
            f"{type(data).__name__} has no global_batch_size: its batches change with the number of"
            " data ranks, so layouts can't be compared on the same samples; use a data module that"
            " has one, or --synthetic"
        )
    for candidate in candidates:
        found = check_layout(candidate.parallel)
        found += check_world(candidate.parallel, candidate.world_size)
        if not found:
            strategy: Any = SimpleNamespace(config=exactly(candidate.parallel), user_plan=None)
            found += module_problems(
                strategy, module, SimpleNamespace(**sizes), candidate.world_size
            )
        problems += [f"layout {candidate.name}: {problem}" for problem in found]
    return problems


def verify(
    source: Source,
    baseline: Candidate,
    candidates: Sequence[Candidate],
    settings: Settings,
    *,
    folder: Path | None = None,
    plant: Plant | None = None,
    say: Callable[[str], None] = lambda text: None,
) -> Verification:
    """Run and compare. `folder` keeps logs and records; None: a temporary one.

    All runs come first, since comparing uses threads, which forks don't survive.
    """
    place = Path(tempfile.mkdtemp(prefix="verify-")) if folder is None else folder
    try:
        runs: list[tuple[Candidate, str, float]] = []
        say(f"baseline: {baseline.name}, {_ranks(baseline)}")
        failure, _ = _run(source, baseline, settings, place / "baseline", None)
        if failure:
            raise RunFailed(0, f"the baseline ({baseline.name}) failed: {failure}")
        for number, candidate in enumerate(candidates):
            say(f"candidate: {candidate.name}, {_ranks(candidate)}")
            failure, seconds = _run(source, candidate, settings, place / f"{number}", plant)
            runs.append((candidate, failure, seconds))
        limits = limits_of(source)
        reference = load_records(place / "baseline", baseline.world_size)
        outcomes = [
            _outcome(run, place / f"{number}", reference, limits) for number, run in enumerate(runs)
        ]
        return Verification(
            source=source,
            settings=settings,
            baseline=baseline,
            limits=limits,
            outcomes=tuple(outcomes),
            warnings=tuple(_warnings(source)),
        )
    finally:
        if folder is None:
            shutil.rmtree(place, ignore_errors=True)


def _outcome(
    run: tuple[Candidate, str, float], folder: Path, reference: Sequence[Record], limits: Limits
) -> Outcome:
    candidate, failure, seconds = run
    if failure:
        return Outcome(candidate=candidate, comparison=None, failure=failure, seconds=seconds)
    records = load_records(folder, candidate.world_size)
    comparison = compare(records, reference, limits)
    return Outcome(candidate=candidate, comparison=comparison, seconds=seconds)


def _run(
    source: Source, candidate: Candidate, settings: Settings, folder: Path, plant: Plant | None
) -> tuple[str, float]:
    """(what went wrong or nothing, seconds)."""

    def rank(number: int) -> None:
        if plant is not None:
            plant(number)
        train(source, candidate, settings, folder)

    start = time.monotonic()
    try:
        run_ranks(rank, candidate.world_size, folder, settings.timeout_seconds)
    except RunFailed as error:
        return str(error), time.monotonic() - start
    return "", time.monotonic() - start


def train(source: Source, candidate: Candidate, settings: Settings, folder: Path) -> None:
    """Train in this rank and record."""
    seed_everything(settings.seed, workers=True, verbose=False)
    trainer = L.Trainer(
        strategy=strategy_of(candidate.parallel),
        accelerator=settings.accelerator,
        devices=candidate.world_size,
        precision=source.precision,  # type: ignore[arg-type]
        max_steps=settings.steps,
        callbacks=[Recorder(folder)],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        limit_val_batches=0,
        num_sanity_val_steps=0,
        **source.trainer,
    )
    trainer.fit(source.make_module(), source.make_data())


def strategy_of(config: ParallelConfig) -> MegatronStrategy:
    """A strategy of this layout, with masks by global position."""
    config = exactly(config)
    names = [field.name for field in dataclasses.fields(config)]
    return MegatronStrategy(**{name: getattr(config, name) for name in names})


def exactly(config: ParallelConfig) -> ParallelConfig:
    """The layout with dropout masks that don't depend on it."""
    return dataclasses.replace(
        config, runtime=dataclasses.replace(config.runtime, exact_dropout=True)
    )


def _ranks(candidate: Candidate) -> str:
    return counted(candidate.world_size, "rank")


def _warnings(source: Source) -> list[str]:
    module = source.make_module()
    if getattr(module, "loss_normalization", None) == "micro_batch":
        return [
            "loss_normalization='micro_batch': the mean over micro-batches with different numbers"
            " of tokens depends on the micro-batch size; layouts agree only at the same size"
        ]
    return []
