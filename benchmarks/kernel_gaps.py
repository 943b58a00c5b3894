"""Where no kernel runs, from the events of torch's profiler.

A gap is the host's when the call that launched the kernel behind it began after the gap did; else
the device made it (dependent kernels begin a microsecond or two after each other).
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

_TENTHS = 10


@dataclass
class _Pair:
    """Gaps between two kernels of these names."""

    microseconds: float = 0.0
    count: int = 0
    late: int = 0
    """Of the host."""


def idle_lines(events: Iterable[Any], rows: int = 20, width: int = 60) -> list[str]:
    """Lines of a table from `kineto_results.events()`: how long nothing ran in each tenth of the
    time, and the pairs of kernels between which most of it was.
    """
    kernels, launched = [], {}
    for event in events:
        if "cuda" in str(event.device_type()).lower():
            kernels.append((event.start_ns(), event.duration_ns(), event))
        elif event.name().startswith(("cuda", "cu")):
            launched[event.correlation_id()] = event.start_ns()
    kernels.sort(key=lambda one: one[0])
    if not kernels:
        return ["no kernel"]
    begin, end, before = kernels[0][0], kernels[0][0], "begin"
    span = max(start + took for start, took, _ in kernels) - begin
    tenths = [0.0] * _TENTHS
    pairs: dict[tuple[str, str], _Pair] = {}
    host = device = 0.0
    for start, took, kernel in kernels:
        gap = (start - end) / 1e3
        if gap > 0:
            late = launched.get(kernel.correlation_id(), 0) > end
            host, device = host + gap * late, device + gap * (not late)
            tenths[min(_TENTHS - 1, int(_TENTHS * (end - begin) / span))] += gap / 1e3
            pair = pairs.setdefault((before[:width], kernel.name()[:width]), _Pair())
            pair.microseconds, pair.count = pair.microseconds + gap, pair.count + 1
            pair.late += late
        if start + took > end:
            end, before = start + took, kernel.name()
    lines = [
        f"idle {(host + device) / 1e3:.1f} ms: host {host / 1e3:.1f}, device {device / 1e3:.1f}",
        "idle ms by tenth of the step: " + " ".join(f"{one:.2f}" for one in tenths),
    ]
    for names, pair in sorted(pairs.items(), key=lambda item: -item[1].microseconds)[:rows]:
        lines.append(
            f"{pair.microseconds / 1e3:8.2f} ms {pair.count:5d} (host {pair.late})  "
            + "  ->  ".join(names)
        )
    return lines
