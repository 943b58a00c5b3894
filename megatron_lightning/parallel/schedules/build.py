"""Pipeline schedules as data: for every pipeline rank, the list of actions that it executes.

A schedule is first written as compute actions alone. 1F1B: Narayanan et al., "Memory-Efficient
Pipeline-Parallel DNN Training", 2021; interleaved virtual stages: Narayanan et al., "Efficient
Large-Scale Language Model Training on GPU Clusters", 2021; zero bubble: see
``zero_bubble.py``; pairs of a forward and a backward: see ``paired.py``.
``add_communication`` then inserts the
messages, once and for every schedule: all ranks' lists are projections of one global linear order,
so that no schedule can deadlock, neither on in-order streams nor with blocking sends.

Nothing here communicates or knows tensors: ``simulate.py`` judges the lists,
``runtime/pipeline_engine.py`` runs them.
"""

from collections.abc import Sequence
from typing import Literal, get_args

from megatron_lightning.parallel.schedules.actions import (
    Action,
    ActionLists,
    Kind,
    Placement,
    in_units,
    predecessors,
    produced,
)
from megatron_lightning.parallel.schedules.paired import side_by_side
from megatron_lightning.parallel.schedules.zero_bubble import (
    v_only_forward,
    v_placement,
    zb_h1,
    zb_v,
)

ScheduleName = Literal["gpipe", "1f1b", "interleaved", "paired", "zb-h1", "zb-v"]
SCHEDULE_NAMES: tuple[str, ...] = get_args(ScheduleName)
SPLIT_SCHEDULES = ("zb-h1", "zb-v")
"""Schedules that compute the weights' gradients apart (I and W instead of B)."""

# Durations by which add_communication orders the messages, in units of one forward. With a backward
# of 3 (as with recomputation) the order costs no extra bubble at true durations of 1 to 3; with 2
# it does from 2.5 on. Split backwards are ordered by what their schedules are made for.
_ORDERING_COST = {Kind.F: 1.0, Kind.B: 3.0, Kind.I: 1.0, Kind.W: 1.0}


def gpipe(pipeline_size: int, num_chunks: int, num_microbatches: int) -> ActionLists:
    """All forwards, then all backwards, chunk by chunk: the reference for the others."""
    forward = [Action(Kind.F, m, c) for c in range(num_chunks) for m in range(num_microbatches)]
    backward = [
        Action(Kind.B, m, c) for c in reversed(range(num_chunks)) for m in range(num_microbatches)
    ]
    return tuple(tuple(forward + backward) for _ in range(pipeline_size))


def only_forward(
    pipeline_size: int, num_chunks: int, num_microbatches: int, group_size: int | None = None
) -> ActionLists:
    """Forwards alone, in the order of the interleaved schedule (validation, prediction)."""
    order = _forward_order(pipeline_size, num_chunks, num_microbatches, group_size)
    return tuple(tuple(Action(Kind.F, m, c) for m, c in order) for _ in range(pipeline_size))


def one_forward_one_backward(pipeline_size: int, num_microbatches: int) -> ActionLists:
    """1F1B: rank r warms up with ``pipeline_size - r - 1`` forwards, then alternates, then drains.

    At most ``min(num_microbatches, pipeline_size - r)`` micro-batches are live on rank r.
    """
    order = [(m, 0) for m in range(num_microbatches)]
    return tuple(
        _alternate(order, order, warmup=pipeline_size - rank - 1) for rank in range(pipeline_size)
    )


def interleaved_1f1b(
    pipeline_size: int, num_chunks: int, num_microbatches: int, group_size: int | None = None
) -> ActionLists:
    """1F1B over virtual stages; with one chunk it is plain 1F1B.

    ``group_size`` micro-batches run through one chunk before the next chunk takes over (Megatron's
    ``microbatch_group_size_per_vp_stage``; default and minimum: ``pipeline_size``; larger groups
    need more activation memory and hide slower messages). Order and warm-up are Megatron-Core's
    wherever it accepts the sizes; for the others see ``microbatch_groups``.
    """
    if num_chunks == 1:
        return one_forward_one_backward(pipeline_size, num_microbatches)
    groups = microbatch_groups(num_microbatches, pipeline_size, group_size)
    forward = interleaved_order(groups, num_chunks)
    backward = [(m, num_chunks - 1 - c) for m, c in forward]
    return tuple(
        _alternate(
            forward,
            backward,
            warmup=2 * (pipeline_size - rank - 1) + (num_chunks - 1) * max(groups),
        )
        for rank in range(pipeline_size)
    )


def paired_1f1b(
    pipeline_size: int, num_chunks: int, num_microbatches: int, group_size: int | None = None
) -> ActionLists:
    """1F1B, interleaved with several chunks, in which each backward runs beside a forward of
    another micro-batch (``paired.py``).
    """
    groups = microbatch_groups(num_microbatches, pipeline_size, group_size)
    return side_by_side(interleaved_order(groups, num_chunks), pipeline_size, num_chunks, groups)


def microbatch_groups(
    num_microbatches: int, pipeline_size: int, group_size: int | None = None
) -> tuple[int, ...]:
    """Sizes of the groups of micro-batches that run through a chunk together.

    Groups of ``group_size`` (default: ``pipeline_size``) and a remainder, as Megatron-Core has it,
    if the remainder is 0 or at least ``pipeline_size``. A smaller remainder would make stages wait
    for each other in a circle (Megatron-Core refuses it): then the micro-batches are spread evenly
    over one group fewer, larger ones first.
    """
    size = pipeline_size if group_size is None else group_size
    if size < pipeline_size:
        raise ValueError(
            f"microbatch_group_size={size} is smaller than pipeline_parallel_size={pipeline_size}: "
            f"give at least {pipeline_size}, or leave it out."
        )
    full, rest = divmod(num_microbatches, size)
    if rest == 0 or (full and rest >= pipeline_size):
        return (size,) * full + ((rest,) if rest else ())
    if full == 0:
        return (num_microbatches,)
    each, larger = divmod(num_microbatches, full)
    return (each + 1,) * larger + (each,) * (full - larger)


def interleaved_order(groups: Sequence[int], num_chunks: int) -> list[tuple[int, int]]:
    """Forward order of ``(micro_batch, chunk)``: for each group of micro-batches, every chunk."""
    order: list[tuple[int, int]] = []
    first = 0
    for size in groups:
        order += [(m, c) for c in range(num_chunks) for m in range(first, first + size)]
        first += size
    return order


def build_schedule(
    name: ScheduleName,
    *,
    pipeline_size: int,
    num_chunks: int = 1,
    num_microbatches: int,
    forward_only: bool = False,
    group_size: int | None = None,
) -> ActionLists:
    """Action lists of every pipeline rank, messages included.

    Raises ``ValueError`` for an unknown name or sizes that the schedule cannot have.
    ``forward_only`` overrides the name; ``group_size`` concerns looped virtual stages only.
    """
    _check_sizes(name, pipeline_size, num_chunks, num_microbatches)
    placement = placement_of(name, pipeline_size, num_chunks)
    if forward_only and placement.v_shaped:
        compute = v_only_forward(pipeline_size, num_microbatches)
    elif forward_only:
        compute = only_forward(pipeline_size, num_chunks, num_microbatches, group_size)
    elif name == "gpipe":
        compute = gpipe(pipeline_size, num_chunks, num_microbatches)
    elif name == "1f1b":
        compute = one_forward_one_backward(pipeline_size, num_microbatches)
    elif name == "paired":
        compute = paired_1f1b(pipeline_size, num_chunks, num_microbatches, group_size)
    elif name == "zb-h1":
        compute = zb_h1(pipeline_size, num_microbatches)
    elif name == "zb-v":
        compute = zb_v(pipeline_size, num_microbatches)
    else:
        compute = interleaved_1f1b(pipeline_size, num_chunks, num_microbatches, group_size)
    return add_communication(compute, placement)


def placement_of(name: str, pipeline_size: int, num_chunks: int) -> Placement:
    """Where the stages lie that this schedule runs."""
    return v_placement(pipeline_size) if name == "zb-v" else Placement(pipeline_size, num_chunks)


def add_communication(compute: Sequence[Sequence[Action]], placement: Placement) -> ActionLists:
    """Insert the messages into lists of compute actions.

    All compute actions are put into one linear order, that of their end in a run where a forward
    takes 1 and a backward 3. Each is followed by the message that it gives rise to: at that moment
    SEND is appended to the producer's list and RECV to the consumer's. A consumer that is then busy
    thus posts its receive before the action it is busy with, and the transfer runs beside it.
    A pair that runs side by side is one action here, as long as both.
    Chunks of the same rank hand over locally, without a message.
    """
    actions: list[list[Action]] = [[] for _ in compute]
    for rank, unit in _order_by_end(compute, placement):
        actions[rank] += unit
        for send, receive in filter(None, (_message_after(rank, a, placement) for a in unit)):
            actions[rank].append(send)
            assert send.peer is not None
            actions[send.peer].append(receive)
    return tuple(tuple(a) for a in actions)


def _alternate(
    forward: Sequence[tuple[int, int]], backward: Sequence[tuple[int, int]], warmup: int
) -> tuple[Action, ...]:
    warmup = min(warmup, len(forward))
    actions = [Action(Kind.F, m, c) for m, c in forward[:warmup]]
    for (fm, fc), (bm, bc) in zip(forward[warmup:], backward, strict=False):
        actions += [Action(Kind.F, fm, fc), Action(Kind.B, bm, bc)]
    drained = len(forward) - warmup
    actions += [Action(Kind.B, m, c) for m, c in backward[drained:]]
    return tuple(actions)


def _forward_order(
    pipeline_size: int, num_chunks: int, num_microbatches: int, group_size: int | None
) -> list[tuple[int, int]]:
    return interleaved_order(
        microbatch_groups(num_microbatches, pipeline_size, group_size), num_chunks
    )


def _check_sizes(name: str, pipeline_size: int, num_chunks: int, num_microbatches: int) -> None:
    if name not in SCHEDULE_NAMES:
        raise ValueError(f"pipeline schedule {name!r} is unknown: use one of {SCHEDULE_NAMES}.")
    sizes = {
        "pipeline_parallel_size": pipeline_size,
        "virtual_pipeline_size": num_chunks,
        "num_microbatches": num_microbatches,
    }
    for field, value in sizes.items():
        if value < 1:
            raise ValueError(f"{field}={value}: give at least 1.")
    if name in ("1f1b", "zb-h1") and num_chunks > 1:
        raise ValueError(
            f"schedule {name!r} runs one chunk a rank, but virtual_pipeline_size={num_chunks}: "
            "use schedule 'interleaved' or virtual_pipeline_size=1."
        )
    if name == "zb-v" and num_chunks != 2:
        raise ValueError(
            f"schedule 'zb-v' runs two chunks a rank, but virtual_pipeline_size={num_chunks}: "
            "set it to 2."
        )


def _order_by_end(
    compute: Sequence[Sequence[Action]], placement: Placement
) -> list[tuple[int, tuple[Action, ...]]]:
    """One linear order of all compute actions, by end time; actions of a rank keep theirs."""
    units = [list(in_units(actions)) for actions in compute]
    end: dict[tuple[Kind, int, int], float] = {}
    clock, position = [0.0] * len(compute), [0] * len(compute)
    timed: list[tuple[float, int, int]] = []
    progress = True
    while progress:
        progress = False
        for rank, actions in enumerate(units):
            while position[rank] < len(actions):
                unit = actions[position[rank]]
                needs = [end.get(p) for a in unit for p in predecessors(rank, a, placement)]
                if None in needs:
                    break
                clock[rank] = max([clock[rank], *(n for n in needs if n is not None)])
                clock[rank] += sum(_ORDERING_COST[action.kind] for action in unit)
                end |= {produced(rank, action, placement): clock[rank] for action in unit}
                timed.append((clock[rank], rank, position[rank]))
                position[rank] += 1
                progress = True
    stuck = [
        f"rank {r} at {a[p][0]}"
        for r, (a, p) in enumerate(zip(units, position, strict=True))
        if p < len(a)
    ]
    if stuck:
        raise ValueError("the schedule waits for itself: " + ", ".join(stuck))
    return [(rank, units[rank][index]) for _, rank, index in sorted(timed)]


def _message_after(rank: int, action: Action, placement: Placement) -> tuple[Action, Action] | None:
    """The ``(send, receive)`` pair that carries this action's result to another rank, if any."""
    if action.kind is Kind.W:
        return None
    step, send, receive = (
        (1, Kind.SEND_F, Kind.RECV_F) if action.kind is Kind.F else (-1, Kind.SEND_B, Kind.RECV_B)
    )
    target = placement.stage(rank, action.chunk) + step
    if not 0 <= target < placement.num_stages:
        return None
    peer, peer_chunk = placement.owner(target)
    if peer == rank:
        return None
    m = action.micro_batch
    return Action(send, m, action.chunk, peer, peer_chunk), Action(
        receive, m, peer_chunk, rank, action.chunk
    )
