"""What the user says about copies of the training state on the nodes themselves. Pure data."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from megatron_lightning.config.names import NamesFields


@dataclass(frozen=True, kw_only=True)
class LocalCheckpointConfig(NamesFields):
    """Copies of the state on each node, far more often than checkpoints (docs/checkpoint.md)."""

    folder: str
    """Folder of this run on every node, best on a RAM disk: /dev/shm/NAME. Another run needs
    another one."""
    every_n_steps: int = 50
    """Optimizer steps from one copy to the next."""
    keep: int = 1
    """Copies that each rank keeps beside the one that is being made."""
    peer_copies: bool = True
    """Let each rank keep a second copy for a rank of another node (on one node: for its
    neighbour), so that the loss of a node loses nothing."""

    def check(self) -> list[str]:
        """Every violated rule, as a sentence with field, value and remedy."""
        problems = []
        where = "checkpoint.local."
        if not isinstance(self.folder, str) or not Path(self.folder).is_absolute():
            problems.append(
                f"{where}folder={self.folder!r}: give an absolute path on every node, such as"
                f" '/dev/shm/my-run'"
            )
        elif not _can_be_made(Path(self.folder)):
            problems.append(
                f"{where}folder={self.folder!r}: it can't be written; give another folder"
            )
        for name in ("every_n_steps", "keep"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                problems.append(f"{where}{name}={value!r}: it must be a whole number of at least 1")
        return problems


def _can_be_made(folder: Path) -> bool:
    """Whether `folder` is a folder that can be written, or could be made one."""
    if folder.exists():
        return folder.is_dir() and os.access(folder, os.W_OK)
    there = next(parent for parent in folder.parents if parent.exists())
    return there.is_dir() and os.access(there, os.W_OK)
