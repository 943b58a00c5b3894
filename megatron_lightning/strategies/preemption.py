"""Stopping because a signal asked for it: all ranks after the same step, with one checkpoint.

The flags of the ranks are known to all when a batch ends (`signals.py`). Lightning's loops then end
the run where its state is whole: after a batch of the training with all that belongs to it, or
after the epoch's end. An accumulation window is finished first, since its sums are not saved; in a
validation the run stops at once, and the checkpoint says that the validation is still to be done.
"""

from __future__ import annotations

import subprocess
from typing import TYPE_CHECKING, Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint, OnExceptionCheckpoint
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.exceptions import SIGTERMException
from typing_extensions import override

from megatron_lightning.strategies import _compat
from megatron_lightning.strategies.failure import how_it_ended, say
from megatron_lightning.strategies.resume import next_preempted
from megatron_lightning.strategies.signals import SignalFlags
from megatron_lightning.utils.env import slurm_job

if TYPE_CHECKING:
    from megatron_lightning.strategies.mesh_strategy import MeshStrategy


class Preemption(Callback):
    """The last of the callbacks during a call of the Trainer: when it is asked, the hooks of all
    others have run. It holds no state that belongs into a checkpoint.
    """

    reads_parameters = False
    """See `strategies/readers.py`."""

    def __init__(self, strategy: MeshStrategy, trainer: Trainer, signals: SignalFlags) -> None:
        self._strategy = strategy
        self._trainer = trainer
        self._signals = signals
        self._trained = False
        self._validation_before: dict[str, Any] | None = None
        _compat.callbacks_of(trainer).append(self)

    def close(self) -> None:
        """Leave the list of callbacks."""
        callbacks = _compat.callbacks_of(self._trainer)
        if self in callbacks:
            callbacks.remove(self)

    # ------------------------------------------------------------------ where a run may stop

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._signals.agree()
        self._stop_here()

    @override
    def on_train_batch_end(self, *args: Any, **kwargs: Any) -> None:
        self._trained = True
        complete = self._signals.agree()
        if not self._signals.agreed:
            self._strategy.at_step_boundary(complete)
        elif not self._strategy.window_is_open:
            _compat.note_sigterm(self._trainer)

    @override
    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.state.fn == TrainerFn.FITTING and not trainer.sanity_checking:
            self._validation_before = _compat.validation_to_be_done(trainer)
            self._stop_here()

    @override
    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._validation_before = None

    @override
    def on_validation_batch_end(self, *args: Any, **kwargs: Any) -> None:
        self._signals.agree()
        self._stop_here()

    @override
    def on_test_batch_end(self, *args: Any, **kwargs: Any) -> None:
        self._signals.agree()
        self._stop_here()

    @override
    def on_predict_batch_end(self, *args: Any, **kwargs: Any) -> None:
        self._signals.agree()
        self._stop_here()

    def _stop_here(self) -> None:
        if self._signals.agreed:
            raise SIGTERMException

    # ------------------------------------------------------------------ what is saved

    @override
    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        if self._signals.stopping_for is None or not isinstance(exception, SIGTERMException):
            return
        requeue = self._signals.requeues and (
            self._signals.stopping_for == self._signals.requeue_signal
        )
        said = [f"stopped by {how_it_ended(-self._signals.stopping_for)}"]
        if self._trained and not _compat.is_trial(trainer):
            said.append(self._save(needed=requeue))
        else:
            said.append("no step was taken, so nothing is saved")
        if requeue:
            said.append(self._requeue())
        if trainer.is_global_zero:
            say(f"Step {trainer.global_step}: {'; '.join(said)}. Exit status {exception.code}.")

    def _save(self, *, needed: bool) -> str:
        """Save unless a callback of the user has, and say what was saved."""
        path = _saved_by_user(self._trainer)
        if path is not None and not needed:
            return f"saved as {path}"
        if not (needed or self._strategy.config.runtime.save_on_preemption):
            return "nothing is saved (save_on_preemption=False)"
        path = self._strategy.broadcast(next_preempted(self._trainer.default_root_dir))
        self._trainer.save_checkpoint(path, weights_only=False)  # None prints a line on each rank
        return f"saved as {path}"

    @override
    def on_save_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        if self._signals.agreed and self._validation_before is not None:
            _compat.set_validation_progress(checkpoint, self._validation_before)

    # ------------------------------------------------------------------ SLURM

    def _requeue(self) -> str:
        """Ask SLURM, on one rank, to run this job again; what became of it, in words."""
        said = requeue_job() if self._trainer.is_global_zero else ""
        return self._strategy.broadcast(said)


def requeue_job() -> str:
    """Call `scontrol requeue` for the job of this process; what became of it, in words."""
    job = slurm_job()
    if job is None:
        return "not requeued: SLURM_JOB_ID is not set"
    command = ["scontrol", "requeue", job]
    try:
        status = subprocess.call(command)
    except OSError as error:
        return f"not requeued: {' '.join(command)}: {error}"
    if status:
        return f"not requeued: {' '.join(command)} ended with status {status}"
    return f"requeued as job {job}"


def _saved_by_user(trainer: Trainer) -> str | None:
    """Where a callback that saves on exceptions has just saved this state; None without one."""
    for callback in _compat.callbacks_of(trainer):
        if isinstance(callback, OnExceptionCheckpoint):
            return callback.ckpt_path
        if isinstance(callback, ModelCheckpoint) and callback.save_on_exception:
            return callback.last_model_path or callback.best_model_path or str(callback.dirpath)
    return None
