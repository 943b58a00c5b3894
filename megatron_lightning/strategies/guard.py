"""A run's watch over itself: failures are told to all ranks, signals are agreed on."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from lightning.pytorch import Callback, LightningModule, Trainer
from typing_extensions import override

from megatron_lightning.runtime.ballot import Ballot
from megatron_lightning.strategies import _compat, failure
from megatron_lightning.strategies.lifeline import Lifeline, Report, describe_peer
from megatron_lightning.strategies.preemption import Preemption
from megatron_lightning.strategies.signals import SignalFlags

if TYPE_CHECKING:
    from megatron_lightning.strategies.mesh_strategy import MeshStrategy

ALIKE_SECONDS = 2.5
"""How long a rank waits for all others to report the same failure, where it matters."""
_NEWS_SECONDS = 0.5
_BROKEN_NEWS_SECONDS = 3.0


class RunGuard(Callback):
    """Lives from the start of a call of the Trainer until its teardown, first among the callbacks.

    It holds no state that belongs into a checkpoint.
    """

    reads_parameters = False
    """See `strategies/readers.py`."""

    def __init__(self, strategy: MeshStrategy, trainer: Trainer) -> None:
        self._trainer = trainer
        self._rank = strategy.global_rank
        self._several = strategy.world_size > 1
        self._shown_elsewhere = strategy.shown_elsewhere
        self._lifeline: Lifeline | None = None
        self.secondary = False
        """Whether this rank failed only because another had."""
        self._told: BaseException | None = None
        self._alike: bool | None = None
        if self._several:
            host = _host_of_first_rank(strategy)
            self._lifeline = Lifeline.open(
                self._rank, strategy.world_size, host, strategy.broadcast
            )
            self._lifeline.before_leaving = strategy.end_started_ranks
            self._lifeline.quiet = strategy.shown_elsewhere
            failure.silence_reported()
        self._signals = SignalFlags(
            trainer, self._rank, strategy.mesh.control_group, strategy.cluster_environment
        )
        self._signals.connect()
        _compat.skip_sigterm_broadcast(trainer)
        _compat.callbacks_of(trainer).insert(0, self)
        self._preemption = Preemption(strategy, trainer, self._signals)

    @property
    def ballot(self) -> Ballot:
        """What the ranks agree on with each step."""
        return self._signals.ballot

    def close(self) -> None:
        """End the watch; the other ranks may still be at work."""
        self._signals.close()
        self._preemption.close()
        callbacks = _compat.callbacks_of(self._trainer)
        if self in callbacks:
            callbacks.remove(self)
        if self._lifeline is not None:
            self._lifeline.close()
            self._lifeline = None

    # ------------------------------------------------------------------ failures

    def report(self, exception: BaseException) -> None:
        """Tell all ranks and show the traceback, once for each exception."""
        if exception is self._told:
            return
        self._told = exception
        self._signals.set_exit_status(exception)
        if self._lifeline is None:
            return
        broken = failure.is_broken_connection(exception)
        report = Report(
            rank=self._rank,
            reason=failure.reason_of(exception),
            kind="" if broken else type(exception).__name__,
            step=self._trainer.global_step,
        )
        self._alike = False if broken else None
        news = self._lifeline.news(_BROKEN_NEWS_SECONDS) if broken else None
        self._lifeline.report(report)
        if not broken and not self._signals.agreed:
            news = self._lifeline.news(_NEWS_SECONDS)
            if news is not None and news.kind != report.kind:
                news = None  # a failure of its own, to be shown whole
        self.secondary = news is not None
        if isinstance(exception, SystemExit) and not exception.code and not self.all_ranks_end():
            exception.code = 1  # it ended the others, so the job has failed
        self._show(exception, news)

    @contextmanager
    def explaining(self) -> Generator[None]:
        """Raise the failure of another rank, by its words, in place of a broken connection."""
        try:
            yield
        except RuntimeError as error:
            broken = self._lifeline is not None and failure.is_broken_connection(error)
            news = self._lifeline.news(_BROKEN_NEWS_SECONDS) if broken else None  # type: ignore[union-attr]
            if news is None:
                raise
            raise failure.PeerFailure(news.rank, describe_peer(self._rank, news)) from error

    def _show(self, exception: BaseException, news: Report | None) -> None:
        if self._shown_elsewhere or self._signals.agreed:
            return
        if isinstance(exception, SystemExit) and not exception.code:
            return
        if news is not None:
            failure.mark_reported(exception)
            failure.say(describe_peer(self._rank, news))
        else:
            failure.show(exception, self._rank)

    def all_ranks_end(self) -> bool:
        """Whether all ranks are in the same hook after the same failure or signal.

        If not, a collective would wait for ranks that never come.
        """
        if self._signals.agreed or self._lifeline is None:
            return True
        if self._alike is None:
            self._alike = self._lifeline.all_alike(ALIKE_SECONDS)
        return self._alike

    @property
    def fails_alone(self) -> bool:
        """Whether this rank has an exception that not all ranks have."""
        return self._told is not None and not self.all_ranks_end()

    @override
    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        self.report(exception)

    # ------------------------------------------------------------------ signals

    @override
    def on_sanity_check_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._signals.watch_interrupts()

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._signals.watch_interrupts()

    @override
    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._signals.watch_interrupts()

    @override
    def on_test_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._signals.watch_interrupts()

    @override
    def on_predict_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._signals.watch_interrupts()


def _host_of_first_rank(strategy: MeshStrategy) -> str:
    assert strategy.cluster_environment is not None
    if strategy.num_nodes == 1:
        return "127.0.0.1"
    return strategy.cluster_environment.main_address
