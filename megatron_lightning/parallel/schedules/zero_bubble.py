"""Zero-bubble schedules: the backward is split, and weight gradients fill the gaps.

Only the gradient of a stage's inputs (I) keeps other ranks waiting; that of its weights (W) can be
computed whenever its rank has nothing better to do. ZB-H1 (Qi et al., "Zero Bubble Pipeline
Parallelism", arXiv 2401.10241, section 2.2) has one stage a rank; ZB-V (same paper, section 6; also
arXiv 2405.15362) has two in a V (see ``Placement``). Both hold as many activations as the first
rank of 1F1B, and on every rank the same.

These are the papers' regular patterns for F = I = W. In the simulator they keep most of their
advantage for unequal durations, which lists tuned by greedy search for one set of durations do not.
"""

from collections import Counter

from megatron_lightning.parallel.schedules.actions import Action, ActionLists, Kind, Placement


def zb_h1(pipeline_size: int, num_microbatches: int) -> ActionLists:
    """1F1B with split backwards; rank r's W lag r micro-batches behind its I.

    At most ``min(num_microbatches, pipeline_size)`` micro-batches are live on any rank.
    """
    rows: list[tuple[Action, ...]] = []
    for rank in range(pipeline_size):
        row = _Row()
        warmup = min(num_microbatches, pipeline_size - rank - 1)
        row.add(warmup, (Kind.F, 0))
        for index in range(num_microbatches - warmup):
            row.add(1, (Kind.F, 0), (Kind.I, 0))
            if index >= rank:
                row.add(1, (Kind.W, 0))
        row.add(warmup, (Kind.I, 0), (Kind.W, 0))
        row.add(row.behind(0), (Kind.W, 0))
        rows.append(tuple(row.actions))
    return tuple(rows)


def zb_v(pipeline_size: int, num_microbatches: int) -> ActionLists:
    """ZB-V: in the steady state F, I and W of either chunk in turn.

    At most ``2 * pipeline_size`` activations, each of half a rank's layers, are live on any rank.
    With fewer than ``2 * pipeline_size - 1`` micro-batches it is what the pattern leaves when those
    that are lacking are struck out.
    """
    pattern_size = max(num_microbatches, 2 * pipeline_size - 1)
    rows: list[tuple[Action, ...]] = []
    for rank in range(pipeline_size):
        row = _Row()
        row.add(_ahead(pipeline_size, rank), (Kind.F, 0))
        row.add(rank, (Kind.F, 1), (Kind.F, 0))
        row.add(pipeline_size - rank, (Kind.F, 1), (Kind.I, 1), (Kind.W, 1))
        while row.count[Kind.F, 1] < pattern_size:
            if row.count[Kind.F, 0] < pattern_size:
                row.add(1, (Kind.F, 0))
            row.add(1, (Kind.I, 0), (Kind.W, 0), (Kind.F, 1), (Kind.I, 1), (Kind.W, 1))
        row.add(rank, (Kind.I, 0), (Kind.I, 1))
        row.add(pipeline_size - rank, (Kind.I, 0), (Kind.W, 0))
        row.add(row.behind(1), (Kind.W, 1))
        row.add(row.behind(0), (Kind.W, 0))
        rows.append(tuple(a for a in row.actions if a.micro_batch < num_microbatches))
    return tuple(rows)


def v_only_forward(pipeline_size: int, num_microbatches: int) -> ActionLists:
    """Forwards alone over stages in a V (validation, prediction), in the order of ZB-V."""
    rows: list[tuple[Action, ...]] = []
    for rank in range(pipeline_size):
        row = _Row()
        ahead = min(_ahead(pipeline_size, rank), num_microbatches)
        row.add(ahead, (Kind.F, 0))
        row.add(num_microbatches - ahead, (Kind.F, 1), (Kind.F, 0))
        row.add(ahead, (Kind.F, 1))
        rows.append(tuple(row.actions))
    return tuple(rows)


def v_placement(pipeline_size: int) -> Placement:
    """Two chunks a rank, down and up again."""
    return Placement(pipeline_size, 2, v_shaped=True)


def _ahead(pipeline_size: int, rank: int) -> int:
    """Forwards of chunk 0 before the first one of chunk 1: as long as it takes to come back."""
    return 2 * (pipeline_size - rank) - 1


class _Row:
    """One rank's list in the making; each (kind, chunk) takes the micro-batches in order."""

    def __init__(self) -> None:
        self.actions: list[Action] = []
        self.count: Counter[tuple[Kind, int]] = Counter()

    def add(self, times: int, *steps: tuple[Kind, int]) -> None:
        for _ in range(times):
            for kind, chunk in steps:
                self.actions.append(Action(kind, self.count[kind, chunk], chunk))
                self.count[kind, chunk] += 1

    def behind(self, chunk: int) -> int:
        """Weight gradients of a chunk that are still to be computed."""
        return self.count[Kind.I, chunk] - self.count[Kind.W, chunk]
