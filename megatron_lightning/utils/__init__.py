"""Environment variables and logging: what every other package may use."""

from megatron_lightning.utils.env import Launch
from megatron_lightning.utils.logging import (
    current_rank,
    get_logger,
    is_installed,
    notice_missing,
    warn_once,
)

__all__ = [
    "Launch",
    "current_rank",
    "get_logger",
    "is_installed",
    "notice_missing",
    "warn_once",
]
