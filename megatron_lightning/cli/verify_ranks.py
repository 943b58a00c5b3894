"""Runs one layout on ranks forked from this process, each in a folder's log, and waits for them.

The ranks see the environment that a launcher gives. Any that fails ends the others.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
import traceback
from collections.abc import Callable
from multiprocessing import get_context
from multiprocessing.context import ForkProcess
from pathlib import Path
from typing import Any

import torch

from megatron_lightning.strategies.forks import die_with
from megatron_lightning.utils.env import provide
from megatron_lightning.utils.ports import free_port

_GRACE_SECONDS = 5.0


class RunFailed(RuntimeError):
    """A rank raised, died, or was not done in time; the message has its last words."""

    def __init__(self, rank: int, message: str) -> None:
        super().__init__(message)
        self.rank = rank


def run_ranks(
    function: Callable[[int], None], world_size: int, folder: Path, timeout_seconds: float
) -> None:
    """Call `function(rank)` in `world_size` forked processes; their output goes to
    `rank{n}.log`. This process must not have used CUDA.
    """
    if torch.cuda.is_initialized():
        raise RuntimeError("verify forks its ranks, and CUDA is in use in this process already")
    folder.mkdir(parents=True, exist_ok=True)
    context = get_context("fork")
    port = free_port()
    processes: list[ForkProcess] = []
    parent = os.getpid()
    for rank in range(world_size):
        arguments = (function, rank, world_size, port, folder, parent)
        process = context.Process(target=_rank, args=arguments, daemon=False)
        process.start()
        processes.append(process)
    try:
        _wait(processes, folder, time.monotonic() + timeout_seconds)
    finally:
        _end(processes)


def _wait(processes: list[ForkProcess], folder: Path, deadline: float) -> None:
    while True:
        failed = [rank for rank, process in enumerate(processes) if process.exitcode]
        if failed:
            _grace(processes)
            first = _first_to_fail(folder, failed)
            raise RunFailed(first, f"rank {first}: {_last_words(folder, first)}")
        if all(process.exitcode == 0 for process in processes):
            return
        if time.monotonic() > deadline:
            late = [rank for rank, process in enumerate(processes) if process.exitcode is None]
            raise RunFailed(late[0], f"ranks {late} were not done in time; see {folder}")
        time.sleep(0.05)


def _grace(processes: list[ForkProcess]) -> None:
    """Give the others time to fail by themselves, so that their logs say why."""
    until = time.monotonic() + _GRACE_SECONDS
    while time.monotonic() < until and any(process.exitcode is None for process in processes):
        time.sleep(0.05)


def _end(processes: list[ForkProcess]) -> None:
    for process in processes:
        if process.exitcode is None:
            process.terminate()
            process.join(_GRACE_SECONDS)
        if process.exitcode is None:
            process.kill()
        process.join()


def _rank(
    function: Callable[[int], None],
    rank: int,
    world_size: int,
    port: int,
    folder: Path,
    parent: int,
) -> None:
    die_with(parent)
    log = open(folder / f"rank{rank}.log", "w", buffering=1)  # noqa: SIM115
    os.dup2(log.fileno(), 1)
    os.dup2(log.fileno(), 2)
    sys.stdout = sys.stderr = log
    status = 1
    try:
        provide(
            RANK=str(rank),
            LOCAL_RANK=str(rank),
            WORLD_SIZE=str(world_size),
            LOCAL_WORLD_SIZE=str(world_size),
            NODE_RANK="0",
            MASTER_ADDR="127.0.0.1",
            MASTER_PORT=str(port),
        )
        if sys.platform == "linux":
            provide(override=False, GLOO_SOCKET_IFNAME="lo")
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // world_size))
        function(rank)
        status = 0
    except BaseException as error:
        (folder / f"rank{rank}.error").write_text(f"{time.time()}\n{_said(error)}")
        traceback.print_exc()
    finally:
        log.flush()
        os._exit(status)  # no clean-up of what was forked


def _said(error: BaseException) -> str:
    return "".join(traceback.format_exception_only(error)).strip()


def _first_to_fail(folder: Path, failed: list[int]) -> int:
    """The rank whose error came first; one that died without a word counts before all."""
    times: dict[int, float] = {}
    for rank in failed:
        with contextlib.suppress(OSError):
            times[rank] = float((folder / f"rank{rank}.error").read_text().split("\n", 1)[0])
    return min(failed, key=lambda rank: times.get(rank, 0.0))


def _last_words(folder: Path, rank: int) -> str:
    try:
        return (folder / f"rank{rank}.error").read_text().split("\n", 1)[1]
    except OSError:
        return f"died without a word; see {folder / f'rank{rank}.log'}"


def load_records(folder: Path, world_size: int) -> list[dict[str, Any]]:
    """What the ranks' recorders wrote, by rank."""
    return [torch.load(folder / f"rank{rank}.pt", weights_only=True) for rank in range(world_size)]
