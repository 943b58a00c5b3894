"""Before a fit chooses its checkpoint: what a crash interrupted is finished or undone.

Rank 0 does it. Ranks that are started from outside cannot talk to each other yet; they wait until
nothing interrupted is left, so that all of them see the same names. (Rank 0 cannot save before they
have met.)
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from lightning.pytorch import Trainer
from lightning.pytorch.trainer.states import TrainerFn

from megatron_lightning.checkpoint import recover
from megatron_lightning.checkpoint.commit import is_interrupted
from megatron_lightning.strategies import _compat
from megatron_lightning.utils.logging import get_logger

if TYPE_CHECKING:
    from megatron_lightning.strategies.mesh_strategy import MeshStrategy

PREEMPTED = "hpc_ckpt_"
"""Only these are looked at in `default_root_dir`, which may be the folder of other jobs too."""
_WAIT_SECONDS = 60.0


def recover_folders(strategy: MeshStrategy, trainer: Trainer) -> None:
    """Recover the folders into which this fit will save. Nothing if it is no fit."""
    if trainer.state.fn != TrainerFn.FITTING:
        return
    folders = [(folder, "") for folder in _compat.checkpoint_folders(trainer)]
    folders.append((str(trainer.default_root_dir), PREEMPTED))
    for folder, beginning in dict.fromkeys(folders):
        if "://" in folder:
            continue
        if strategy.global_rank == 0:
            for line in recover(folder, beginning):
                get_logger(__name__).warning("an earlier run was interrupted: %s", line)
        else:
            _wait(folder, beginning)


def _wait(folder: str, beginning: str) -> None:
    deadline = time.monotonic() + _WAIT_SECONDS
    while is_interrupted(folder, beginning):
        if time.monotonic() > deadline:
            get_logger(__name__).warning(
                "rank 0 has not recovered %s in %g s; do all ranks see the same file system?",
                folder,
                _WAIT_SECONDS,
            )
            return
        time.sleep(0.05)
