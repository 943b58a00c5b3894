"""Where a step's time goes, on every rank: a table in the log and a Chrome trace on disk.

Every so many steps, one batch (the one that ends its accumulation window) is watched: each rank
notes when it computes, waits for other pipeline stages, sends, reduces and steps. Then rank 0
compares them, names the slowest rank and stage, and sets the measured bubble beside that of the
schedule simulated with the durations that were measured. Other steps cost nothing.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import lightning as L
import torch.distributed as dist
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from lightning.pytorch.utilities.types import STEP_OUTPUT
from torch.optim import Optimizer
from torch.profiler import profile
from typing_extensions import override

from megatron_lightning.parallel.schedules.actions import Kind
from megatron_lightning.parallel.schedules.simulate import CostModel, SimulationReport, simulate
from megatron_lightning.runtime.kernel_times import kernel_times, start_profile
from megatron_lightning.runtime.timeline import Category, Mark, Timeline
from megatron_lightning.runtime.timeline_report import RankTimeline, StepReport, mean_durations
from megatron_lightning.strategies import MegatronStrategy


class StepTimeline(L.Callback):
    """Watches one step in ``every_n_steps``; the first one, which warms up, never.

    Parameters
    ----------
    every_n_steps
        Optimizer steps from one that is watched to the next.
    directory
        Where ``timeline-step=N.json`` goes, for chrome://tracing or Perfetto. None: the Trainer's
        log directory, else its ``default_root_dir``.
    kernels
        Also run torch's profiler on the step, for the share of collectives that computing hides.
        This slows the step down, so its other times are then too long.

    A watched step begins with a barrier and ends with an exchange of times between ranks. Put the
    callback last, so that it does not count others' hooks as the optimizer's.

    """

    reads_parameters = False
    """See `strategies/readers.py`."""

    def __init__(
        self,
        every_n_steps: int = 100,
        *,
        directory: str | Path | None = None,
        kernels: bool = False,
    ) -> None:
        if every_n_steps < 1:
            raise ValueError(f"every_n_steps={every_n_steps}: give at least 1.")
        self.every_n_steps = every_n_steps
        self.directory = directory
        self._folder = Path()
        self.kernels = kernels
        self.reports: list[StepReport] = []
        """Of the steps watched so far, on rank 0; empty elsewhere."""
        self._timeline: Timeline | None = None
        self._profiler: profile | None = None
        self._begun: Mark | None = None
        self._step = 0

    @override
    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        if not isinstance(trainer.strategy, MegatronStrategy):
            raise ValueError(
                f"StepTimeline with {type(trainer.strategy).__name__}: it reads the times of"
                " MegatronStrategy; use that strategy, or leave the callback out"
            )
        # Here, since Lightning asks rank 0 for its log directory by a broadcast.
        self._folder = Path(self.directory or trainer.log_dir or trainer.default_root_dir)

    @override
    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        step, ends_window = trainer.global_step, (batch_idx + 1) % trainer.accumulate_grad_batches
        if step == 0 or step % self.every_n_steps or ends_window:
            return
        self._step = step
        strategy = _strategy(trainer)
        strategy.barrier("StepTimeline")
        if self.kernels:
            self._profiler = start_profile(strategy.mesh.device)
            strategy.barrier("StepTimeline")
        self._timeline = strategy.step_runner.timeline = Timeline(strategy.mesh.device)

    @override
    def on_before_backward(self, trainer: L.Trainer, pl_module: Any, loss: Any) -> None:
        self._begin()

    @override
    def on_after_backward(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._end(Category.COLLECTIVE, "reduce gradients")

    @override
    def on_before_optimizer_step(
        self, trainer: L.Trainer, pl_module: L.LightningModule, optimizer: Optimizer
    ) -> None:
        self._begin()

    @override
    def on_train_batch_end(
        self,
        trainer: L.Trainer,
        pl_module: L.LightningModule,
        outputs: STEP_OUTPUT,
        batch: Any,
        batch_idx: int,
    ) -> None:
        if self._timeline is None:
            return
        self._end(Category.OPTIMIZER, "clip and step")
        strategy = _strategy(trainer)
        strategy.step_runner.timeline = None
        timelines = self._gather(strategy)
        if timelines is not None:
            report = StepReport(
                step=self._step, ranks=timelines, simulated=simulated(strategy, timelines)
            )
            self.reports.append(report)
            rank_zero_info(report.table())
            self._write(report)

    @override
    def on_exception(
        self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException
    ) -> None:
        self._timeline = None
        if self._profiler is not None:
            self._profiler.stop()
            self._profiler = None

    def _begin(self) -> None:
        if self._timeline is not None:
            self._begun = self._timeline.mark()

    def _end(self, category: Category, what: str) -> None:
        if self._timeline is not None and self._begun is not None:
            self._timeline.add(category, what, self._begun)
        self._begun = None

    def _gather(self, strategy: MegatronStrategy) -> tuple[RankTimeline, ...] | None:
        """All ranks' timelines on rank 0."""
        mesh = strategy.mesh
        assert self._timeline is not None
        kernels = None
        spans = tuple(self._timeline.spans())
        if self._profiler is not None:
            kernels = kernel_times(self._profiler, mesh.device)
        own = RankTimeline(
            rank=mesh.rank,
            pipeline=mesh.pp.ranks[0] if mesh.pp.size > 1 else mesh.rank,
            pipeline_rank=mesh.pp.rank,
            spans=spans,
            kernels=kernels,
        )
        self._timeline = self._profiler = None
        if mesh.world_size == 1:
            return (own,)
        everyone: list[Any] | None = [None] * mesh.world_size if mesh.rank == 0 else None
        dist.gather_object(own, everyone, dst=0, group=mesh.control_group)
        return None if everyone is None else tuple(everyone)

    def _write(self, report: StepReport) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        path = self._folder / f"timeline-step={report.step}.json"
        path.write_text(json.dumps(report.chrome_trace()))


def simulated(
    strategy: MegatronStrategy, timelines: tuple[RankTimeline, ...]
) -> SimulationReport | None:
    """The step's schedule in the simulator, with the durations that were measured."""
    placement = strategy.parallel_model.placement
    if placement.pipeline_size == 1:
        return None
    first = next(rank for rank in timelines if rank.pipeline_rank == 0)
    forwards = [span for span in first.computing if span.kind is Kind.F and span.stage == 0]
    return simulate(
        strategy.step_runner.schedule(len(forwards)),
        CostModel(measured=mean_durations(timelines)),
        num_chunks=placement.num_chunks,
        num_microbatches=len(forwards),
        v_shaped=placement.v_shaped,
    )


def _strategy(trainer: L.Trainer) -> MegatronStrategy:
    assert isinstance(trainer.strategy, MegatronStrategy)
    return trainer.strategy
