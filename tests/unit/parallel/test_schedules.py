"""Every schedule over a grid of sizes: deadlock, order, bubble and memory against the formulas."""

import pytest

from megatron_lightning.parallel.schedules.actions import COMPUTE, Action, Kind, Placement
from megatron_lightning.parallel.schedules.build import (
    add_communication,
    build_schedule,
    microbatch_groups,
)
from megatron_lightning.parallel.schedules.simulate import CostModel, ScheduleError, simulate

PIPELINE = (1, 2, 3, 4, 8)
CHUNKS = (1, 2, 3)
MICROBATCHES = (1, 2, 3, 4, 5, 7, 8, 10, 16, 17)


def schedule(name: str, p: int, v: int, m: int, **options):
    return build_schedule(name, pipeline_size=p, num_chunks=v, num_microbatches=m, **options)


@pytest.mark.parametrize("p", PIPELINE)
@pytest.mark.parametrize("v", CHUNKS)
@pytest.mark.parametrize("m", MICROBATCHES)
def test_no_schedule_deadlocks_with_blocking_messages(p, v, m):
    names = ("gpipe", "interleaved") if v > 1 else ("gpipe", "1f1b", "interleaved")
    for name in names:
        for only_forward in (False, True):
            actions = schedule(name, p, v, m, forward_only=only_forward)
            report = simulate(actions, num_chunks=v, num_microbatches=m, blocking=True)
            kinds = 1 if only_forward else 2
            assert len(report.spans) == kinds * p * v * m
            messages = [a for rank in actions for a in rank if a.kind not in COMPUTE]
            cuts = p * v - 1 if p > 1 else 0
            assert len(messages) == 2 * kinds * cuts * m


@pytest.mark.parametrize("p", PIPELINE)
@pytest.mark.parametrize("v", CHUNKS)
@pytest.mark.parametrize("backward", [1.0, 2.0, 3.0])
def test_bubble_is_the_formula(p, v, backward):
    """(P-1)/(V*M+P-1), also where the micro-batches are no multiple of the stages."""
    for m in (m for m in (*MICROBATCHES, 33) if m >= p):
        report = simulate(
            schedule("interleaved", p, v, m),
            CostModel(backward=backward),
            num_chunks=v,
            num_microbatches=m,
        )
        assert report.bubble_fraction == pytest.approx((p - 1) / (v * m + p - 1))
        assert report.makespan == pytest.approx((1 + backward) * (v * m + p - 1))


@pytest.mark.parametrize("p", PIPELINE)
@pytest.mark.parametrize("m", MICROBATCHES)
def test_live_activations_of_1f1b(p, m):
    report = simulate(schedule("1f1b", p, 1, m), num_chunks=1, num_microbatches=m)
    assert report.peak_live_activations == tuple(min(m, p - rank) for rank in range(p))
    gpipe = simulate(schedule("gpipe", p, 1, m), num_chunks=1, num_microbatches=m)
    assert gpipe.peak_live_activations == (m,) * p


def test_live_activations_of_interleaved():
    """Warm-up and one more: 2(P-r-1) + (V-1)P + 1, in units of a chunk."""
    for p, v, m in ((4, 2, 8), (4, 3, 16), (2, 4, 6), (8, 2, 32)):
        report = simulate(schedule("interleaved", p, v, m), num_chunks=v, num_microbatches=m)
        expected = tuple(min(v * m, 2 * (p - r - 1) + (v - 1) * p + 1) for r in range(p))
        assert report.peak_live_activations == expected


def test_only_forward_keeps_nothing():
    report = simulate(
        schedule("interleaved", 2, 2, 4, forward_only=True), num_chunks=2, num_microbatches=4
    )
    assert report.peak_live_activations == (0, 0)


def test_1f1b_written_out():
    lists = [" ".join(map(str, rank)) for rank in schedule("1f1b", 2, 1, 2)]
    # The receive of micro-batch 1 is posted before the forward of 0, beside which it can travel.
    assert lists == [
        "F0.0 SEND_F0.0>1.0 F1.0 SEND_F1.0>1.0 RECV_B0.0<1.0 B0.0 RECV_B1.0<1.0 B1.0",
        "RECV_F0.0<0.0 RECV_F1.0<0.0 F0.0 B0.0 SEND_B0.0>0.0 F1.0 B1.0 SEND_B1.0>0.0",
    ]
    compute = [
        " ".join(str(a) for a in rank if a.kind in COMPUTE) for rank in schedule("1f1b", 2, 1, 3)
    ]
    assert compute == [
        "F0.0 F1.0 B0.0 F2.0 B1.0 B2.0",
        "F0.0 B0.0 F1.0 B1.0 F2.0 B2.0",
    ]


def test_one_rank_needs_no_messages():
    (actions,) = schedule("interleaved", 1, 2, 2)
    assert [str(a) for a in actions] == [
        "F0.0",
        "F0.1",
        "B0.1",
        "F1.0",
        "B0.0",
        "F1.1",
        "B1.1",
        "B1.0",
    ]


def test_groups_of_micro_batches():
    assert microbatch_groups(8, 4) == (4, 4)
    assert microbatch_groups(10, 4) == (5, 5)
    assert microbatch_groups(3, 4) == (3,)
    assert microbatch_groups(33, 4) == (5, 4, 4, 4, 4, 4, 4, 4)
    assert microbatch_groups(16, 4, 6) == (6, 6, 4)
    assert microbatch_groups(14, 4, 6) == (7, 7)
    with pytest.raises(ValueError, match="microbatch_group_size=3.*pipeline_parallel_size=4"):
        microbatch_groups(8, 4, 3)


@pytest.mark.parametrize("group_size", [4, 5, 6, 8, 12])
def test_larger_groups_run(group_size):
    for m in range(1, 30):
        actions = schedule("interleaved", 4, 2, m, group_size=group_size)
        simulate(actions, num_chunks=2, num_microbatches=m, blocking=True)


def test_larger_groups_hide_messages():
    cost = CostModel(message=0.2)
    spans = [
        simulate(
            schedule("interleaved", 4, 2, 32, group_size=g),
            cost,
            num_chunks=2,
            num_microbatches=32,
        ).makespan
        for g in (4, 8)
    ]
    assert spans[1] < spans[0]


def test_stage_weights_count():
    cost = CostModel(stage_weight=(1.0, 2.0))
    report = simulate(schedule("1f1b", 2, 1, 8), cost, num_chunks=1, num_microbatches=8)
    assert report.busy == (24.0, 48.0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"name": "zigzag"}, "'zigzag' is unknown"),
        ({"num_microbatches": 0}, "num_microbatches=0"),
        ({"name": "1f1b", "num_chunks": 2}, "virtual_pipeline_size=2"),
        ({"pipeline_size": 0}, "pipeline_parallel_size=0"),
    ],
)
def test_impossible_sizes_are_explained(options, message):
    options = {"name": "1f1b", "pipeline_size": 2, "num_microbatches": 2} | options
    with pytest.raises(ValueError, match=message):
        build_schedule(**options)


def broken(change):
    lists = [list(rank) for rank in schedule("1f1b", 2, 1, 4)]
    change(lists)
    return lists


def swap(rank: int, first: str, second: str):
    def change(lists):
        names = [str(a) for a in lists[rank]]
        i, j = names.index(first), names.index(second)
        lists[rank][i], lists[rank][j] = lists[rank][j], lists[rank][i]

    return change


def drop(rank: int, name: str):
    return lambda lists: lists[rank].pop([str(a) for a in lists[rank]].index(name))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (drop(0, "F2.0"), "rank 0 has 0 forwards of micro-batch 2"),
        (drop(1, "B3.0"), "rank 1 has 0 B"),
        (drop(1, "RECV_F1.0<0.0"), "for ever|without F"),
        (swap(1, "F0.0", "B0.0"), "rank 1 comes to B0.0 without F"),
        (swap(0, "SEND_F0.0>1.0", "SEND_F1.0>1.0"), "for ever|before it has computed"),
        (swap(1, "RECV_F0.0<0.0", "RECV_F1.0<0.0"), "for ever"),
        (lambda lists: lists[0].append(Action(Kind.F, 4, 0)), "do not exist"),
    ],
)
def test_the_simulator_finds_damage(change, message):
    with pytest.raises(ScheduleError, match=message):
        simulate(broken(change), num_chunks=1, num_microbatches=4)


def test_a_compute_order_that_waits_for_itself_is_refused():
    order = ((Action(Kind.B, 0, 0), Action(Kind.F, 0, 0)),) * 2
    with pytest.raises(ValueError, match="waits for itself"):
        add_communication(order, Placement(2, 1))


def test_split_backward_is_judged():
    """Zero-bubble's pieces: the input gradient goes on before the weight gradient is computed."""
    compute = [
        [Action(k, 0, 0) for k in (Kind.F, Kind.I, Kind.W)],
        [Action(k, 0, 0) for k in (Kind.F, Kind.I, Kind.W)],
    ]
    report = simulate(add_communication(compute, Placement(2, 1)), num_chunks=1, num_microbatches=1)
    assert report.makespan == 5.0  # F F I I W, with the other W beside the second I
    assert report.peak_live_activations == (1, 1)
