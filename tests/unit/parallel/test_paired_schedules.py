"""1F1B in pairs of a backward and a forward: order, deadlock, bubble, activations, hidden time."""

import dataclasses

import pytest
import torch

from megatron_lightning.parallel.actions import COMPUTE, Action, Kind, by_memory, in_units
from megatron_lightning.parallel.mesh import MeshAxis
from megatron_lightning.parallel.schedules import build_schedule
from megatron_lightning.parallel.simulate import CostModel, ScheduleError, simulate
from megatron_lightning.runtime.pipeline_engine import PipelineEngine

PIPELINE = (1, 2, 3, 4, 8)
CHUNKS = (1, 2, 3)
MICROBATCHES = (1, 2, 3, 4, 5, 7, 8, 10, 16, 17)


def paired(p: int, v: int, m: int, **options):
    return build_schedule("paired", pipeline_size=p, num_chunks=v, num_microbatches=m, **options)


def ahead(p: int, v: int, rank: int) -> int:
    """Forwards of a rank before its first pair."""
    return (v - 1) * p + 2 * (p - rank) - 1


@pytest.mark.parametrize("p", PIPELINE)
@pytest.mark.parametrize("v", CHUNKS)
@pytest.mark.parametrize("m", MICROBATCHES)
def test_it_does_not_deadlock_with_blocking_messages(p: int, v: int, m: int) -> None:
    actions = paired(p, v, m)
    report = simulate(actions, num_chunks=v, num_microbatches=m, blocking=True)
    assert len(report.spans) == 2 * p * v * m
    messages = [a for rank in actions for a in rank if a.kind not in COMPUTE]
    assert len(messages) == (4 * (p * v - 1) * m if p > 1 else 0)


@pytest.mark.parametrize("p", PIPELINE)
@pytest.mark.parametrize("v", CHUNKS)
@pytest.mark.parametrize("backward", [1.0, 2.0, 3.0])
def test_bubble_and_activations_are_the_formulas(p: int, v: int, backward: float) -> None:
    """The bubble of 1F1B, (P-1)/(V*M+P-1), and one activation more than are ahead."""
    for m in (m for m in (*MICROBATCHES, 33) if m >= p):
        cost = CostModel(backward=backward)
        report = simulate(paired(p, v, m), cost, num_chunks=v, num_microbatches=m)
        assert report.bubble_fraction == pytest.approx((p - 1) / (v * m + p - 1))
        assert report.makespan == pytest.approx((1 + backward) * (v * m + p - 1))
        if m % p == 0:
            expected = tuple(min(v * m, ahead(p, v, rank) + 1) for rank in range(p))
            assert report.peak_live_activations == expected


def test_activations_beside_those_of_1f1b() -> None:
    for p, v, m in ((1, 1, 8), (4, 1, 16), (4, 2, 16)):
        plain = build_schedule("interleaved", pipeline_size=p, num_chunks=v, num_microbatches=m)
        less = simulate(plain, num_chunks=v, num_microbatches=m).peak_live_activations
        more = simulate(paired(p, v, m), num_chunks=v, num_microbatches=m).peak_live_activations
        assert more == tuple(n + 1 if v > 1 else 2 * n for n in less)


def test_what_a_pair_hides_shortens_all_but_warm_up_and_drain() -> None:
    for p, v, m in ((1, 1, 8), (2, 1, 8), (4, 1, 16), (4, 2, 16)):
        run = [
            simulate(paired(p, v, m), CostModel(hidden=h), num_chunks=v, num_microbatches=m)
            for h in (0.0, 0.2)
        ]
        pairs = sum(len(unit) > 1 for unit in in_units(paired(p, v, m)[-1]))  # of the last rank
        assert pairs == v * m - ahead(p, v, p - 1)
        assert run[0].makespan - run[1].makespan >= 0.2 * 3 * pairs - 1e-9
        assert run[0].makespan - run[1].makespan < 0.2 * run[0].makespan


def test_written_out() -> None:
    assert [" ".join(map(str, rank)) for rank in paired(1, 1, 3)] == [
        "F0.0 B0.0& F1.0 B1.0& F2.0 B2.0"
    ]
    # What a pair needs comes before it, what it gives goes behind it.
    assert [" ".join(map(str, rank)) for rank in paired(2, 1, 4)] == [
        "F0.0 SEND_F0.0>1.0 F1.0 SEND_F1.0>1.0 F2.0 SEND_F2.0>1.0 RECV_B0.0<1.0"
        " B0.0& F3.0 SEND_F3.0>1.0 RECV_B1.0<1.0 B1.0 RECV_B2.0<1.0 B2.0 RECV_B3.0<1.0 B3.0",
        "RECV_F0.0<0.0 RECV_F1.0<0.0 F0.0 RECV_F2.0<0.0 B0.0& F1.0 SEND_B0.0>0.0 RECV_F3.0<0.0"
        " B1.0& F2.0 SEND_B1.0>0.0 B2.0& F3.0 SEND_B2.0>0.0 B3.0 SEND_B3.0>0.0",
    ]


@pytest.mark.parametrize("p", [1, 2, 4])
@pytest.mark.parametrize("v", CHUNKS)
def test_gradients_add_up_in_the_order_of_1f1b(p: int, v: int) -> None:
    """So that sums are bitwise the same."""
    for m in MICROBATCHES:
        plain = build_schedule("interleaved", pipeline_size=p, num_chunks=v, num_microbatches=m)
        for one, other in zip(plain, paired(p, v, m), strict=True):
            assert [a for a in one if a.kind is Kind.B] == [
                dataclasses.replace(a, beside_next=False) for a in other if a.kind is Kind.B
            ]


def test_a_pair_is_never_one_micro_batch() -> None:
    for p in PIPELINE:
        for v in CHUNKS:
            for m in MICROBATCHES:
                for rank in paired(p, v, m):
                    for back, forth in (unit for unit in in_units(rank) if len(unit) > 1):
                        assert (back.kind, forth.kind) == (Kind.B, Kind.F)
                        assert back.micro_batch != forth.micro_batch or v > 1
                        assert (back.micro_batch, back.chunk) != (forth.micro_batch, forth.chunk)


def test_both_of_a_pair_are_live() -> None:
    (actions,) = paired(1, 1, 2)
    assert [str(a) for a in by_memory(actions)] == ["F0.0", "F1.0", "B0.0&", "B1.0"]


def test_without_backwards_it_is_the_forwards_alone() -> None:
    only = paired(2, 2, 4, forward_only=True)
    assert only == build_schedule(
        "interleaved", pipeline_size=2, num_chunks=2, num_microbatches=4, forward_only=True
    )


def test_a_pair_without_its_forward_is_found() -> None:
    lists = [(Action(Kind.F, 0, 0), Action(Kind.B, 0, 0, beside_next=True))]
    with pytest.raises(ScheduleError, match=r"B0\.0& is not followed by a forward"):
        simulate(lists, num_chunks=1, num_microbatches=1)


def test_an_engine_without_lanes_refuses_pairs() -> None:
    engine = PipelineEngine(MeshAxis(name="pp"), 1, torch.device("cpu"))
    with pytest.raises(ValueError, match="B0.0&: an engine without lanes"):
        engine.run(paired(1, 1, 2)[0], None, signatures=[0, 0], backward=True)  # type: ignore[arg-type]
