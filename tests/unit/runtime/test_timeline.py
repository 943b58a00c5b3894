"""Timelines: spans of one process, and what is read out of those of many ranks."""

import time

import lightning as L
import pytest
import torch

from megatron_lightning.callbacks import StepTimeline
from megatron_lightning.parallel.schedules.actions import Action, Kind
from megatron_lightning.parallel.schedules.simulate import CostModel, simulate
from megatron_lightning.runtime.kernel_times import KernelTimes, intersection, union
from megatron_lightning.runtime.timeline import Category, Span, Timeline, span
from megatron_lightning.runtime.timeline_report import RankTimeline, StepReport

CPU = torch.device("cpu")


def test_spans_are_timed_and_ordered():
    timeline = Timeline(CPU)
    begin = timeline.mark()
    with timeline.span(Category.COMPUTE, Action(Kind.F, 3, 1), stage=5):
        time.sleep(0.01)
    timeline.add(Category.OPTIMIZER, "outer", begin)
    outer, inner = timeline.spans()
    assert (outer.name, inner.name) == ("outer", "F3.1")
    assert (inner.kind, inner.stage, inner.category) == (Kind.F, 5, Category.COMPUTE)
    assert 0.01 <= inner.seconds <= outer.seconds
    assert outer.begin <= inner.begin < inner.end <= outer.end


def test_a_span_that_fails_is_kept():
    timeline = Timeline(CPU)
    with pytest.raises(ZeroDivisionError), timeline.span(Category.WAIT, "division"):
        _ = 1 / 0
    assert [found.name for found in timeline.spans()] == ["division"]


def test_without_a_timeline_nothing_is_recorded():
    with span(None, Category.COMPUTE, "anything"):
        pass


def compute(kind: Kind, stage: int, begin: float, end: float) -> Span:
    return Span(Category.COMPUTE, f"{kind}0.0", begin, end, kind, stage)


def two_stages() -> StepReport:
    """Forward, then backward, through two ranks; the second one's stage is slower."""
    first = (
        compute(Kind.F, 0, 1.0, 2.0),
        Span(Category.MESSAGE, "SEND_F0.0>1.0", 2.0, 2.5),
        Span(Category.WAIT, "B0.0", 2.5, 6.0, Kind.B, 0),
        compute(Kind.B, 0, 6.0, 8.0),
        Span(Category.COLLECTIVE, "reduce gradients", 8.0, 9.0),
        Span(Category.WAIT, "inside", 8.2, 8.4),
        Span(Category.OPTIMIZER, "clip and step", 9.0, 10.0),
    )
    second = (
        compute(Kind.F, 1, 2.0, 3.5),
        compute(Kind.B, 1, 3.5, 6.0),
        Span(Category.OPTIMIZER, "clip and step", 9.0, 10.0),
    )
    return StepReport(
        step=7,
        ranks=(
            RankTimeline(rank=0, pipeline=0, pipeline_rank=0, spans=first),
            RankTimeline(rank=1, pipeline=0, pipeline_rank=1, spans=second),
        ),
    )


def test_shares_of_a_step():
    report = two_stages()
    first, second = report.ranks
    times = {category: first.seconds(category) for category in Category}
    assert times == {
        Category.COMPUTE: 3.0,
        Category.MESSAGE: 0.5,
        Category.WAIT: 3.5,  # what lies in another span counts there
        Category.COLLECTIVE: 1.0,
        Category.OPTIMIZER: 1.0,
    }
    assert report.seconds == 10.0
    assert report.idle_seconds(first) == 1.0
    assert report.idle_seconds(second) == 5.0
    assert report.slowest_rank == 1
    assert report.slowest_stage == 1
    assert report.stage_seconds == {0: 3.0, 1: 4.0}


def test_bubble_is_that_of_the_simulator():
    report = two_stages()
    assert report.pipeline_idle_seconds == {0: 4.0, 1: 3.0}
    assert report.bubble_fraction == 7.0 / 14.0
    order = [Action(Kind.F, 0, 0), Action(Kind.B, 0, 0)]
    messages = [
        [
            order[0],
            Action(Kind.SEND_F, 0, 0, 1, 0),
            Action(Kind.RECV_B, 0, 0, 1, 0),
            order[1],
        ],
        [
            Action(Kind.RECV_F, 0, 0, 0, 0),
            *order,
            Action(Kind.SEND_B, 0, 0, 0, 0),
        ],
    ]
    cost = CostModel(measured=report.durations)
    simulated = simulate(messages, cost, num_chunks=1, num_microbatches=1)
    assert simulated.idle == (4.0, 3.0)
    assert simulated.bubble_fraction == report.bubble_fraction
    full = StepReport(step=7, ranks=report.ranks, simulated=simulated)
    assert "pipeline bubble 50.0%, simulated with these durations 50.0%" in full.table()


def test_table_and_trace():
    report = two_stages()
    summary, head, *rows = report.table().splitlines()
    assert summary == "step 7: 10.0000 s; slowest rank 1, slowest stage 1 (4.0000 s a micro-batch)"
    assert head.split() == (
        ["rank", "stage", "rank", "compute", "message", "wait", "collective", "optimizer", "idle"]
    )
    assert rows[0].split() == ["0", "0", "3.0000", "0.5000", "3.5000", "1.0000", "1.0000", "1.0000"]
    events = report.chrome_trace()["traceEvents"]
    assert {
        "ph": "X",
        "name": "compute B0.0",
        "cat": "compute",
        "pid": 1,
        "tid": 0,
        "ts": 3.5e6,
        "dur": 2.5e6,
        "args": {"stage": 1},
    } in events
    assert sum(event["ph"] == "M" for event in events) == 4


def test_hidden_collectives():
    compute_times = union([(0, 4), (3, 6), (8, 9)])
    assert compute_times == [(0, 6), (8, 9)]
    assert intersection(compute_times, union([(5, 8.5), (10, 11)])) == [(5, 6), (8, 8.5)]
    assert intersection([], [(0, 1)]) == []
    times = KernelTimes(
        compute_seconds=7,
        collective_seconds=4.5,
        message_seconds=2,
        hidden_seconds=1.5,
        hidden_message_seconds=1,
    )
    assert times.hidden_fraction == pytest.approx(1 / 3)
    assert times.hidden_message_fraction == 0.5
    assert "33% hidden" in times.describe()
    none = KernelTimes(compute_seconds=7, collective_seconds=0, message_seconds=0, hidden_seconds=0)
    assert none.hidden_fraction == 1.0


def test_bad_use_is_refused():
    with pytest.raises(ValueError, match="every_n_steps=0"):
        StepTimeline(0)
    trainer = L.Trainer(accelerator="cpu", logger=False, enable_checkpointing=False)
    with pytest.raises(ValueError, match="MegatronStrategy"):
        StepTimeline().setup(trainer, L.LightningModule(), "fit")
