"""Processes that work on a stream of items and give the results in order.

Unlike `multiprocessing.Pool` it notices a worker that dies, lets no worker outlive this process,
and reads no further ahead than the workers need, which bounds memory.
"""

import multiprocessing
import signal
import traceback
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from types import TracebackType
from typing import Any, Generic, TypeVar, cast

from megatron_lightning.utils.env import provide

Item = TypeVar("Item")
Result = TypeVar("Result")

_AHEAD = 3  # items for each worker between the oldest that is unfinished and the newest
_PATIENCE_SECONDS = 5.0


class Workers(Generic[Item, Result]):
    """A context manager: the workers live as long as the block.

    Args:
        make: called in each worker; returns the function for its items.
        count: number of workers; with 1 the work is done in this process.
    """

    def __init__(self, make: Callable[[], Callable[[Item], Result]], count: int) -> None:
        self._make, self._count = make, count
        self._work: Callable[[Item], Result] | None = None
        self._processes: list[BaseProcess] = []
        self._pipes: list[Connection] = []

    def __enter__(self) -> "Workers[Item, Result]":
        """Starts the workers."""
        if self._count == 1:
            return self
        # A forked worker needs no import of its own; no thread of this package runs by now.
        context = multiprocessing.get_context("fork")
        try:
            for _ in range(self._count):
                ours, theirs = context.Pipe()
                self._pipes.append(cast(Connection, ours))
                process = context.Process(
                    target=_serve, args=(theirs, list(self._pipes), self._make), daemon=True
                )
                process.start()
                self._processes.append(process)
                theirs.close()
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Ends the workers, whatever they are doing."""
        self._end()

    def map(self, items: Iterator[Item]) -> Iterator[Result]:
        """Yields the result of each item, in the order of the items.

        Raises:
            RuntimeError: a worker failed or was killed.
        """
        if self._count == 1:
            self._work = self._work or self._make()
            yield from map(self._work, items)
            return
        results: dict[int, Result] = {}
        busy: dict[Connection, int] = {}
        idle = list(self._pipes)
        sent = given = 0
        more = True
        while more or given < sent:
            while more and idle and sent < given + self._count * _AHEAD:
                try:
                    item = next(items)
                except StopIteration:
                    more = False
                    break
                self._send(idle[-1], item)
                busy[idle.pop()] = sent
                sent += 1
            while given in results:
                yield results.pop(given)
                given += 1
            for pipe in self._wait(list(busy)) if busy else ():
                results[busy.pop(pipe)] = self._receive(pipe)
                idle.append(pipe)

    def _wait(self, pipes: list[Connection]) -> list[Connection]:
        """Returns those that have a result."""
        sentinels = [process.sentinel for process in self._processes]
        ready = [entry for entry in wait([*pipes, *sentinels]) if isinstance(entry, Connection)]
        if not ready:
            raise RuntimeError(self._who_died())
        return ready

    def _send(self, pipe: Connection, item: Item) -> None:
        try:
            pipe.send(item)
        except OSError:
            raise RuntimeError(self._who_died()) from None

    def _receive(self, pipe: Connection) -> Any:
        try:
            good, result = pipe.recv()
        except (EOFError, OSError):
            raise RuntimeError(self._who_died()) from None
        if not good:
            raise RuntimeError(f"a worker failed:\n{result}")
        return result

    def _who_died(self) -> str:
        for process in self._processes:
            process.join(timeout=1.0)
            if process.exitcode is not None:
                return (
                    f"a worker ended with exit code {process.exitcode}"
                    " (-9: killed, often because memory ran out); use fewer workers"
                )
        return "a worker closed its connection"

    def _end(self) -> None:
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            process.terminate()
        for process in self._processes:
            process.join(_PATIENCE_SECONDS)
            if process.exitcode is None:
                process.kill()
                process.join()
        self._pipes, self._processes = [], []


def _serve(
    pipe: Connection, foreign: list[Connection], make: Callable[[], Callable[[Any], Any]]
) -> None:
    """Works on what comes through the pipe, until it is closed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all; the parent answers it
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    for other in foreign:  # as long as one is open here, its worker cannot see the parent die
        other.close()
    provide(TOKENIZERS_PARALLELISM="false")  # a process is one core's worth of work
    work: Callable[[Any], Any] | None = None
    while True:
        try:
            item = pipe.recv()
        except (EOFError, OSError):
            return
        try:
            work = work or make()
            answer = (True, work(item))
        except BaseException:
            answer = (False, traceback.format_exc())
        try:
            pipe.send(answer)
        except OSError:  # nobody listens any more
            return
