"""SIGTERM, Ctrl-C and SLURM's requeue signal in a run of several ranks.

Lightning's handlers broadcast or save a checkpoint inside of the signal handler, where other ranks
are somewhere else: a deadlock. Here a handler only sets a flag. After each batch all ranks agree on
the flags, through one small reduction on the CPU, and act together at the same place.
"""

from __future__ import annotations

import signal
import threading
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import Trainer
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.exceptions import SIGTERMException

from megatron_lightning.strategies import _compat
from megatron_lightning.strategies.failure import SIGTERM_STATUS, say

STOP, INTERRUPT, REQUEUE = range(3)


class SignalFlags:
    """Signals that reached this rank and have not been acted on. Made for one call of the Trainer.

    `group` is the gloo group of all ranks, None in one process.
    """

    def __init__(self, trainer: Trainer, rank: int, group: Any) -> None:
        self._trainer = trainer
        self._rank = rank
        self._group = group
        self._raised = [0, 0, 0]
        self._previous_sigint: Any = None
        self.agreed = False
        """True once all ranks stop together: collectives in hooks on exceptions are safe."""

    def connect(self) -> None:
        """Put our handlers where Lightning registers its own when the run starts."""
        several = self._group is not None
        _compat.replace_signal_handlers(
            self._trainer,
            sigterm=(lambda signum, frame: self._raise_flag(STOP)) if several else None,
            requeue=lambda signum, frame: self._raise_flag(REQUEUE),
        )

    def watch_interrupts(self) -> None:
        """Turn Ctrl-C into a flag, where several ranks would end at different places."""
        if (
            self._group is not None
            and threading.current_thread() is threading.main_thread()
            and signal.getsignal(signal.SIGINT) is signal.default_int_handler
        ):
            self._previous_sigint = signal.signal(signal.SIGINT, self._on_interrupt)

    def close(self) -> None:
        """Give Ctrl-C its old meaning."""
        if self._previous_sigint is not None:
            signal.signal(signal.SIGINT, self._previous_sigint)
            self._previous_sigint = None

    def _raise_flag(self, flag: int) -> None:
        self._raised[flag] = 1

    def _on_interrupt(self, signum: int, frame: FrameType | None) -> None:
        if self._raised[INTERRUPT]:
            raise KeyboardInterrupt
        self._raise_flag(INTERRUPT)
        if self._rank == 0:
            say("Interrupted: the run ends after this step. Press Ctrl-C again to end it at once.")

    # ------------------------------------------------------------------ after each batch

    def act(self) -> None:
        """Agree with all ranks, then stop or requeue on all of them. Every rank must call it.

        Raises SIGTERMException or KeyboardInterrupt on all ranks; while fitting or evaluating
        Lightning itself raises the former, at the end of the batch.
        """
        votes = torch.tensor(self._raised, dtype=torch.int32)
        if self._group is not None:
            dist.all_reduce(votes, op=dist.ReduceOp.MAX, group=self._group)
        stop, interrupt, requeue = votes.tolist()
        if requeue and not self._in_validation_of_fit():
            self._raised[REQUEUE] = 0
            _compat.requeue_job(self._trainer, signal.SIGUSR1)
        if interrupt:
            self.agreed = True
            raise KeyboardInterrupt
        if stop:
            self.agreed = True
            _compat.note_sigterm(self._trainer)
            if self._trainer.state.fn == TrainerFn.PREDICTING:
                raise SIGTERMException

    def _in_validation_of_fit(self) -> bool:
        return self._trainer.state.fn == TrainerFn.FITTING and not self._trainer.training


def set_exit_status(exception: BaseException) -> None:
    """Let a run that SIGTERM stopped end with status 143, not with Lightning's 0."""
    if isinstance(exception, SIGTERMException) and exception.code is None:
        exception.code = SIGTERM_STATUS
