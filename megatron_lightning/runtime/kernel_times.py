"""How much of a rank's collectives its computing hides, from torch's profiler.

On CUDA these are kernels: those of NCCL against all others. On the CPU they are gloo's operations
against the tensor operations of any thread, which says whether they overlap, not how well.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

Interval = tuple[float, float]
"""Begin and end, in microseconds."""


@dataclass(frozen=True, kw_only=True)
class KernelTimes:
    """Times of one rank's kernels in a step; overlapping ones of a sort count once."""

    compute_seconds: float
    collective_seconds: float
    message_seconds: float
    """Sends and receives: between pipeline stages, or of ring attention."""
    hidden_seconds: float
    """Part of the collectives during which something is computed."""
    hidden_message_seconds: float = 0.0
    """The same part of the messages."""

    @property
    def hidden_fraction(self) -> float:
        """Share of the collectives that is hidden, 0 to 1; 1 without collectives."""
        if self.collective_seconds == 0:
            return 1.0
        return self.hidden_seconds / self.collective_seconds

    @property
    def hidden_message_fraction(self) -> float:
        """Share of the messages that is hidden, 0 to 1; 1 without messages."""
        if self.message_seconds == 0:
            return 1.0
        return self.hidden_message_seconds / self.message_seconds

    def describe(self) -> str:
        """One line."""
        return (
            f"kernels: compute {self.compute_seconds:.4f} s, messages {self.message_seconds:.4f} "
            f"s ({self.hidden_message_fraction:.0%} hidden), collectives "
            f"{self.collective_seconds:.4f} s ({self.hidden_fraction:.0%} hidden under compute)"
        )


def start_profile(device: torch.device) -> profile:
    """A running profiler that sees what ``kernel_times`` needs."""
    on_cuda = device.type == "cuda"
    profiler = profile(activities=[ProfilerActivity.CUDA if on_cuda else ProfilerActivity.CPU])
    profiler.start()
    return profiler


def kernel_times(profiler: profile, device: torch.device) -> KernelTimes:
    """Stop a profiler and sum up what it saw."""
    profiler.stop()
    sorts: dict[str, list[Interval]] = {"compute": [], "collective": [], "message": []}
    for event in profiler.events() or ():
        sort = _sort_of(event, device)
        if sort is not None:
            sorts[sort].append((event.time_range.start, event.time_range.end))
    compute, collective, message = (union(sorts[x]) for x in ("compute", "collective", "message"))
    return KernelTimes(
        compute_seconds=_length(compute) / 1e6,
        collective_seconds=_length(collective) / 1e6,
        message_seconds=_length(message) / 1e6,
        hidden_seconds=_length(intersection(compute, collective)) / 1e6,
        hidden_message_seconds=_length(intersection(compute, message)) / 1e6,
    )


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """Disjoint intervals that cover the same, by begin."""
    joined: list[Interval] = []
    for begin, end in sorted(intervals):
        if joined and begin <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(joined[-1][1], end))
        else:
            joined.append((begin, end))
    return joined


def intersection(first: Sequence[Interval], second: Sequence[Interval]) -> list[Interval]:
    """What two rows of disjoint intervals, each by begin, have in common."""
    found: list[Interval] = []
    i = j = 0
    while i < len(first) and j < len(second):
        begin, end = max(first[i][0], second[j][0]), min(first[i][1], second[j][1])
        if begin < end:
            found.append((begin, end))
        if first[i][1] < second[j][1]:
            i += 1
        else:
            j += 1
    return found


def _length(intervals: Iterable[Interval]) -> float:
    return sum(end - begin for begin, end in intervals)


def _sort_of(event: Any, device: torch.device) -> str | None:
    name: str = event.name.lower()
    if device.type == "cuda":
        if "cuda" not in str(event.device_type).lower():
            return None
        is_ours, is_message = "nccl" in name, "sendrecv" in name
        if name.startswith("nccl:"):  # an annotation over the kernel that comes, too
            return None
    else:
        is_ours, is_message = name.startswith("gloo:"), name in ("gloo:send", "gloo:recv")
        if not is_ours and not name.startswith("aten::"):
            return None
    if not is_ours:
        return "compute"
    return "message" if is_message else "collective"
