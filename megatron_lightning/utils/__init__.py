"""Environment variables and logging: what every other package may use."""

from megatron_lightning.utils.env import Launch
from megatron_lightning.utils.logging import (
    current_rank,
    get_logger,
    is_installed,
    notice_missing,
    warn_once,
)
from megatron_lightning.utils.wording import counted, merge_alike

__all__ = [
    "Launch",
    "counted",
    "current_rank",
    "get_logger",
    "is_installed",
    "merge_alike",
    "notice_missing",
    "warn_once",
]
