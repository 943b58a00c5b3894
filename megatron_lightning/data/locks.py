"""An advisory lock between processes that share a folder, so that one of them does the work the
others wait for.

Only a saving of work, never needed for correctness: on a file system without locks, in a folder
that cannot be written, or when the holder takes too long, everybody goes on without it. The system
frees the lock when its holder dies.
"""

import fcntl
import time
from collections.abc import Iterator
from contextlib import contextmanager
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
            yield held
        finally:
            if (
                held and not keep
            ):  # who still waits finds the work done; who comes later looks first
                path.unlink(missing_ok=True)


def _acquire(descriptor: int, deadline: float) -> bool:
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
            return False
