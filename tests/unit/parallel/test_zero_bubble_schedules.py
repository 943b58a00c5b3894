"""Zero-bubble schedules: the papers' figures, no deadlock at any size, and what pays."""

import re
from pathlib import Path
from typing import Any

import pytest
from torch.distributed.pipelining import schedules as torch_schedules

from megatron_lightning.config import ParallelConfig, PipelineConfig
from megatron_lightning.config.validate import check_layout
from megatron_lightning.parallel.pipeline import build_layout
from megatron_lightning.parallel.schedules.actions import Action, Kind, Placement
from megatron_lightning.parallel.schedules.build import (
    ScheduleName,
    add_communication,
    build_schedule,
    placement_of,
)
from megatron_lightning.parallel.schedules.simulate import CostModel, SimulationReport, simulate
from megatron_lightning.parallel.schedules.zero_bubble import v_placement, zb_h1, zb_v

CHUNKS = {"zb-v": 2, "interleaved": 2}


def report(name: ScheduleName, p: int, m: int, cost: CostModel | None = None, **options: Any):
    chunks = CHUNKS.get(name, 1)
    blocking = options.pop("blocking", False)
    actions = build_schedule(
        name, pipeline_size=p, num_chunks=chunks, num_microbatches=m, **options
    )
    return simulate(
        actions,
        cost,
        num_chunks=chunks,
        num_microbatches=m,
        blocking=blocking,
        v_shaped=placement_of(name, p, chunks).v_shaped,
    )


def test_stages_lie_in_a_v():
    placement = v_placement(3)
    assert [[placement.stage(r, c) for c in range(2)] for r in range(3)] == [[0, 5], [1, 4], [2, 3]]
    assert [placement.owner(s) for s in range(6)] == [
        (0, 0),
        (1, 0),
        (2, 0),
        (2, 1),
        (1, 1),
        (0, 1),
    ]
    assert placement.last_rank == 0
    assert Placement(3, 2).last_rank == 2


def test_layout_follows_the_v():
    """A layout string names the stages in the order of the forward, whoever holds them."""
    layout = build_layout(6, 2, 2, "Et|tt|tt|tL", v_shaped=True)
    first, second = layout.chunks(0)
    assert (first.has_embedding, first.layers) == (True, (0,))
    assert (second.has_head, second.layers) == (True, (5,))
    assert [chunk.layers for chunk in layout.chunks(1)] == [(1, 2), (3, 4)]


@pytest.mark.parametrize("name", ["zb-h1", "zb-v"])
@pytest.mark.parametrize("forward_only", [False, True])
def test_no_deadlock_at_any_size(name: ScheduleName, forward_only: bool):
    for p in (1, 2, 3, 4, 7):
        for m in range(1, 16):
            report(name, p, m, blocking=True, forward_only=forward_only)


@pytest.mark.parametrize(("p", "m"), [(2, 2), (4, 4), (4, 8), (8, 8), (8, 24), (6, 13)])
def test_zb_h1_is_a_third_of_1f1b(p: int, m: int):
    """Bubble (p - 1)(F + I - W) and as many activations as 1F1B's first rank (2401.10241, 2.2)."""
    found = report("zb-h1", p, m)
    assert found.makespan == 3 * m + (p - 1)
    assert max(found.peak_live_activations) == p
    assert max(found.peak_live_activations) == max(report("1f1b", p, m).peak_live_activations)


@pytest.mark.parametrize(("p", "m"), [(2, 3), (4, 7), (4, 8), (8, 15), (8, 40), (6, 13)])
def test_zb_v_has_a_bubble_of_p_minus_1_half_forwards(p: int, m: int):
    """With a memory of p whole activations on every rank (2401.10241, section 6)."""
    found = report("zb-v", p, m)
    assert found.makespan == 6 * m + (p - 1)
    assert found.peak_live_activations == (2 * p,) * p


def test_few_micro_batches_still_gain():
    for p in (2, 4, 8):
        for m in range(1, 2 * p):
            assert report("zb-v", p, m).makespan / 2 < report("1f1b", p, m).makespan
            assert report("zb-h1", p, m).makespan < report("1f1b", p, m).makespan


def test_zb_v_halves_the_bubble_of_1f1b_at_4_stages_and_8_micro_batches():
    plain, h1, v = (report(name, 4, 8) for name in ("1f1b", "zb-h1", "zb-v"))
    assert plain.bubble_fraction == pytest.approx(3 / 11)
    assert h1.bubble_fraction == pytest.approx(3 / 27)
    assert v.bubble_fraction == pytest.approx(3 / 51)
    assert v.bubble_fraction < plain.bubble_fraction / 2
    assert v.describe() == (
        "bubble 5.9%, makespan 51, peak of live activations 4 micro-batches a rank (of these up to "
        "3.5 for W alone)"
    )


@pytest.mark.parametrize(
    "durations", [(1.0, 1.3, 0.9), (1.0, 1.1, 0.8), (1.0, 1.6, 0.7), (1.0, 2.0, 1.0)]
)
def test_gain_survives_unequal_durations(durations: tuple[float, float, float]):
    """Attention makes I longer than W; recomputation makes it longer still."""
    forward, input_grad, weight_grad = durations
    cost = CostModel(
        forward=forward,
        backward=input_grad + weight_grad,
        input_grad=input_grad,
        weight_grad=weight_grad,
        message=0.02,
    )
    plain, h1, v = (report(name, 4, 8, cost) for name in ("1f1b", "zb-h1", "zb-v"))
    assert v.bubble_fraction < plain.bubble_fraction / 2
    assert h1.bubble_fraction < 0.85 * plain.bubble_fraction


def test_w_waits_are_counted():
    """Three weight gradients that wait are three activations that are kept."""
    order = [Action(Kind.F, m, 0) for m in range(3)]
    order += [Action(Kind.I, m, 0) for m in range(3)] + [Action(Kind.W, m, 0) for m in range(3)]
    found = simulate([order], num_chunks=1, num_microbatches=3)
    assert found.peak_live_activations == (3,)
    assert found.peak_waiting_weights == (3,)
    assert found.idle == (0.0,)


def test_measured_durations_replace_the_model():
    cost = CostModel(measured={(Kind.F, 0): 2.0, (Kind.F, 1): 3.0, (Kind.B, 0): 1, (Kind.B, 1): 1})
    assert report("1f1b", 2, 1, cost).makespan == 2.0 + 3.0 + 1 + 1


class _Torch:
    """The sizes that torch's schedule asks for."""

    def __init__(self, p: int, m: int) -> None:
        self.pp_group_size, self._num_stages, self._n_microbatches = p, 2 * p, m


def dualpipev(p: int, m: int) -> SimulationReport:
    """DualPipeV as torch has it, overlapped pairs one after the other, in our simulator."""
    kinds = {
        "FORWARD": Kind.F,
        "FULL_BACKWARD": Kind.B,
        "BACKWARD_INPUT": Kind.I,
        "BACKWARD_WEIGHT": Kind.W,
    }
    rows: list[tuple[Action, ...]] = []
    for rank in range(p):
        row: list[Action] = []
        plan = torch_schedules.ScheduleDualPipeV._calculate_single_rank_operations(
            _Torch(p, m),  # type: ignore[arg-type]
            rank,
        )
        for step in plan:
            for a in () if step is None else step.sub_actions or (step,):
                kind = kinds[a.computation_type.name]
                row.append(Action(kind, a.microbatch_index, int(a.stage_index >= p)))
        rows.append(tuple(row))
    actions = add_communication(rows, v_placement(p))
    return simulate(actions, num_chunks=2, num_microbatches=m, v_shaped=True)


@pytest.mark.skipif(
    not hasattr(torch_schedules, "ScheduleDualPipeV"), reason="this torch has no DualPipeV"
)
@pytest.mark.parametrize(("p", "m"), [(2, 8), (4, 8), (4, 16), (8, 16), (8, 32)])
def test_dualpipev_does_not_pay(p: int, m: int):
    """It hides communication inside of a forward and backward run as one; without that, it has the
    bubble of ZB-V to a unit, and needs more memory.
    """
    dual, v = dualpipev(p, m), report("zb-v", p, m)
    assert v.makespan <= dual.makespan + 1
    assert max(dual.peak_live_activations) == max(v.peak_live_activations) + 1


def test_lists_have_no_more_than_they_should():
    for rows, kinds in ((zb_h1(3, 5), 3), (zb_v(3, 5), 6)):
        assert {len(row) for row in rows} == {5 * kinds}


@pytest.mark.parametrize(
    ("name", "chunks", "message"),
    [
        ("zb-h1", 2, "'zb-h1' runs one chunk a rank, but virtual_pipeline_size=2"),
        ("zb-v", 1, "'zb-v' runs two chunks a rank, but virtual_pipeline_size=1: set it to 2"),
        ("zb-v", 3, "virtual_pipeline_size=3"),
        ("zb", 1, "'zb' is unknown"),
    ],
)
def test_impossible_sizes_are_refused(name: ScheduleName, chunks: int, message: str):
    with pytest.raises(ValueError, match=message):
        build_schedule(name, pipeline_size=2, num_chunks=chunks, num_microbatches=4)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(schedule="zb-v"), "schedule='zb-v' with pipeline.virtual_pipeline_size=1.*size=2"),
        (dict(schedule="zb-h1", virtual_pipeline_size=2), "'zb-v' run virtual stages"),
        (dict(schedule="gpipe", virtual_pipeline_size=2), "'zb-v' run virtual stages"),
        (dict(schedule="zb"), "schedule='zb': choose one of .*zb-v"),
        (dict(message_ctas=0), "message_ctas=0: give 1 to 32"),
        (dict(defer_head_gradient=False), "defer_head_gradient=False.*'1f1b'.*zb-h1 or zb-v"),
    ],
)
def test_impossible_configs_are_refused(options: dict[str, Any], message: str):
    config = ParallelConfig(pipeline_parallel_size=2, pipeline=PipelineConfig(**options))
    (problem,) = check_layout(config)
    assert re.search(message, problem)


def test_zero_bubble_needs_a_pipeline():
    config = ParallelConfig(pipeline=PipelineConfig(schedule="zb-h1"))
    (problem,) = check_layout(config)
    assert "'zb-h1' with pipeline_parallel_size=1" in problem
    assert "schedule='1f1b'" in problem
    fine = PipelineConfig(schedule="zb-v", virtual_pipeline_size=2)
    assert not check_layout(ParallelConfig(pipeline_parallel_size=4, pipeline=fine))


def test_message_ctas_need_messages():
    config = ParallelConfig(pipeline=PipelineConfig(message_ctas=4))
    (problem,) = check_layout(config)
    assert "message_ctas=4 with pipeline_parallel_size=1" in problem
    fine = PipelineConfig(message_ctas=4)
    assert not check_layout(ParallelConfig(pipeline_parallel_size=2, pipeline=fine))


def test_the_table_of_the_documentation_is_the_simulators():
    page = (Path(__file__).parents[3] / "docs" / "pipeline.md").read_text()
    rows = re.findall(r"^\| (\d+) \| (\d+) \| (\S+) \|(.*)\|$", page, re.MULTILINE)
    assert len(rows) == 10
    usual = CostModel(backward=2.2, input_grad=1.3, weight_grad=0.9)
    for p, m, name, said in rows:
        even, uneven = (report(name, int(p), int(m), cost) for cost in (None, usual))
        peaks = (even.peak_live_activations, even.peak_waiting_weights)
        found = [f"{even.bubble_fraction:.1%}", f"{uneven.bubble_fraction:.1%}"]
        found += [f"{max(peak) / even.num_chunks:g}" for peak in peaks]
        assert [cell.strip() for cell in said.split("|")] == found, name
