"""How long rows of tokens are on their way between experts' ranks."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


class ExchangeClock:
    """Durations of this rank's exchanges while `watching`; otherwise it costs nothing.

    A duration runs from this rank's readiness to the arrival of its rows, so it holds the wait for
    ranks that come later. On CUDA the device is asked when the durations are read, and not before.
    """

    def __init__(self, device: torch.device) -> None:
        self.watching = False
        self._cuda = device.type == "cuda"
        self._spans: list[tuple[Any, Any]] = []

    @contextmanager
    def span(self) -> Iterator[None]:
        """Around one exchange."""
        if not self.watching:
            yield
            return
        begin = self._now()
        yield
        self._spans.append((begin, self._now()))

    def take(self) -> list[float]:
        """Milliseconds of each exchange since the last call, in their order. Waits for them."""
        spans, self._spans = self._spans, []
        if not self._cuda:
            return [1e3 * (end - begin) for begin, end in spans]
        if spans:
            spans[-1][1].synchronize()
        return [begin.elapsed_time(end) for begin, end in spans]

    def _now(self) -> Any:
        if not self._cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event
