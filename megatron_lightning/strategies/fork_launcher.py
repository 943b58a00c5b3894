"""Ranks forked from this process, for notebooks: it waits, and then looks as if it had run itself.

The process that forks is no rank. It watches the ranks from outside, so nothing that a rank does
can hang it; results and failures come through one pipe per rank.
"""

from __future__ import annotations

import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkProcess
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from lightning.pytorch import Trainer
from lightning.pytorch.strategies.launchers.launcher import _Launcher
from lightning.pytorch.utilities.exceptions import SIGTERMException
from typing_extensions import override

from megatron_lightning.strategies import _compat
from megatron_lightning.strategies.failure import (
    RankFailure,
    how_it_ended,
    is_quiet,
    say,
    traceback_of,
)
from megatron_lightning.strategies.forks import become_rank, check_can_fork, check_inherited
from megatron_lightning.strategies.handover import Handover, picklable
from megatron_lightning.strategies.run_checks import check_run

if TYPE_CHECKING:
    from megatron_lightning.strategies.model_strategy import ModelStrategy

_START_GRACE_SECONDS = 1.0
_RUN_GRACE_SECONDS = 35.0
_EXIT_SECONDS = 60.0


@dataclass(frozen=True, kw_only=True)
class _Failure:
    rank: int
    exception: BaseException
    text: str
    secondary: bool
    interrupted: bool = False


@dataclass
class _Rank:
    number: int
    process: ForkProcess
    connection: Any
    joined: bool = False
    result: bytes | None = None
    failed: bool = False
    ended: bool = False


class ForkLauncher(_Launcher):
    """Forks all ranks for each call of the Trainer and puts their results into this process."""

    def __init__(self, strategy: ModelStrategy) -> None:
        self._strategy = strategy
        self._ranks: list[_Rank] = []
        self._child: Connection | None = None
        self.store_file = ""
        """Through this file the ranks find each other: a port might be taken meanwhile."""
        self._callbacks: list[Any] | None = None
        self._failures: list[_Failure] = []
        self._stopping: int | None = None
        self._forwarded: tuple[int, ...] = (signal.SIGTERM,)

    @property
    @override
    def is_interactive_compatible(self) -> bool:
        return True

    @override
    def launch(
        self,
        function: Callable[..., Any],
        *args: Any,
        trainer: Trainer | None = None,
        **kwargs: Any,
    ) -> Any:
        """Check, fork, wait, take over the results. What a rank raised is raised here."""
        if self.is_rank:
            return function(*args, **kwargs)
        assert trainer is not None
        arguments = _compat.run_arguments(function, args, kwargs)
        check_run(self._strategy, trainer, arguments)
        check_can_fork()
        self._handover = Handover(trainer, arguments)
        self._trainer = trainer
        self._failures, self._stopping = [], None
        sys.stdout.flush()
        sys.stderr.flush()
        with tempfile.TemporaryDirectory() as folder, self._forward_signals():
            self.store_file = os.path.join(folder, "store")
            self._fork(lambda: _compat.call_in_rank(trainer, function, args, kwargs))
            try:
                self._collect()
            except BaseException:
                self.kill(signal.SIGKILL)
                raise
            finally:
                for rank in self._ranks:
                    rank.process.join()
                    rank.process.close()
                    rank.connection.close()
        if self._failures or self._stopping is not None:
            self._raise_failure()
        return self._handover.receive([rank.result for rank in self._ranks])

    def joined(self) -> None:
        """In a rank: all ranks have met, and watch each other from now on."""
        if self._child is not None:
            self._child.send("joined")

    @override
    def kill(self, signum: int) -> None:
        """Send a signal to all ranks that live."""
        for rank in self._ranks:
            if not rank.ended and rank.process.pid is not None:
                with suppress(ProcessLookupError):
                    os.kill(rank.process.pid, signum)

    @property
    def is_rank(self) -> bool:
        """Whether this process is one of the ranks."""
        return self._child is not None

    def restore_callbacks(self) -> None:
        """Give the Trainer its callbacks back. Their hooks on the exception have run in the ranks,
        and were not to run again here.
        """
        if self._callbacks is not None:
            _compat.set_callbacks(self._trainer, self._callbacks)
            self._callbacks = None

    # ------------------------------------------------------------------ this process

    def _fork(self, function: Callable[[], Any]) -> None:
        context = get_context("fork")
        self._ranks = []
        parent = os.getpid()
        for number in range(self._strategy.num_processes):
            ours, theirs = context.Pipe()

            def main(number: int = number, theirs: Any = theirs) -> None:
                self._child = theirs
                become_rank(number, parent, self._forwarded)
                self._run(number, function)

            process = context.Process(target=main, name=f"rank {number}")
            process.start()
            theirs.close()
            self._ranks.append(_Rank(number=number, process=process, connection=ours))

    def _collect(self) -> None:
        """Wait until all ranks have ended; when one fails, the others soon have to."""
        deadline = float("inf")
        while alive := [rank for rank in self._ranks if not rank.ended]:
            sources: dict[Any, _Rank] = {rank.process.sentinel: rank for rank in alive}
            sources |= {rank.connection: rank for rank in alive if not rank.connection.closed}
            for source in wait(list(sources), timeout=0.5):
                rank = sources[source]
                self._receive(rank)
                if source == rank.process.sentinel:
                    self._reap(rank)
            deadline = min(deadline, time.monotonic() + self._seconds_left())
            if time.monotonic() > deadline:
                self.kill(signal.SIGKILL)

    def _seconds_left(self) -> float:
        """How long the ranks may live on, as things are now."""
        if self._failures:
            met = all(rank.joined for rank in self._ranks)
            return _RUN_GRACE_SECONDS if met else _START_GRACE_SECONDS
        if self._stopping is not None:  # they finish their step and save
            return self._strategy.config.runtime.timeout_seconds
        done = all(rank.result is not None for rank in self._ranks)
        return _EXIT_SECONDS if done else float("inf")

    def _receive(self, rank: _Rank) -> None:
        """Take what a rank has sent, without waiting."""
        try:
            while not rank.connection.closed and rank.connection.poll():
                message = rank.connection.recv()
                if isinstance(message, _Failure):
                    self._failures.append(message)
                    rank.failed = True
                elif isinstance(message, bytes):
                    rank.result = message
                else:
                    rank.joined = True
        except (EOFError, OSError):
            rank.connection.close()

    def _reap(self, rank: _Rank) -> None:
        """Note the end of a rank; without result or failure, it is a failure itself."""
        rank.process.join()
        self._receive(rank)
        rank.ended = True
        status = rank.process.exitcode or 0
        if rank.result is None and not rank.failed:
            text = f"[rank {rank.number}] ended without a traceback: {how_it_ended(status)}"
            late = status >= 0 and bool(self._failures)  # the others' lifelines end them
            failure = RankFailure(rank.number, text)
            self._failures.append(
                _Failure(rank=rank.number, exception=failure, text="", secondary=late)
            )

    def _raise_failure(self) -> None:
        """Raise what the first rank that failed raised, its traceback as the cause."""
        self._callbacks = _compat.callbacks_of(self._trainer)
        _compat.set_callbacks(self._trainer, [])
        first = next((f for f in self._failures if not f.secondary), None)
        agreed = first is None or not first.text or is_quiet(first.exception)
        if self._stopping is not None and self._stopping != signal.SIGINT and agreed:
            raise SIGTERMException(128 + self._stopping)
        first = first or self._failures[0]
        if first.interrupted or self._stopping == signal.SIGINT:
            raise KeyboardInterrupt
        exception = first.exception
        exits = isinstance(exception, SystemExit)
        if isinstance(exception, SystemExit) and exception.code and not is_quiet(exception):
            say(first.text)
        if not first.text or exits or is_quiet(exception):
            raise exception
        raise first.exception from RankFailure(first.rank, f"\n{first.text}")

    @contextmanager
    def _forward_signals(self) -> Generator[None]:
        """SIGTERM, SIGUSR1 and Ctrl-C go to the ranks, which stop after their step; a second Ctrl-C
        kills them.
        """
        if threading.current_thread() is not threading.main_thread():
            yield
            return

        def forward(signum: int, frame: Any) -> None:
            if self._stopping is not None and signum == signal.SIGINT:
                raise KeyboardInterrupt
            self._stopping = signum
            self.kill(signum)
            if signum == signal.SIGINT:
                say("Interrupted: the run ends after this step; interrupt again to end it at once.")

        before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
        if signal.getsignal(signal.SIGUSR1) == signal.SIG_DFL:  # a user's handler has its meaning
            before[signal.SIGUSR1] = signal.SIG_DFL
        for number in before:
            signal.signal(number, forward)
        self._forwarded = tuple(before)
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler if handler is not None else signal.SIG_DFL)

    # ------------------------------------------------------------------ in a rank

    def _run(self, number: int, function: Callable[[], Any]) -> None:
        assert self._child is not None
        strategy = self._strategy
        try:
            strategy.set_world_ranks()
            check_inherited(strategy.root_device)
            self._child.send(self._handover.collect(strategy, function()))
        except BaseException as exception:
            failure = _Failure(
                rank=number,
                exception=picklable(exception, number),
                text=traceback_of(exception, number),
                secondary=strategy.failed_after_another,
                interrupted=strategy.was_interrupted,
            )
            self._child.send(failure)
            sys.exit(1)
        dist.destroy_process_group()
