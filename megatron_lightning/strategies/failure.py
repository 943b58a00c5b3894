"""How the failure of a rank is shown: once, with its own traceback and the rank before each line.

When one rank fails, its peers fail after it with broken connections. They say in one line whose
fault it was.
"""

from __future__ import annotations

import signal
import sys
import traceback
from types import TracebackType

import torch.distributed as dist
from lightning.pytorch.utilities.exceptions import SIGTERMException

from megatron_lightning.config.validate import ConfigurationError

_REPORTED = "_reported_by_rank"
"""Attribute of an exception whose traceback has been printed, or need not be."""
_BROKEN = (
    "connection closed by peer",
    "connection reset",
    "broken pipe",
    "connection refused",
    "socket timeout",
    "connection was likely closed",
    "remote process exited",
    "pair is not connected",
    "gloo",
    "nccl",
    "collectivefingerprint",
    "failed to recv",
    "failed to send",
)
SIGTERM_STATUS = 128 + signal.SIGTERM


class RankFailure(RuntimeError):
    """A rank failed or died; `rank` is the first one. The message has its traceback, if any."""

    def __init__(self, rank: int, message: str) -> None:
        super().__init__(message)
        self.rank = rank

    def __reduce__(self) -> tuple[type[RankFailure], tuple[int, str]]:
        return type(self), (self.rank, str(self))


class PeerFailure(RankFailure):
    """This rank can't go on, since another has failed. The message says why that one did."""


def reason_of(exception: BaseException) -> str:
    """One line: type and first line of the message."""
    first = str(exception).strip().partition("\n")[0]
    name = type(exception).__name__
    return f"{name}: {first}" if first else name


def is_broken_connection(exception: BaseException) -> bool:
    """Whether this looks like the consequence of another rank's end."""
    if isinstance(exception, (dist.DistError, ConnectionError, PeerFailure)):
        return True
    text = str(exception).lower()
    return isinstance(exception, RuntimeError) and any(sign in text for sign in _BROKEN)


def is_quiet(exception: BaseException) -> bool:
    """Whether this is an agreed end or a message that is complete without a traceback."""
    return isinstance(exception, (ConfigurationError, SIGTERMException, KeyboardInterrupt))


def traceback_of(exception: BaseException, rank: int) -> str:
    """The traceback with `[rank N]` before every line, so that it can be told from others."""
    text = "".join(traceback.format_exception(exception))
    return "".join(f"[rank {rank}] {line}\n" for line in text.splitlines())


def say(text: str) -> None:
    """Write to standard error in one piece, lines of ranks are not to mix."""
    sys.stderr.write(text if text.endswith("\n") else f"{text}\n")
    sys.stderr.flush()


def mark_reported(exception: BaseException) -> None:
    """Note that Python need not print this exception again when it ends the process."""
    setattr(exception, _REPORTED, True)


def was_reported(exception: BaseException) -> bool:
    """Whether `mark_reported` was called for it."""
    return getattr(exception, _REPORTED, False)


def show(exception: BaseException, rank: int) -> None:
    """Print the traceback with the rank, unless it needs none; Python does not print it again."""
    if is_quiet(exception):
        return
    silence_reported()
    mark_reported(exception)
    say(traceback_of(exception, rank))


def silence_reported() -> None:
    """Make Python print only what has not been shown yet when an exception ends the process."""
    previous = sys.excepthook
    if getattr(previous, _REPORTED, False):
        return

    def hook(
        kind: type[BaseException], exception: BaseException, trace: TracebackType | None
    ) -> None:
        if not was_reported(exception):
            previous(kind, exception, trace)

    setattr(hook, _REPORTED, True)
    sys.excepthook = hook


def how_it_ended(status: int) -> str:
    """An exit status in words; negative as `subprocess` and `multiprocessing` give signals."""
    if status >= 0:
        return f"exit status {status}"
    try:
        name = signal.Signals(-status).name
    except ValueError:
        name = f"signal {-status}"
    return f"{name}{' (out of memory?)' if name == 'SIGKILL' else ''}"
