"""What a save cost, for logs."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class SaveTimes:
    """What the last save cost; the same on every rank."""

    path: str
    num_bytes: int
    """Of the data files of all ranks; 0 if they were there already and got a second name."""
    stall_seconds: float
    """Training stood still on the slowest rank: planning, starting the copies, committing, and
    waiting for a save before."""
    staging_seconds: float
    """Until the slowest rank's copies in host memory were complete; 0 in the foreground."""
    write_seconds: float
    """Until the slowest rank's file was on disk, from the end of the copies on."""

    def metrics(self) -> dict[str, float]:
        """Numbers to be logged, `self.log_dict(trainer.strategy.save_times.metrics())`."""
        return {
            "checkpoint/stall_seconds": self.stall_seconds,
            "checkpoint/staging_seconds": self.staging_seconds,
            "checkpoint/write_seconds": self.write_seconds,
            "checkpoint/gigabytes": self.num_bytes / 1e9,
        }

    def describe(self) -> str:
        """One line."""
        return (
            f"saved {self.path}: {self.num_bytes / 1e9:.3f} GB; training stood still for"
            f" {self.stall_seconds:.3f} s, copies took {self.staging_seconds:.3f} s, writing"
            f" {self.write_seconds:.3f} s"
        )
