"""The words of a pipeline schedule: actions, where stages lie, and what waits for what."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum


class Kind(StrEnum):
    """What an action does."""

    F = "F"
    """Forward of one micro-batch through one chunk."""
    B = "B"
    """Full backward: gradients of inputs and weights."""
    I = "I"  # noqa: E741
    """Gradient of the inputs only (split backward)."""
    W = "W"
    """Gradient of the weights only (split backward, after I)."""
    SEND_F = "SEND_F"
    """Send an activation to the next virtual stage."""
    RECV_F = "RECV_F"
    """Receive an activation from the previous virtual stage."""
    SEND_B = "SEND_B"
    """Send the gradient of an activation to the previous virtual stage."""
    RECV_B = "RECV_B"
    """Receive the gradient of an activation from the next virtual stage."""


SENDS = frozenset({Kind.SEND_F, Kind.SEND_B})
RECEIVES = frozenset({Kind.RECV_F, Kind.RECV_B})
COMPUTE = frozenset({Kind.F, Kind.B, Kind.I, Kind.W})


@dataclass(frozen=True, slots=True)
class Action:
    """One step of one pipeline rank."""

    kind: Kind
    """What is done."""
    micro_batch: int
    """Which micro-batch of the flush, from 0."""
    chunk: int
    """Which model chunk of this rank, from 0."""
    peer: int | None = None
    """Messages only: the pipeline rank at the other end."""
    peer_chunk: int | None = None
    """Messages only: the chunk at the other end."""
    beside_next: bool = False
    """Backwards only: it runs beside the next action, the forward of another micro-batch."""

    def __str__(self) -> str:
        """Short form for traces, e.g. ``F3.0``, ``SEND_F3.0>1.0``, or ``B2.0&`` before its pair's
        forward.
        """
        arrow = (
            ""
            if self.peer is None
            else f"{'>' if self.kind in SENDS else '<'}{self.peer}.{self.peer_chunk}"
        )
        return f"{self.kind}{self.micro_batch}.{self.chunk}{arrow}{'&' * self.beside_next}"


ActionLists = tuple[tuple[Action, ...], ...]
"""Indexed by pipeline rank."""


def in_units(actions: Sequence[Action]) -> Iterator[tuple[Action, ...]]:
    """The actions one by one, and those that run side by side together: (backward, forward)."""
    position = 0
    while position < len(actions):
        unit = tuple(actions[position : position + 1 + actions[position].beside_next])
        position += len(unit)
        yield unit


def by_memory(actions: Sequence[Action]) -> list[Action]:
    """The order in which activations come and go: of a pair, both are there at once."""
    return [action for unit in in_units(actions) for action in reversed(unit)]


@dataclass(frozen=True, slots=True)
class Placement:
    """Who holds which virtual stage.

    Looped: stage = chunk * pipeline_size + rank. V-shaped, with two chunks: down the ranks and up
    again, so that rank r holds stages r and 2 * pipeline_size - 1 - r, and the first rank both the
    first and the last stage (Qi et al., arXiv 2405.15362).
    """

    pipeline_size: int
    """Ranks of the pipeline axis."""
    num_chunks: int
    """Model chunks (virtual stages) of each rank."""
    v_shaped: bool = False
    """Whether odd chunks run through the ranks backwards."""

    @property
    def num_stages(self) -> int:
        """Virtual stages of the whole model."""
        return self.pipeline_size * self.num_chunks

    @property
    def last_rank(self) -> int:
        """The pipeline rank that holds the last stage, hence the loss."""
        return self.owner(self.num_stages - 1)[0]

    def stage(self, rank: int, chunk: int) -> int:
        """Virtual stage index of a rank's chunk."""
        return chunk * self.pipeline_size + self._turn(rank, chunk)

    def owner(self, stage: int) -> tuple[int, int]:
        """The ``(rank, chunk)`` that holds a virtual stage."""
        chunk, position = divmod(stage, self.pipeline_size)
        return self._turn(position, chunk), chunk

    def _turn(self, position: int, chunk: int) -> int:
        return self.pipeline_size - 1 - position if self.v_shaped and chunk % 2 else position


def predecessors(
    rank: int, action: Action, placement: Placement
) -> Iterator[tuple[Kind, int, int]]:
    """What a compute action waits for, as ``(F | B | W, stage, micro_batch)``; I counts as B."""
    stage, m = placement.stage(rank, action.chunk), action.micro_batch
    if action.kind is Kind.F and stage > 0:
        yield Kind.F, stage - 1, m
    if action.kind in (Kind.B, Kind.I):
        yield Kind.F, stage, m
        if stage + 1 < placement.num_stages:
            yield Kind.B, stage + 1, m
    if action.kind is Kind.W:
        yield Kind.B, stage, m


def produced(rank: int, action: Action, placement: Placement) -> tuple[Kind, int, int]:
    """The name under which later actions wait for this one (see ``predecessors``)."""
    kind = Kind.B if action.kind is Kind.I else action.kind
    return kind, placement.stage(rank, action.chunk), action.micro_batch
