"""Small numbers that all ranks agree on without a collective of their own.

They travel with the reduction that every step needs anyway (`publish.py`, which agrees on logged
keys). Signals and the newest local checkpoint are agreed on so.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist


class Ballot:
    """Numbers of this rank, and the highest and lowest of all ranks once a step has run."""

    def __init__(self, size: int) -> None:
        self.mine = [0] * size
        """This rank's numbers; may be changed at any time, also by a signal handler."""
        self._agreed: tuple[list[int], list[int]] | None = None

    def rows(self) -> list[list[int]]:
        """This rank's numbers as rows of (n, -n), for a reduction by maximum."""
        return [[number, -number] for number in self.mine]

    def take(self, rows: Sequence[Sequence[int]]) -> None:
        """Note what came out of that reduction."""
        self._agreed = [row[0] for row in rows], [-row[1] for row in rows]

    def result(self, group: dist.ProcessGroup | None) -> tuple[list[int], list[int]]:
        """(highest, lowest) numbers over all ranks, those of the last step if it has carried them.

        If none has since the last call, the ranks of `group` reduce them now, and all must call it;
        None stands for one process.
        """
        agreed, self._agreed = self._agreed, None
        if agreed is not None:
            return agreed
        votes = torch.tensor(self.rows())
        if group is not None:
            dist.all_reduce(votes, op=dist.ReduceOp.MAX, group=group)
        self.take(votes.tolist())
        return self.result(group)
