"""Judges a pipeline schedule without processes: order, deadlock, bubble, live activations.

Each rank has a compute stream and one in-order message stream, as NCCL has: a message starts when
both ends have reached it (everything earlier in their lists is issued), and compute waits for what
it uses. With ``blocking=True`` a rank does nothing else while it sends or receives, the strictest
reading; a schedule that passes cannot deadlock.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from megatron_lightning.parallel.schedules.actions import (
    COMPUTE,
    RECEIVES,
    SENDS,
    Action,
    Kind,
    Placement,
    by_memory,
    predecessors,
    produced,
)


class ScheduleError(ValueError):
    """The action lists are not a correct schedule; the message says where."""


@dataclass(frozen=True, kw_only=True)
class CostModel:
    """Durations of actions in one unit of time of the caller's choice."""

    forward: float = 1.0
    """One micro-batch through one chunk."""
    backward: float = 2.0
    """The same backwards, inputs and weights."""
    input_grad: float = 1.0
    """Part of a split backward: gradient of the inputs."""
    weight_grad: float = 1.0
    """Part of a split backward: gradient of the weights."""
    hidden: float = 0.0
    """Part of a forward's and a backward's time that they hide of each other where they run side by
    side, 0 to 1: a pair takes (1 - hidden) times their sum."""
    message: float = 0.0
    """Transfer of one activation or gradient between two ranks."""
    stage_weight: tuple[float, ...] | None = None
    """Factor on the compute of each virtual stage, in stage order; None: all equal."""
    measured: Mapping[tuple[Kind, int], float] | None = None
    """Duration of each ``(kind, stage)``, as a timeline measures it; used instead of the above."""

    def duration(self, action: Action, stage: int) -> float:
        """Time of a compute action on a virtual stage."""
        if self.measured is not None:
            return self.measured[action.kind, stage]
        durations = {
            Kind.F: self.forward,
            Kind.B: self.backward,
            Kind.I: self.input_grad,
            Kind.W: self.weight_grad,
        }
        weight = 1.0 if self.stage_weight is None else self.stage_weight[stage]
        return durations[action.kind] * weight


@dataclass(frozen=True, kw_only=True)
class SimulationReport:
    """What a schedule costs."""

    makespan: float
    """From the first action's start to the last one's end, in units of the cost model."""
    busy: tuple[float, ...]
    """Compute time of each rank."""
    bubble_fraction: float
    """Share of the ranks' time that is not compute, 0 to 1."""
    peak_live_activations: tuple[int, ...]
    """For each rank: the most (micro-batch, chunk) pairs whose forward is kept for a backward, W
    included where it is apart."""
    peak_waiting_weights: tuple[int, ...]
    """For each rank: the most (micro-batch, chunk) pairs between their I and their W."""
    num_chunks: int
    """Chunks of a rank: an activation is so much the smaller."""
    spans: tuple[tuple[float, float, int, Action], ...] = field(repr=False)
    """``(start, end, rank, action)`` of every compute action, by start: for a drawing."""

    @property
    def idle(self) -> tuple[float, ...]:
        """Time in which each rank does not compute, in units of the cost model."""
        return tuple(self.makespan - busy for busy in self.busy)

    def describe(self) -> str:
        """One line: bubble and peaks, activations in stages' worth (chunks joined)."""
        live = max(self.peak_live_activations) / self.num_chunks
        waiting = max(self.peak_waiting_weights) / self.num_chunks
        return (
            f"bubble {self.bubble_fraction:.1%}, makespan {self.makespan:g}, peak of live "
            f"activations {live:g} micro-batches a rank (of these up to {waiting:g} for W alone)"
        )


def simulate(
    actions: Sequence[Sequence[Action]],
    cost: CostModel | None = None,
    *,
    num_chunks: int,
    num_microbatches: int,
    blocking: bool = False,
    v_shaped: bool = False,
) -> SimulationReport:
    """Run the action lists of all ranks (with messages) against a clock.

    ``v_shaped`` says how the lists' stages lie (see ``Placement``).

    Raises ``ScheduleError`` if an action is missing or doubled, if one needs what has not been
    computed or has not been received, or if ranks wait for each other for ever.
    """
    placement = Placement(len(actions), num_chunks, v_shaped)
    check_complete(actions, placement, num_microbatches)
    run = _Run(actions, placement, cost or CostModel(), blocking)
    run.finish()
    makespan = max(end for _, end, _, _ in run.spans)
    busy = [0.0] * len(actions)
    for start, end, rank, _ in run.spans:
        busy[rank] += end - start
    return SimulationReport(
        makespan=makespan,
        busy=tuple(busy),
        bubble_fraction=1.0 - sum(busy) / (len(actions) * makespan),
        peak_live_activations=tuple(_peak_live(a) for a in actions),
        peak_waiting_weights=tuple(_peak_waiting(a) for a in actions),
        num_chunks=num_chunks,
        spans=tuple(sorted(run.spans, key=lambda span: (span[0], span[2]))),
    )


def check_complete(
    actions: Sequence[Sequence[Action]], placement: Placement, num_microbatches: int
) -> None:
    """Every micro-batch passes every chunk once forward and, if at all, once backward."""
    backward = any(a.kind in (Kind.B, Kind.I, Kind.W) for rank in actions for a in rank)
    for rank, mine in enumerate(actions):
        count = Counter((a.kind, a.micro_batch, a.chunk) for a in mine if a.kind in COMPUTE)
        expected = [(m, c) for m in range(num_microbatches) for c in range(placement.num_chunks)]
        unknown = {(m, c) for _, m, c in count} - set(expected)
        if unknown:
            raise ScheduleError(
                f"rank {rank} computes (micro-batch, chunk) {sorted(unknown)}, which do not exist"
            )
        for m, c in expected:
            f, b, i, w = (count[kind, m, c] for kind in (Kind.F, Kind.B, Kind.I, Kind.W))
            if f != 1:
                raise ScheduleError(f"rank {rank} has {f} forwards of micro-batch {m}, chunk {c}")
            if backward and (b, i, w) not in ((1, 0, 0), (0, 1, 1)):
                raise ScheduleError(
                    f"rank {rank} has {b} B, {i} I, {w} W of micro-batch {m}, chunk {c}"
                )


class _Run:
    """One pass over all lists; ``finish`` advances every rank until none can."""

    def __init__(
        self,
        actions: Sequence[Sequence[Action]],
        placement: Placement,
        cost: CostModel,
        blocking: bool,
    ) -> None:
        self.actions, self.placement, self.cost, self.blocking = actions, placement, cost, blocking
        self.position = [0] * len(actions)
        self.compute_free = [0.0] * len(actions)
        self.stream_free = [0.0] * len(actions)
        self.end: dict[tuple[Kind, int, int], float] = {}  # of compute, by product
        self.arrival: dict[
            tuple[int, Kind, int, int], float
        ] = {}  # rank, receive kind, micro-batch, chunk
        self.spans: list[tuple[float, float, int, Action]] = []

    def finish(self) -> None:
        while any([self._advance(rank) for rank in range(len(self.actions))]):
            pass
        stuck = [
            f"rank {r} at {self._head(r)}"
            for r in range(len(self.actions))
            if self._head(r) is not None
        ]
        if stuck:
            raise ScheduleError("ranks wait for each other for ever: " + ", ".join(stuck))

    def _head(self, rank: int) -> Action | None:
        position = self.position[rank]
        return self.actions[rank][position] if position < len(self.actions[rank]) else None

    def _advance(self, rank: int) -> bool:
        """Execute as much of one rank's list as is possible; True if anything was."""
        before = self.position[rank]
        while (action := self._head(rank)) is not None:
            if action.kind in COMPUTE:
                self.position[rank] += self._compute(rank, action)
            elif not self._message(rank, action):
                break
        return self.position[rank] > before

    def _compute(self, rank: int, action: Action) -> int:
        """Execute a compute action, or two side by side; how many they were."""
        unit = self._unit(rank, action)
        start = self.compute_free[rank]
        for each in unit:
            for needed in predecessors(rank, each, self.placement):
                start = max(start, self._available(rank, each, needed))
        factor = 1.0 - self.cost.hidden if len(unit) > 1 else 1.0
        for each in unit:  # drawn one after the other; both end when the later one does
            stage = self.placement.stage(rank, each.chunk)
            end = start + factor * self.cost.duration(each, stage)
            self.spans.append((start, end, rank, each))
            start = end
        self.compute_free[rank] = start
        self.end |= {produced(rank, each, self.placement): start for each in unit}
        return len(unit)

    def _unit(self, rank: int, action: Action) -> tuple[Action, ...]:
        if not action.beside_next:
            return (action,)
        position = self.position[rank] + 1
        other = self.actions[rank][position] if position < len(self.actions[rank]) else None
        if action.kind is not Kind.B or other is None or other.kind is not Kind.F:
            raise ScheduleError(f"rank {rank}: {action} is not followed by a forward, but {other}")
        return action, other

    def _available(self, rank: int, action: Action, needed: tuple[Kind, int, int]) -> float:
        """When a compute action's input is on its rank; in list order, it must be there already."""
        owner, _ = self.placement.owner(needed[1])
        if owner == rank:
            time = self.end.get(needed)
        else:
            receive = Kind.RECV_F if needed[0] is Kind.F else Kind.RECV_B
            time = self.arrival.get((rank, receive, action.micro_batch, action.chunk))
        if time is None:
            kind, stage, m = needed
            raise ScheduleError(
                f"rank {rank} comes to {action} without {kind} of micro-batch {m}, stage {stage}"
            )
        return time

    def _message(self, rank: int, action: Action) -> bool:
        """Execute a message at both ends if the other end has come to it, too."""
        peer = action.peer
        other = None if peer is None or not 0 <= peer < len(self.actions) else self._head(peer)
        if peer is None or other != _other_end(rank, action):
            return False
        sender, send = (rank, action) if action.kind in SENDS else (peer, other)
        assert send is not None
        source = Action(Kind[send.kind[-1]], send.micro_batch, send.chunk)
        made = produced(sender, source, self.placement)
        if made not in self.end:
            raise ScheduleError(f"rank {sender} comes to {send} before it has computed that")
        ends = (rank, peer)
        done = max(max(self.stream_free[r], self.compute_free[r]) for r in ends) + self.cost.message
        receiver, receive = (peer, other) if sender == rank else (rank, action)
        assert receive is not None
        self.arrival[receiver, receive.kind, receive.micro_batch, receive.chunk] = done
        for r in ends:
            self.stream_free[r] = done
            self.position[r] += 1
            if self.blocking:
                self.compute_free[r] = done
        return True


def _other_end(rank: int, action: Action) -> Action:
    """The action that the peer of a message must have."""
    pairs = {
        Kind.SEND_F: Kind.RECV_F,
        Kind.RECV_F: Kind.SEND_F,
        Kind.SEND_B: Kind.RECV_B,
        Kind.RECV_B: Kind.SEND_B,
    }
    assert action.kind in SENDS | RECEIVES
    assert action.peer_chunk is not None
    return Action(pairs[action.kind], action.micro_batch, action.peer_chunk, rank, action.chunk)


def _peak_live(actions: Sequence[Action]) -> int:
    """The most forwards whose backward has not ended; 0 where nothing is kept for a backward."""
    split = {(a.micro_batch, a.chunk) for a in actions if a.kind is Kind.W}
    kept = split | {(a.micro_batch, a.chunk) for a in actions if a.kind is Kind.B}
    live = peak = 0
    for action in by_memory(actions):
        if action.kind is Kind.F and (action.micro_batch, action.chunk) in kept:
            live += 1
        elif action.kind in (Kind.B, Kind.W):
            live -= 1
        peak = max(peak, live)
    return peak


def _peak_waiting(actions: Sequence[Action]) -> int:
    """The most weight gradients that wait for their W."""
    waiting = peak = 0
    for action in actions:
        waiting += (action.kind is Kind.I) - (action.kind is Kind.W)
        peak = max(peak, waiting)
    return peak
