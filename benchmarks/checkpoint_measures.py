"""What `checkpoint.py` measures in a rank, the same for every side: seconds, CPU seconds and the
growth of memory of saves and loads, where each is largest over the ranks.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist


class Side(Protocol):
    """A trained model of one program in this rank."""

    def parameters(self) -> int:
        """Number of parameters of the whole model."""
        ...

    def save(self, path: str) -> None:
        """Complete when it returns."""
        ...

    def start(self, path: str) -> Callable[[], None]:
        """Save in the background; the result waits until it is complete."""
        ...

    def load(self, path: str) -> None:
        """Model and optimizer, in place."""
        ...


def save_and_load(state: Side, folder: Path, repetitions: int) -> dict[str, Any]:
    saves = [
        timed(lambda i=i: state.save(str(folder / f"save{i}"))) for i in range(repetitions + 1)
    ]
    stalls, totals = [], []
    for i in range(repetitions + 1):
        finish: list[Callable[[], None]] = []
        path = str(folder / f"background{i}")
        begun = time.perf_counter()
        stalls.append(timed(lambda path=path, to=finish: to.append(state.start(path))))
        finish[0]()
        seconds = slowest(time.perf_counter() - begun)
        totals.append({"seconds": seconds, "cpu_seconds": 0.0, "memory_bytes": 0.0})
    loads = [timed(lambda: state.load(str(folder / "save0"))) for _ in range(repetitions + 1)]
    files = [file for file in (folder / "save0").rglob("*") if file.is_file()]
    return {
        "parameters": state.parameters(),
        "bytes": sum(file.stat().st_size for file in files),
        "save": summary(saves),
        "stall": summary(stalls),
        "background save complete": summary(totals),
        "load": summary(loads),
    }


def load_only(state: Side, folder: Path, repetitions: int) -> dict[str, Any]:
    loads = [timed(lambda: state.load(str(folder / "save0"))) for _ in range(repetitions + 1)]
    return {"load": summary(loads)}


def timed(function: Callable[[], Any]) -> dict[str, float]:
    """Seconds, CPU seconds and growth of the peak of memory, each where it is largest."""
    dist.barrier()
    Path("/proc/self/clear_refs").write_text("5")
    before, cpu, begun = peak_memory(), cpu_seconds(), time.perf_counter()
    function()
    seconds = time.perf_counter() - begun
    return {
        "seconds": slowest(seconds),
        "cpu_seconds": slowest(cpu_seconds() - cpu),
        "memory_bytes": slowest(peak_memory() - before),
    }


def cpu_seconds() -> float:
    """Of this process, its threads, and the children that have ended."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


def slowest(value: float) -> float:
    tensor = torch.tensor([value], dtype=torch.float64)
    dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
    return float(tensor)


def peak_memory() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("VmHWM")).split()[1]) * 1024


def summary(samples: list[dict[str, float]]) -> dict[str, Any]:
    counted = samples[1:]
    seconds = [sample["seconds"] for sample in counted]
    return {
        "seconds": round(statistics.median(seconds), 3),
        "all_seconds": [round(value, 3) for value in seconds],
        "first_seconds": round(samples[0]["seconds"], 3),
        "cpu_seconds": round(statistics.median(sample["cpu_seconds"] for sample in counted), 3),
        "memory_mib": round(max(sample["memory_bytes"] for sample in samples) / 2**20),
    }
