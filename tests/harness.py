"""Run a function on several gloo ranks from inside an ordinary pytest test.

`run_ranks` keeps one pool of ranks for each world size alive for the whole session: a call costs
milliseconds, where fresh Python processes import torch and Lightning for half a minute.
`run_ranks_fresh` forks new ranks for one call: for whole Lightning runs, which leave global state.

The function is module-level and is called as `function(rank, world_size, *args)`; arguments and
return values travel by pickle, tensors on the CPU. Each call starts from the same seeds (equal on
all ranks) and default dtype, without the process groups of the call before. Any failure raises
`RankError` with the traceback of the rank that failed first; its pool is thrown away, so that the
next test gets a clean one. Every wait has a limit: at the limit the error shows the stacks of the
ranks that hang.
"""

import atexit
import contextlib
import os
import pickle
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from megatron_lightning.utils.ports import free_port
from tests.nursery import STACK_SIGNAL, Nursery, RankSpec, call, kill_group

_GRACE_SECONDS = 0.5  # after a failure: time for the other ranks to report theirs
_EXIT_SECONDS = 5.0  # after success: time for fresh ranks to leave by themselves


class RankError(Exception):
    """A rank failed, died or hung; `rank` is the first one. The message has traceback or stacks."""

    def __init__(self, rank: int, message: str) -> None:
        super().__init__(message)
        self.rank = rank


class RankPool:
    """A fixed set of forked ranks that run one function at a time."""

    def __init__(
        self, nursery: Nursery, world_size: int, *, backend: str | None, environment: dict[str, str]
    ) -> None:
        self.world_size = world_size
        self._nursery = nursery
        self._directory = Path(tempfile.mkdtemp(prefix="ranks-"))
        ranks = nursery.spawn(
            [self._spec(rank, backend, environment) for rank in range(world_size)]
        )
        self.pids: list[int] = [pid for pid, _ in ranks]
        self._connections: list[Connection] = [connection for _, connection in ranks]
        self._groups_made: set[int] = set()

    def _spec(self, rank: int, backend: str | None, environment: dict[str, str]) -> RankSpec:
        return RankSpec(
            rank=rank,
            world_size=self.world_size,
            backend=backend or "",
            store=str(self._directory / "store") if backend else "",
            stack_file=str(self._directory / f"stack-{rank}"),
            environment=environment | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
        )

    def run(
        self, function: Callable[..., Any], args: tuple[Any, ...], timeout_seconds: float
    ) -> list[Any]:
        """Values returned by the ranks, in rank order. After an exception the pool is unusable."""
        request = pickle.dumps((function, args))
        for rank, connection in enumerate(self._connections):
            try:
                call(connection, request)
            except OSError as error:
                raise RankError(
                    rank, f"rank {rank} was gone before the call: {self._how_ended(rank)}"
                ) from error
        answers = self._collect(time.monotonic() + timeout_seconds, timeout_seconds)
        self._groups_made = {groups for _, _, groups in answers}
        return [value for _, value, _ in answers]

    @property
    def reusable(self) -> bool:
        """Whether process groups made by the next call get names that are new and agree."""
        return len(self._groups_made) == 1 and -1 not in self._groups_made

    def _collect(self, deadline: float, timeout_seconds: float) -> list[tuple[bool, Any, Any]]:
        answers: dict[int, tuple[bool, Any, Any]] = {}
        failures: list[tuple[int, str]] = []
        waiting = {connection: rank for rank, connection in enumerate(self._connections)}
        while waiting:
            ready = wait(list(waiting), timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                break
            for connection in ready:
                rank = waiting.pop(connection)  # type: ignore[index]
                failure = self._receive(rank, answers)
                if failure:
                    failures.append((rank, failure))
                    deadline = min(deadline, time.monotonic() + _GRACE_SECONDS)
        if failures:
            raise self._failure(failures, sorted(waiting.values()))
        if waiting:
            raise self._hang(sorted(waiting.values()), timeout_seconds)
        return [answers[rank] for rank in range(self.world_size)]

    def _receive(self, rank: int, answers: dict[int, tuple[bool, Any, Any]]) -> str:
        """Take the answer of a rank; returns what failed, empty if nothing did."""
        try:
            answers[rank] = pickle.loads(self._connections[rank].recv_bytes())
        except (EOFError, ConnectionResetError):
            return f"the process ended without an answer: {self._how_ended(rank)}"
        succeeded, _, text = answers[rank]
        return "" if succeeded else text

    def _failure(self, failures: list[tuple[int, str]], waiting: list[int]) -> RankError:
        rank, text = failures[0]
        others = "".join(f"\n  rank {other}: {_last_line(said)}" for other, said in failures[1:])
        unfinished = f"\n  still running, ended: {waiting}" if waiting else ""
        return RankError(
            rank, f"rank {rank} of {self.world_size} failed:\n{text}{others}{unfinished}"
        )

    def _hang(self, waiting: list[int], timeout_seconds: float) -> RankError:
        for rank in waiting:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pids[rank], STACK_SIGNAL)
        time.sleep(_GRACE_SECONDS)
        stacks = "".join(
            f"\n--- rank {rank}:\n{(self._directory / f'stack-{rank}').read_text()}"
            for rank in waiting
        )
        message = (
            f"ranks {waiting} of {self.world_size} did not finish within {timeout_seconds:g} s; "
            f"they are at{stacks}"
        )
        print(message, file=sys.stderr)
        return RankError(waiting[0], message)

    def _how_ended(self, rank: int) -> str:
        pid, self.pids[rank] = self.pids[rank], 0
        return _end(self._nursery, pid, time.monotonic() + _EXIT_SECONDS) if pid else "reaped"

    def close(self, *, kill: bool) -> None:
        """End the ranks: at once with `kill`, otherwise they leave when their connection closes."""
        for connection in self._connections:
            connection.close()
        deadline = time.monotonic() + (0.0 if kill else _EXIT_SECONDS)
        for pid in filter(None, self.pids):
            _end(self._nursery, pid, deadline)
        shutil.rmtree(self._directory, ignore_errors=True)


class Harness:
    """The nursery and the pools of one pytest session."""

    def __init__(self) -> None:
        self._nursery: Nursery | None = None
        self._pools: dict[tuple[int, str], RankPool] = {}

    def start(self) -> Nursery:
        """Fork the nursery, if that has not been done. Called when collection has finished."""
        if self._nursery is None:
            self._nursery = Nursery()
            atexit.register(self.stop)
        return self._nursery

    def stop(self) -> None:
        """End all ranks and the nursery. Does nothing in a forked copy of this process."""
        nursery, self._nursery = self._nursery, None
        if nursery is None or nursery.owner != os.getpid():
            return
        atexit.unregister(self.stop)
        for pool in self._pools.values():
            pool.close(kill=True)
        self._pools.clear()
        nursery.stop()

    def run(
        self,
        function: Callable[..., Any],
        size: int,
        args: tuple[Any, ...],
        timeout: float,
        backend: str,
    ) -> list[Any]:
        """See `run_ranks`."""
        key = (size, backend)
        if key not in self._pools:
            environment = _environment(size)
            self._pools[key] = RankPool(
                self.start(), size, backend=backend, environment=environment
            )
        pool = self._pools.pop(key)
        try:
            values = pool.run(function, args, timeout)
        except BaseException:
            pool.close(kill=True)
            raise
        if pool.reusable:
            self._pools[key] = pool
        else:
            pool.close(kill=True)
        return values

    def run_fresh(
        self, function: Callable[..., Any], size: int, args: tuple[Any, ...], timeout: float
    ) -> list[Any]:
        """See `run_ranks_fresh`."""
        environment = _environment(size) | {"MASTER_PORT": str(free_port())}
        pool = RankPool(self.start(), size, backend=None, environment=environment)
        try:
            values = pool.run(function, args, timeout)
        except BaseException:
            pool.close(kill=True)
            raise
        pool.close(kill=False)
        return values


_harness = Harness()
start, stop = _harness.start, _harness.stop


def run_ranks(
    function: Callable[..., Any],
    world_size: int,
    *args: Any,
    timeout: float = 60,
    backend: str = "gloo",
) -> list[Any]:
    """Call `function(rank, world_size, *args)` on every rank of a standing pool.

    The world is initialised. Returns the values by rank; raises `RankError` when a rank fails, dies
    or is not done within `timeout` seconds.
    With `backend="nccl"` each rank has the GPU of its number as current device.
    """
    _check_world_size(world_size)
    return _harness.run(function, world_size, args, timeout, backend)


def run_ranks_fresh(
    function: Callable[..., Any], world_size: int, *args: Any, timeout: float = 120
) -> list[Any]:
    """The same on ranks forked for this call only, without a process group.

    They see the environment that a launcher gives: RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE,
    NODE_RANK, MASTER_ADDR and a free MASTER_PORT.
    """
    _check_world_size(world_size)
    return _harness.run_fresh(function, world_size, args, timeout)


def _check_world_size(world_size: int) -> None:
    if not 1 <= world_size <= 16:
        raise ValueError(f"world_size={world_size}: the harness runs 1 to 16 ranks")


def _environment(world_size: int) -> dict[str, str]:
    size = str(world_size)
    environment = {
        "WORLD_SIZE": size,
        "LOCAL_WORLD_SIZE": size,
        "NODE_RANK": "0",
        "MASTER_ADDR": "127.0.0.1",
    }
    if sys.platform == "linux":
        environment["GLOO_SOCKET_IFNAME"] = (
            "lo"  # no look-up of the host name, no firewall in between
        )
    return environment


def _end(nursery: Nursery, pid: int, deadline: float) -> str:
    """Wait for a rank until the deadline, kill it and all that it started, and say how it ended."""
    while time.monotonic() < deadline and not _has_ended(pid):
        time.sleep(0.01)
    kill_group(pid)
    return nursery.reap(pid)


def _has_ended(pid: int) -> bool:
    """Whether a process that the nursery has not reaped yet is a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


def _last_line(text: str) -> str:
    return text.strip().splitlines()[-1]
