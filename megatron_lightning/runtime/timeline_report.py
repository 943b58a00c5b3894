"""What the timelines of all ranks say about a step: shares of time, slowest rank and stage, bubble.

Pure: spans in, numbers, a table and a Chrome trace out. Ranks' clocks start together (the caller
lets them leave a barrier first), so their spans can be laid side by side.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megatron_lightning.parallel.schedules.actions import Kind
from megatron_lightning.parallel.schedules.simulate import SimulationReport
from megatron_lightning.runtime.kernel_times import KernelTimes
from megatron_lightning.runtime.timeline import Category, Span


@dataclass(frozen=True, kw_only=True)
class RankTimeline:
    """One rank's step."""

    rank: int
    """Global rank."""
    pipeline: int
    """The first global rank of its pipeline: equal for ranks that hand micro-batches on."""
    pipeline_rank: int
    """Position on the pipeline axis."""
    spans: tuple[Span, ...]
    """By begin."""
    kernels: KernelTimes | None = None
    """What the profiler saw, where it was asked."""

    def seconds(self, category: Category) -> float:
        """Time in spans of a category; spans inside of others count for the outer one alone."""
        total = covered = 0.0
        for span in self.spans:
            if span.end > covered:
                if span.category is category:
                    total += span.end - max(span.begin, covered)
                covered = span.end
        return total

    @property
    def computing(self) -> list[Span]:
        """Its forwards and backwards."""
        return [span for span in self.spans if span.category is Category.COMPUTE]


@dataclass(frozen=True, kw_only=True)
class StepReport:
    """All ranks of a step."""

    step: int
    """Optimizer steps made before it."""
    ranks: tuple[RankTimeline, ...]
    """In the order of global ranks."""
    simulated: SimulationReport | None = None
    """The schedule in the simulator, with the measured durations; None without a pipeline."""

    @property
    def seconds(self) -> float:
        """Duration of the step."""
        return max(span.end for rank in self.ranks for span in rank.spans)

    def idle_seconds(self, rank: RankTimeline) -> float:
        """Time of the step that no span of a rank covers: data, hooks, the host."""
        return self.seconds - sum(rank.seconds(category) for category in Category)

    @property
    def slowest_rank(self) -> int:
        """The global rank that computes longest."""
        return max(self.ranks, key=lambda rank: rank.seconds(Category.COMPUTE)).rank

    @property
    def stage_seconds(self) -> dict[int, float]:
        """Compute time of each virtual stage for one micro-batch, forward and backward, mean."""
        found: dict[int, float] = defaultdict(float)
        for (_, stage), seconds in self.durations.items():
            found[stage] += seconds
        return dict(sorted(found.items()))

    @property
    def slowest_stage(self) -> int:
        """The virtual stage whose micro-batches take longest."""
        return max(self.stage_seconds.items(), key=lambda item: item[1])[0]

    @property
    def durations(self) -> Mapping[tuple[Kind, int], float]:
        """Mean duration of each (kind, stage), as ``CostModel.measured`` takes it."""
        return mean_durations(self.ranks)

    @property
    def pipeline_idle_seconds(self) -> dict[int, float]:
        """For each rank: time without computing, from its pipeline's first forward to its last
        backward. The bubble, and what messages and the host add to it.
        """
        ends: dict[int, tuple[float, float]] = {}
        for rank in self.ranks:
            first, last = rank.computing[0].begin, max(span.end for span in rank.computing)
            low, high = ends.get(rank.pipeline, (first, last))
            ends[rank.pipeline] = (min(low, first), max(high, last))
        return {
            rank.rank: ends[rank.pipeline][1]
            - ends[rank.pipeline][0]
            - sum(span.seconds for span in rank.computing)
            for rank in self.ranks
        }

    @property
    def bubble_fraction(self) -> float:
        """Share of the pipelines' time in which ranks do not compute, 0 to 1."""
        idle = self.pipeline_idle_seconds
        busy = sum(span.seconds for rank in self.ranks for span in rank.computing)
        return sum(idle.values()) / (sum(idle.values()) + busy)

    def table(self) -> str:
        """A line for each rank, in seconds, and a summary."""
        head = ["rank", "stage rank", *(category.value for category in Category), "idle"]
        rows = [head]
        for rank in self.ranks:
            times = [rank.seconds(category) for category in Category]
            times.append(self.idle_seconds(rank))
            rows.append([str(rank.rank), str(rank.pipeline_rank), *(f"{t:.4f}" for t in times)])
        widths = [max(len(row[column]) for row in rows) for column in range(len(head))]
        lines = [
            "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True))
            for row in rows
        ]
        return "\n".join([self._summary(), *lines, *self._kernel_lines()])

    def _summary(self) -> str:
        text = (
            f"step {self.step}: {self.seconds:.4f} s; slowest rank {self.slowest_rank}, slowest "
            f"stage {self.slowest_stage} ({self.stage_seconds[self.slowest_stage]:.4f} s a "
            "micro-batch)"
        )
        if self.simulated is None:
            return text
        return (
            f"{text}; pipeline bubble {self.bubble_fraction:.1%}, simulated with these durations "
            f"{self.simulated.bubble_fraction:.1%}"
        )

    def _kernel_lines(self) -> list[str]:
        return [
            f"rank {rank.rank}: {rank.kernels.describe()}"
            for rank in self.ranks
            if rank.kernels is not None
        ]

    def chrome_trace(self) -> dict[str, Any]:
        """For chrome://tracing or Perfetto: a process for each rank; times in microseconds."""
        events: list[dict[str, Any]] = []
        for rank in self.ranks:
            name = f"rank {rank.rank} (pipeline rank {rank.pipeline_rank})"
            events.append(_metadata("process_name", rank.rank, {"name": name}))
            events.append(_metadata("process_sort_index", rank.rank, {"sort_index": rank.rank}))
            events += [_event(rank.rank, span) for span in rank.spans]
        return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": {"step": self.step}}


def mean_durations(ranks: Sequence[RankTimeline]) -> dict[tuple[Kind, int], float]:
    """Mean duration of each (kind, virtual stage) over micro-batches and replicas, in seconds."""
    found: dict[tuple[Kind, int], list[float]] = defaultdict(list)
    for rank in ranks:
        for span in rank.computing:
            if span.kind is not None and span.stage is not None:
                found[span.kind, span.stage].append(span.seconds)
    return {key: sum(values) / len(values) for key, values in found.items()}


def _metadata(name: str, rank: int, arguments: dict[str, Any]) -> dict[str, Any]:
    return {"ph": "M", "name": name, "pid": rank, "tid": 0, "args": arguments}


def _event(rank: int, span: Span) -> dict[str, Any]:
    return {
        "ph": "X",
        "name": f"{span.category.value} {span.name}" if span.kind is not None else span.name,
        "cat": span.category.value,
        "pid": rank,
        "tid": 0,
        "ts": span.begin * 1e6,
        "dur": span.seconds * 1e6,
        "args": {} if span.stage is None else {"stage": span.stage},
    }
