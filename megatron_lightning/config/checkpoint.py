"""What the user says about the saving of checkpoints. Pure data."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_lightning.config.local_checkpoint import LocalCheckpointConfig
from megatron_lightning.config.names import NamesFields


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig(NamesFields):
    """How checkpoints are written while a fit runs (docs/checkpoint.md)."""

    asynchronous: bool = False
    """Copy the state to host memory and let a process of each rank write it while training goes on;
    the checkpoint is committed at a later step. Needs free host memory of the size of what a rank
    writes."""
    overlap_copies: bool = True
    """asynchronous: let copies from a GPU run beside the next forward and backward pass where no
    hook is known to change weights there; False: the GPU finishes them first."""
    pin_memory: bool = True
    """asynchronous: pin that host memory for fast copies from a GPU."""
    local: LocalCheckpointConfig | None = None
    """Frequent copies on the nodes themselves, from which a run resumes after a failure; None: no
    such copies."""

    def check(self) -> list[str]:
        """Every violated rule, as a sentence with field, value and remedy; types are right."""
        return [] if self.local is None else self.local.check()
