"""1F1B in pairs of a backward and a forward: order, deadlock, bubble, activations, hidden time."""

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_lightning.parallel.axes import MeshAxis
from megatron_lightning.parallel.lanes import Lanes
from megatron_lightning.parallel.schedules.actions import COMPUTE, Action, Kind, by_memory, in_units
from megatron_lightning.parallel.schedules.build import build_schedule
from megatron_lightning.parallel.schedules.simulate import CostModel, ScheduleError, simulate
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


class NotedLanes(Lanes):
    """Lanes that note what is asked of them."""

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"))
        self.notes: list[str] = []

    def fork(self) -> None:
        self.notes.append("fork")

    def join(self) -> None:
        self.notes.append("join")


class NotingRunner:
    """Notes in which lane each forward runs, and each backward."""

    def __init__(self, lanes: NotedLanes) -> None:
        self.lanes = lanes
        self.weight = torch.ones((), requires_grad=True)

    def forward(self, micro_batch: int, chunk: int, received: Any) -> Tensor:
        lanes, name = self.lanes, f"{micro_batch}.{chunk}"
        lanes.notes.append(f"F{name} in {lanes.number}")
        value = self.weight * 2 if received is None else received[0] * self.weight
        if value.requires_grad:
            value.register_hook(lambda grad: lanes.notes.append(f"B{name} in {lanes.number}"))
        return value


def notes_of(num_chunks: int, num_microbatches: int, *, backward: bool = True) -> list[str]:
    lanes = NotedLanes()
    runner = NotingRunner(lanes)
    engine = PipelineEngine(MeshAxis(name="pp"), num_chunks, torch.device("cpu"), lanes=lanes)
    actions = paired(1, num_chunks, num_microbatches, forward_only=not backward)[0]
    signatures = [0] * num_microbatches
    engine.run(actions, runner, signatures=signatures, backward=backward)
    assert lanes.number == 0
    return lanes.notes


def test_both_of_a_pair_begin_behind_what_was_before_it_and_not_behind_each_other() -> None:
    assert notes_of(1, 4) == [
        *("fork", "F0.0 in 0", "join"),
        *("fork", "B0.0 in 0", "F1.0 in 1", "join"),
        *("fork", "B1.0 in 1", "F2.0 in 0", "join"),
        *("fork", "B2.0 in 0", "F3.0 in 1", "join"),
        *("fork", "B3.0 in 1", "join"),
    ]
    assert notes_of(1, 2, backward=False) == ["F0.0 in 0", "F1.0 in 0"]


@pytest.mark.parametrize("num_chunks", [1, 2, 3])
def test_a_backward_is_in_the_lane_of_its_forward_and_its_partner_in_the_other(
    num_chunks: int,
) -> None:
    lane: dict[str, str] = {}
    unit: list[str] = []
    for note in notes_of(num_chunks, 6):
        if note in ("fork", "join"):
            assert len(set(unit)) == len(unit)
            unit = []
            continue
        name, _, number = note.partition(" in ")
        unit.append(number)
        if name.startswith("F"):
            lane[name[1:]] = number
        else:
            assert lane[name[1:]] == number
    assert len(lane) == 6 * num_chunks
