"""When a rank does what during a step: spans of computing, messages, waiting and collectives.

On the CPU a span is wall-clock time. On CUDA both of its ends are events on the current stream,
which cost microseconds and make nobody wait; they are read after the step, when the device is idle.
So a span of a wait is the time for which the stream stood still, and one of computing holds the
kernels between its ends, collectives of tensor parallelism included.

A timeline is made for the one step that is looked at; where there is none, nothing is recorded.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from enum import StrEnum

import torch

from megatron_lightning.parallel.schedules.actions import Action, Kind


class Category(StrEnum):
    """What a rank's time goes to."""

    COMPUTE = "compute"
    """Forwards and backwards, with the collectives inside of them."""
    MESSAGE = "message"
    """Starting to send and to receive between pipeline stages."""
    WAIT = "wait"
    """Waiting for what another pipeline stage sends."""
    COLLECTIVE = "collective"
    """Reducing gradients, losses and logged numbers, as far as the rank has to wait for it."""
    OPTIMIZER = "optimizer"
    """Norm of the gradients, clipping, the optimizer's step, and Lightning's hooks there."""


@dataclass(frozen=True, slots=True)
class Span:
    """One stretch of a rank's time."""

    category: Category
    name: str
    """The action (e.g. ``F3.0``), or what was done."""
    begin: float
    """Seconds since the timeline's start."""
    end: float
    """Seconds since the timeline's start."""
    kind: Kind | None = None
    """Of an action: what it does."""
    stage: int | None = None
    """Of an action: its virtual stage."""

    @property
    def seconds(self) -> float:
        """Duration."""
        return self.end - self.begin


Mark = float | torch.cuda.Event
"""A moment of a timeline's clock."""


class Timeline:
    """Records one rank's step, from its construction to ``spans``."""

    def __init__(self, device: torch.device) -> None:
        self._clock = _CudaClock() if device.type == "cuda" else _WallClock()
        self._raw: list[tuple[Category, Action | str, int | None, Mark, Mark]] = []

    @contextmanager
    def span(
        self, category: Category, what: Action | str, stage: int | None = None
    ) -> Iterator[None]:
        """Record what happens inside; spans may lie in each other, of which the outer counts."""
        begin = self.mark()
        try:
            yield
        finally:
            self.add(category, what, begin, stage)

    def mark(self) -> Mark:
        """This moment, as the begin of a span that ``add`` will end."""
        return self._clock.mark()

    def add(
        self, category: Category, what: Action | str, begin: Mark, stage: int | None = None
    ) -> None:
        """Record a span from ``begin`` until now."""
        self._raw.append((category, what, stage, begin, self._clock.mark()))

    def spans(self) -> list[Span]:
        """Everything recorded, by begin. On CUDA it waits until the device is idle."""
        self._clock.settle()
        found = [
            Span(
                category=category,
                name=str(what),
                begin=self._clock.seconds(begin),
                end=self._clock.seconds(end),
                kind=what.kind if isinstance(what, Action) else None,
                stage=stage,
            )
            for category, what, stage, begin, end in self._raw
        ]
        return sorted(found, key=lambda span: (span.begin, -span.end))


def span(
    timeline: Timeline | None, category: Category, what: Action | str, stage: int | None = None
) -> AbstractContextManager[None]:
    """A span of `timeline`, or nothing without one."""
    return _NO_SPAN if timeline is None else timeline.span(category, what, stage)


_NO_SPAN = nullcontext()


class _WallClock:
    """Wall-clock time of this process."""

    def __init__(self) -> None:
        self._start = time.perf_counter()

    def mark(self) -> Mark:
        return time.perf_counter()

    def settle(self) -> None:
        """Nothing is under way."""

    def seconds(self, mark: Mark) -> float:
        assert isinstance(mark, float)
        return mark - self._start


class _CudaClock:
    """Time of the current CUDA stream; starts when the device is idle, so that both clocks agree
    there.
    """

    def __init__(self) -> None:
        torch.cuda.synchronize()
        self._start = self.mark()

    def mark(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def settle(self) -> None:
        torch.cuda.synchronize()

    def seconds(self, mark: Mark) -> float:
        assert isinstance(mark, torch.cuda.Event)
        return self._start.elapsed_time(mark) / 1000.0
