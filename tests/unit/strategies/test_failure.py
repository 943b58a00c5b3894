"""How failures are described."""

import signal
import sys

import pytest
import torch.distributed as dist
from lightning.pytorch import Trainer
from lightning.pytorch.utilities.exceptions import SIGTERMException

from megatron_lightning.config.validate import ConfigurationError
from megatron_lightning.strategies import failure, handover
from megatron_lightning.strategies.failure import RankFailure
from megatron_lightning.strategies.signals import REQUEUE, STOP, SignalFlags


def test_reason_is_one_line() -> None:
    assert failure.reason_of(ValueError("boom\nwith more")) == "ValueError: boom"
    assert failure.reason_of(KeyboardInterrupt()) == "KeyboardInterrupt"


@pytest.mark.parametrize(
    ("exception", "broken"),
    [
        (RuntimeError("[gloo/transport/tcp/pair.cc] Connection closed by peer [::1]:1"), True),
        (dist.DistBackendError("NCCL communicator was aborted"), True),
        (ConnectionResetError(), True),
        (RuntimeError("shapes do not match"), False),
        (ValueError("nccl is not a fruit"), False),
    ],
)
def test_consequences_of_another_failure(exception: BaseException, broken: bool) -> None:
    assert failure.is_broken_connection(exception) == broken


def test_every_line_has_the_rank() -> None:
    text = failure.traceback_of(ValueError("two\nlines"), 3)
    assert text.splitlines() == ["[rank 3] ValueError: two", "[rank 3] lines"]


@pytest.mark.parametrize(
    ("status", "words"),
    [(3, "exit status 3"), (-9, "SIGKILL (out of memory?)"), (-11, "SIGSEGV"), (-99, "signal 99")],
)
def test_how_a_process_ended(status: int, words: str) -> None:
    assert failure.how_it_ended(status) == words


def test_python_prints_only_what_was_not_shown(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)
    failure.silence_reported()
    hook = sys.excepthook
    failure.silence_reported()
    assert sys.excepthook is hook  # once
    error = ValueError("boom")
    failure.show(error, 2)
    sys.excepthook(type(error), error, None)
    sys.excepthook(KeyError, KeyError("other"), None)
    assert capsys.readouterr().err == "[rank 2] ValueError: boom\nKeyError: 'other'\n"


def test_exit_status_of_sigterm() -> None:
    for signum, status in ((signal.SIGTERM, 143), (signal.SIGUSR1, 138)):
        flags = SignalFlags(Trainer(accelerator="cpu", logger=False), 0, None, None)
        flags.ballot.mine[STOP if signum == signal.SIGTERM else REQUEUE] = 1
        flags.agree()
        stopped, left = SIGTERMException(), SystemExit(3)
        flags.set_exit_status(stopped)
        flags.set_exit_status(left)
        assert (stopped.code, left.code) == (status, 3)
    assert type(handover.picklable(stopped, 1)) is SIGTERMException


def test_exceptions_through_a_pipe() -> None:
    class Local(Exception):
        """Can't be pickled."""

    class Odd(Exception):
        def __init__(self, a: int, b: int) -> None:
            super().__init__(f"{a} {b}")

    error = ValueError("boom")
    assert handover.picklable(error, 1) is error
    wrong = ConfigurationError(["seed=-1", "split=x"])
    assert handover.picklable(wrong, 1) is wrong
    for odd in (Local("x"), Odd(1, 2)):
        carried = handover.picklable(odd, 1)
        assert isinstance(carried, RankFailure)
        assert carried.rank == 1
        assert str(odd) in str(carried)
