"""What is seen of training steps by callbacks: their times and memory, the kernels of one."""

import gc
import time
from typing import Any

import lightning as L
import torch
import torch.distributed as dist
from kernel_gaps import idle_lines
from shapes import synchronize
from torch.profiler import ProfilerActivity, profile

from megatron_lightning.parallel.peers.exchange import held_bytes
from megatron_lightning.runtime.kernel_times import union


class Clock(L.Callback):
    """Seconds of each step, the device synchronised, and of the host until all is launched."""

    reads_gradients = reads_parameters = False

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self.host_seconds: list[float] = []
        self.losses: list[float] = []
        self.peak_gib = self.shared_gib = 0.0

    def on_fit_start(self, trainer: L.Trainer, module: Any) -> None:
        gc.disable()

    def on_train_batch_start(self, trainer: L.Trainer, module: Any, batch: Any, index: int) -> None:
        synchronize()
        self.start = time.perf_counter()

    def on_train_batch_end(
        self, trainer: L.Trainer, module: Any, outputs: Any, batch: Any, index: int
    ) -> None:
        self.host_seconds.append(time.perf_counter() - self.start)
        synchronize()
        self.seconds.append(time.perf_counter() - self.start)
        self.losses.append(float(outputs["loss"] if isinstance(outputs, dict) else outputs))

    def on_train_end(self, trainer: L.Trainer, module: Any) -> None:
        device = trainer.strategy.root_device
        peak = torch.tensor(torch.cuda.max_memory_allocated() / 2**30, device=device)
        if dist.is_initialized():
            dist.all_reduce(peak, op=dist.ReduceOp.MAX)
        self.peak_gib = float(peak)
        self.shared_gib = held_bytes() / 2**30  # with tensor ranks; not in the peak


class Kernels(L.Callback):
    """One step under torch's profiler: the kernels that take longest, and when none runs."""

    reads_gradients = reads_parameters = False

    def __init__(self, step: int) -> None:
        self.step = step
        self.busy_share = 0.0
        self.profiler = profile(activities=[ProfilerActivity.CUDA])

    def on_train_batch_start(self, trainer: L.Trainer, module: Any, batch: Any, index: int) -> None:
        if index == self.step:
            self.profiler.start()

    def on_train_batch_end(
        self, trainer: L.Trainer, module: Any, outputs: Any, batch: Any, index: int
    ) -> None:
        if index == self.step:
            torch.cuda.synchronize()
            self.profiler.stop()

    def table(self, rows: int = 40, width: int = 200) -> str:
        """A line for each of the longest kernels: milliseconds, calls, name."""
        times: dict[str, list[float]] = {}
        intervals = []
        for event in self.profiler.events() or ():
            if "cuda" in str(event.device_type).lower():
                interval = (event.time_range.start, event.time_range.end)
                times.setdefault(event.name, []).append(interval[1] - interval[0])
                intervals.append(interval)
        covered = union(intervals)
        busy = sum(end - begin for begin, end in covered) / 1e3
        span = (covered[-1][1] - covered[0][0]) / 1e3
        self.busy_share = busy / span
        lines = [f"busy {busy:.1f} of {span:.1f} ms, {len(intervals)} kernels"]
        longest = sorted(times.items(), key=lambda item: -sum(item[1]))
        for name, durations in longest[:rows]:
            lines.append(f"{sum(durations) / 1e3:8.2f} ms {len(durations):5d}  {name[:width]}")
        assert self.profiler.profiler is not None
        lines += idle_lines(self.profiler.profiler.kineto_results.events())
        return "\n".join(lines)
