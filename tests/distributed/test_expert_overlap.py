"""Backwards beside forwards of other micro-batches: the same training as one process, and on the
CPU bitwise that of the same layout without.
"""

import functools
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch

from megatron_lightning.callbacks import StepTimeline
from megatron_lightning.config import (
    DataParallelConfig,
    ExpertConfig,
    MoEConfig,
    PipelineConfig,
    QuantizationConfig,
)
from megatron_lightning.config.recompute import RecomputeConfig
from megatron_lightning.config.validate import ConfigurationError
from megatron_lightning.models.gpt import GPTModel
from megatron_lightning.parallel import expert
from megatron_lightning.parallel.axes import LanedAxis
from megatron_lightning.parallel.main_gradient import AddsAtOnce
from megatron_lightning.parallel.mesh import ParallelMesh
from tests.distributed.test_bad_input import trainer
from tests.harness import run_ranks, run_ranks_fresh
from tests.layout_runs import (
    Batches,
    Run,
    assert_same_training,
    make_strategy,
    tiny_config,
    train,
)

PAIRED = ExpertConfig(overlap_all_to_all=True)
MOE = MoEConfig(
    num_experts=4,
    ffn_hidden_size=32,
    shared_expert_ffn_hidden_size=16,
    first_dense_layers=1,
)
CONFIG = tiny_config(ffn_hidden_size=48, moe=MOE)
EP2: dict[str, Any] = dict(expert_parallel_size=2, micro_batch_size=1)
PP2: dict[str, Any] = EP2 | dict(pipeline_parallel_size=2)
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "ep2": (2, EP2),
    "ep2_pp2": (4, PP2),
    "ep2_pp2_interleaved": (4, PP2 | dict(virtual=2)),
    "ep2_chunks": (2, EP2 | dict(virtual=2)),
    "tp2_sp_ep2_zero": (
        4,
        EP2
        | dict(
            tensor_parallel_size=2,
            expert_tensor_parallel_size=1,
            sequence_parallel=True,
            data_parallel=DataParallelConfig(sharding="optimizer", bucket_size=5000),
        ),
    ),
    "ep2_recompute": (2, EP2 | dict(recompute=RecomputeConfig(mode="full"))),
}


def run_of(layout: dict[str, Any]) -> Run:
    return Run(config=CONFIG, steps=3, keep_gradients=(0, 1, 2), layout=layout)


@functools.cache
def alone() -> dict[str, Any]:
    return run_ranks_fresh(train, 1, run_of({}))[0]


def train_counting(rank: int, world_size: int, run: Run) -> dict[str, Any]:
    """Train, and note by the groups of which lane rows travelled, and whether experts added their
    gradients themselves.
    """
    lanes: list[int] = []
    at_once: set[bool] = set()
    exchange, defer_call = expert._all_to_all, AddsAtOnce.defer_call

    def noted(rows: Any, sizes: Any, received: Any, ranks: Any) -> Any:
        assert isinstance(ranks.both, LanedAxis)
        lanes.append(ranks.both.lanes.number)
        assert (ranks.both.group is ranks.both.second) == (lanes[-1] == 1)
        return exchange(rows, sizes, received, ranks)

    def added(self: AddsAtOnce, multiply: Any) -> bool:
        at_once.add(defer_call(self, multiply))
        return True

    expert._all_to_all = noted
    AddsAtOnce.defer_call = added  # type: ignore[method-assign]
    return train(rank, world_size, run) | {"lanes": lanes, "at_once": at_once}


@pytest.mark.parametrize(
    "layout", [n if n == "ep2" else pytest.param(n, marks=pytest.mark.slow) for n in LAYOUTS]
)
def test_training_is_that_of_one_process_and_bitwise_that_without(layout: str) -> None:
    world_size, options = LAYOUTS[layout]
    paired = run_ranks_fresh(train_counting, world_size, run_of(options | dict(expert=PAIRED)))
    assert_same_training(paired, alone())
    plain = run_ranks_fresh(train, world_size, run_of(options))
    for one, other in zip(paired, plain, strict=True):
        assert one["losses"] == other["losses"]
        assert one["norms"] == other["norms"]
        assert set(one["lanes"]) == {0, 1}
        assert one["at_once"] == {True}
        for step, gradients in other["gradients"].items():
            got, want = assemble_own(one["gradients"][step]), assemble_own(gradients)
            assert got.keys() == want.keys()
            assert all(torch.equal(got[name], value) for name, value in want.items())


def watched(rank: int, world_size: int, run: Run, directory: str) -> list[tuple[Any, ...]]:
    """Of each watched step: actions of this rank's pipeline rank, times, and the simulated peak."""
    callback = StepTimeline(1, directory=directory)
    L.Trainer(
        accelerator="cpu",
        devices=world_size,
        strategy=make_strategy(run.layout),
        callbacks=[callback],
        max_steps=2,
        limit_val_batches=0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    ).fit(GPTModel(run.config), Batches(run))
    return [
        (
            [span.name for span in report.ranks[rank].computing],
            min(report.idle_seconds(each) for each in report.ranks),
            report.simulated.peak_live_activations if report.simulated else None,
        )
        for report in callback.reports
    ]


@pytest.mark.slow
def test_a_watched_step_gives_each_of_a_pair_its_time(tmp_path: Path) -> None:
    reports = run_ranks_fresh(watched, 4, run_of(PP2 | dict(expert=PAIRED)), str(tmp_path))[0]
    [(names, idle, live)] = reports
    assert names == ["F0.0", "F1.0", "F2.0", "B0.0&", "F3.0", "B1.0", "B2.0", "B3.0"]
    assert idle >= 0  # no time was counted twice
    assert live == (4, 2)


def assemble_own(gradients: dict[str, Any]) -> dict[Any, Any]:
    """{(name, box): value} of one rank."""
    return {
        (name, *box[:3]): box[3]
        for name, held in gradients.items()
        for box in (held if isinstance(held, list) else [held])
    }


def groups(rank: int, world_size: int) -> list[Any]:
    """Which groups axes have with and without lanes."""
    cpu = torch.device("cpu")
    plain = ParallelMesh.build(device=cpu, tensor=2, expert=2, expert_tensor=1)
    laned = ParallelMesh.build(device=cpu, tensor=2, expert=2, expert_tensor=1, side_by_side=True)
    assert laned.lanes is not None
    found: list[Any] = [plain.lanes is None, type(plain.tp).__name__, len(plain.groups)]
    for name in ("tp", "ep_etp"):
        axis = laned.axis(name)
        outside = axis.group
        with laned.lanes.lane(1):
            inside = axis.group
        found += [
            outside is not inside,
            axis.group is outside,
            axis.ranks == plain.axis(name).ranks,
        ]
    with laned.lanes.lane(1):
        found.append(laned.tp.group is not laned.axis("ep_etp").group)
        found.append(laned.axis("edp").group is None)
    return [*found, len(laned.groups) - len(plain.groups)]


def test_lanes_have_groups_of_their_own() -> None:
    """Tensor and expert axes share ranks here, not groups; without the option nothing is made."""
    [first, second] = run_ranks(groups, 2)
    assert first == second
    assert first[:2] == [True, "MeshAxis"]
    assert first[3:-1] == [True] * 8
    assert first[-1] == 2  # one for tp, one for collectives of experts


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "alone": (dict(expert_parallel_size=1), "expert_parallel_size=1: tokens don't travel"),
    "gpipe": (dict(pipeline=PipelineConfig(schedule="gpipe")), "schedule='gpipe'"),
    "zero_bubble": (
        dict(pipeline_parallel_size=2, pipeline=PipelineConfig(schedule="zb-h1")),
        "schedule='zb-h1'",
    ),
    "context": (dict(context_parallel_size=2), "context_parallel_size=2: its tables"),
    "fsdp": (dict(data_parallel=DataParallelConfig(sharding="fsdp")), "sharding='fsdp'"),
    "offload": (dict(recompute=RecomputeConfig(offload=True)), "recompute.offload=True"),
    "shared": (
        dict(expert=ExpertConfig(overlap_all_to_all=True, overlap_shared_experts=True)),
        "expert.overlap_shared_experts=True",
    ),
    "quantization": (dict(quantization=QuantizationConfig()), "quantization: its scales"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_does_not_go_together_is_refused_by_name(case: str) -> None:
    options, message = REFUSED[case]
    layout = dict(expert_parallel_size=2, expert=PAIRED) | options
    with pytest.raises(ConfigurationError, match=message) as caught:
        trainer(4, layout)
    assert all("overlap_all_to_all=True with" in text for text in caught.value.problems)
