"""Log lines that say which rank speaks, warnings said once, one line for a missing package.

Loggers are the standard library's, under `megatron_lightning`, so that an application's own
handlers and levels apply. Nothing is configured at import time.
"""

import importlib.util
import logging
import sys
from functools import cache
from typing import Any

from megatron_lightning.utils.env import Launch

_ROOT = "megatron_lightning"


def current_rank() -> int:
    """Position of this process in the world: of the process group, or as the launcher said."""
    if (dist := _distributed()) is not None:
        return dist.get_rank()
    return Launch.from_environment().rank


def get_logger(name: str) -> logging.Logger:
    """The logger `name` (a module's `__name__`); among several ranks its lines say which."""
    logger = logging.getLogger(name)
    if not any(isinstance(known, _RankPrefix) for known in logger.filters):
        logger.addFilter(_RankPrefix())
    return logger


def warn_once(message: str, *, every_rank: bool = False) -> None:
    """Log a warning the first time that this process gives it; on rank 0 alone by default."""
    _once(logging.WARNING, message, every_rank)


def say_once(message: str) -> None:
    """Log something worth knowing the first time that this process says it, on rank 0."""
    _once(logging.INFO, message, False)


def is_installed(package: str) -> bool:
    """Whether a top-level package can be imported; it is looked for, not imported."""
    try:
        return importlib.util.find_spec(package) is not None
    except ValueError:  # a module that was put into sys.modules by hand, as tests do
        return False


def notice_missing(package: str, consequence: str) -> None:
    """Say once, on rank 0, that an optional package is absent and what is done instead."""
    _once(logging.INFO, f"{package} is not installed: {consequence}", False)


@cache
def _once(level: int, message: str, every_rank: bool) -> None:
    if every_rank or current_rank() == 0:
        get_logger(_ROOT).log(level, message)


class _RankPrefix(logging.Filter):
    """Puts `[rank 3] ` before a message; the rank is looked up when the line is written."""

    def filter(self, record: logging.LogRecord) -> bool:
        if _world_size() > 1:
            record.msg = f"[rank {current_rank()}] {record.msg}"
        return True


def _world_size() -> int:
    if (dist := _distributed()) is not None:
        return dist.get_world_size()
    return Launch.from_environment().world_size


def _distributed() -> Any:
    """`torch.distributed` where there is a process group. Torch is not imported for it: help and
    messages do without.
    """
    dist = sys.modules.get("torch.distributed")
    return dist if dist is not None and dist.is_available() and dist.is_initialized() else None
