"""An advisory lock between processes that share a folder, so that one of them does the work the
others wait for.

Only a saving of work, never needed for correctness: on a file system without locks, in a folder
that cannot be written, or when the holder takes too long, everybody goes on without it. The system
frees the lock when its holder dies.
"""

import fcntl
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_FIRST_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS = 0.005, 0.25


@contextmanager
def folder_lock(path: Path, wait_seconds: float, *, keep: bool = False) -> Iterator[bool]:
    """Holds the lock of the file `path` while the block runs; yields whether it is held.

    Args:
        path: the lock file; it is made, and removed by its holder.
        wait_seconds: how long to wait for another holder.
        keep: leave the file, for a lock that is taken over and over.
    """
    try:
        file = path.open("ab")
    except OSError:  # no such folder, read-only, or full
        yield False
        return
    with file:
        held = _acquire(file.fileno(), time.monotonic() + wait_seconds)
        try:
            yield bool(held)
        finally:
            # Who still waits for the removed file finds the work done; who comes later looks first.
            if held is not False and not keep:
                with suppress(OSError):
                    path.unlink()


def _acquire(descriptor: int, deadline: float) -> bool | None:
    """Returns whether the lock is held, None where there are no locks."""
    pause = _FIRST_PAUSE_SECONDS
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            if time.monotonic() >= deadline:
                return False
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE_SECONDS)
        except OSError:  # this file system has no locks
            return None
