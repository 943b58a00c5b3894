"""SIGTERM, SIGUSR1 and Ctrl-C in a run of several ranks.

Lightning's handlers broadcast or save a checkpoint inside of the signal handler, where other ranks
are somewhere else: a deadlock. Here a handler only sets a flag. The flags travel with a reduction
that every step needs anyway (`runtime/ballot.py`), so that all ranks know after the same step, and
act together at the same place (`preemption.py`).
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

from lightning.fabric.plugins.environments import ClusterEnvironment, SLURMEnvironment
from lightning.pytorch import Trainer
from lightning.pytorch.utilities.exceptions import SIGTERMException

from megatron_lightning.runtime.ballot import Ballot
from megatron_lightning.strategies import _compat
from megatron_lightning.strategies.failure import SIGTERM_STATUS, say

STOP, INTERRUPT, REQUEUE, SAVED_STEP = range(4)
"""Places in the ballot: the three signals, and the newest step that is complete on local disks."""
_UNHANDLED = (signal.SIG_DFL, None)


class SignalFlags:
    """Signals that reached this rank and have not been acted on. Made for one call of the Trainer.

    `group` is the gloo group of all ranks, None in one process.
    """

    def __init__(
        self, trainer: Trainer, rank: int, group: Any, environment: ClusterEnvironment | None
    ) -> None:
        self._trainer = trainer
        self._rank = rank
        self._group = group
        self.ballot = Ballot(4)
        slurm = isinstance(environment, SLURMEnvironment)
        given = environment.requeue_signal if isinstance(environment, SLURMEnvironment) else None
        self.requeue_signal = given or signal.SIGUSR1
        """The signal that asks for a checkpoint and, under SLURM, for another turn."""
        self.requeues = slurm and environment.auto_requeue  # type: ignore[union-attr]
        """Whether SLURM is asked to run the job again."""
        self._previous: dict[int, Any] = {}
        self.agreed = False
        """True once all ranks stop together: collectives in hooks on exceptions are safe."""
        self.stopping_for: int | None = None
        """The signal for which all ranks stop at the next step boundary."""

    def connect(self) -> None:
        """Take the signals over, as long as this call of the Trainer lasts."""
        flag_stop = self._flag(STOP)
        _compat.replace_signal_handlers(
            self._trainer, sigterm=flag_stop, requeue=self._flag(REQUEUE)
        )
        if threading.current_thread() is not threading.main_thread():
            return
        before = signal.getsignal(signal.SIGTERM)

        def stop(signum: int, frame: FrameType | None) -> None:
            flag_stop(signum, frame)
            if callable(before):
                before(signum, frame)

        self._install(signal.SIGTERM, stop)
        if signal.getsignal(self.requeue_signal) in _UNHANDLED:  # a user's handler has its meaning
            self._install(self.requeue_signal, self._flag(REQUEUE))

    def watch_interrupts(self) -> None:
        """Turn Ctrl-C into a flag, where several ranks would end at different places."""
        if (
            self._group is not None
            and threading.current_thread() is threading.main_thread()
            and signal.getsignal(signal.SIGINT) is signal.default_int_handler
        ):
            self._install(signal.SIGINT, self._on_interrupt)

    def close(self) -> None:
        """Give the signals their old meaning."""
        for signum, handler in self._previous.items():
            handler = signal.SIG_DFL if handler is None else handler
            signal.signal(signum, handler)
            _compat.set_handler_from_before(self._trainer, signum, handler)
        self._previous.clear()

    def _install(self, signum: int, handler: Callable[[int, FrameType | None], None]) -> None:
        self._previous[signum] = signal.signal(signum, handler)

    def _flag(self, place: int) -> Callable[[int, FrameType | None], None]:
        def raise_flag(signum: int, frame: FrameType | None) -> None:  # noqa: ARG001
            self.ballot.mine[place] = 1

        return raise_flag

    def _on_interrupt(self, signum: int, frame: FrameType | None) -> None:
        if self.ballot.mine[INTERRUPT]:
            raise KeyboardInterrupt
        self.ballot.mine[INTERRUPT] = 1
        if self._rank == 0:
            say("Interrupted: the run ends after this step. Press Ctrl-C again to end it at once.")

    # ------------------------------------------------------------------ after each batch

    def agree(self) -> int:
        """Learn what reached any rank; every rank must call it after the same batch.

        Sets `stopping_for`, and raises KeyboardInterrupt on all ranks after a Ctrl-C. Returns the
        newest step that all ranks have on their local disks.
        """
        highest, lowest = self.ballot.result(self._group)
        if highest[INTERRUPT]:
            self.agreed = True
            raise KeyboardInterrupt
        if highest[STOP] or highest[REQUEUE]:
            self.agreed = True
            # SIGTERM often follows the other signal, which asks for more
            self.stopping_for = self.requeue_signal if highest[REQUEUE] else signal.SIGTERM
        return lowest[SAVED_STEP]

    def set_exit_status(self, exception: BaseException) -> None:
        """Let a run that a signal stopped end with 128 + its number, not with Lightning's 0."""
        if isinstance(exception, SIGTERMException) and exception.code is None:
            stopped = self.stopping_for
            exception.code = SIGTERM_STATUS if stopped is None else 128 + stopped
