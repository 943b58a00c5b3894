"""Split backwards through the engine: auxiliary losses, failed runs, memory, resumed training."""

import gc
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatron_lightning.config import PipelineConfig
from megatron_lightning.parallel.axes import MeshAxis
from megatron_lightning.parallel.schedules.actions import Action, Kind
from megatron_lightning.parallel.schedules.build import ScheduleName, build_schedule, placement_of
from megatron_lightning.parallel.weight_gradient import WeightGradients, apply_weight_sinks
from megatron_lightning.runtime.pipeline_engine import PipelineEngine
from tests import tolerances
from tests.distributed.test_resume import SAVED_AT, STEPS, fit, run_of
from tests.harness import RankError, run_ranks, run_ranks_fresh
from tests.layout_runs import assemble, tiny_config

WIDTH = 8


class WithAuxiliaryLoss(torch.autograd.Function):
    """The identity on an activation, whose backward starts that of another loss, as experts' load
    balancing does.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, loss: Tensor) -> Tensor:
        ctx.save_for_backward(loss)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        (loss,) = ctx.saved_tensors
        return grad, torch.ones_like(loss)


class Stage(nn.Module):
    """Norm, two linears, and a loss of its own on what is between them."""

    def __init__(self, stage: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH, bias=False)
        generator = torch.Generator().manual_seed(stage)
        for parameter in self.parameters():
            parameter.data = torch.randn(parameter.shape, generator=generator) / WIDTH**0.5

    def forward(self, x: Tensor) -> Tensor:
        inner = self.up(self.norm(x)).tanh()
        inner = WithAuxiliaryLoss.apply(inner, 0.3 * inner.square().mean())
        return x + self.down(inner)


class Runner:
    """This rank's stages; also where weight gradients are summed, and when they came."""

    def __init__(self, placement, rank: int) -> None:
        self.placement, self.rank = placement, rank
        stages = [placement.stage(rank, c) for c in range(placement.num_chunks)]
        self.stages = nn.ModuleDict({str(s): Stage(s) for s in stages})
        self.main = {n: torch.zeros_like(p) for n, p in self.stages.named_parameters()}
        self.arrivals: list[str] = []

    def add(self, name: str, grad: Tensor) -> None:
        self.main[name] += grad

    def add_product(self, name: str, grad: Tensor, x: Tensor) -> None:
        self.add(name, grad.flatten(0, -2).t() @ x.flatten(0, -2))

    def arrived(self, name: str) -> None:
        self.arrivals.append(name)

    def forward(self, micro_batch: int, chunk: int, received):
        stage = self.placement.stage(self.rank, chunk)
        y = self.stages[str(stage)](first(micro_batch) if received is None else received[0])
        return y.square().mean() if stage + 1 == self.placement.num_stages else y

    def gradients(self) -> dict[str, Tensor]:
        found = {}
        for name, parameter in self.stages.named_parameters():
            late = self.main[name]
            found[name] = late if parameter.grad is None else parameter.grad + late
        return found


def first(micro_batch: int) -> Tensor:
    return torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(100 + micro_batch))


def axis_of(rank: int, world_size: int) -> MeshAxis:
    ranks = tuple(range(world_size))
    return MeshAxis(name="pp", rank=rank, size=world_size, ranks=ranks, group=dist.group.WORLD)


def make(rank: int, world_size: int, name: ScheduleName) -> tuple[PipelineEngine, Runner]:
    placement = placement_of(name, world_size, 2 if name == "zb-v" else 1)
    gradients = WeightGradients()
    engine = PipelineEngine(
        axis_of(rank, world_size),
        placement.num_chunks,
        torch.device("cpu"),
        v_shaped=placement.v_shaped,
        weight_gradients=gradients,
    )
    runner = Runner(placement, rank)
    gradients.target = runner
    names = {id(parameter): name for name, parameter in runner.stages.named_parameters()}
    apply_weight_sinks(runner.stages, gradients, names)
    return engine, runner


def actions_of(engine: PipelineEngine, name: ScheduleName, micro_batches: int, **options: Any):
    placement = engine.placement
    return build_schedule(
        name,
        pipeline_size=placement.pipeline_size,
        num_chunks=placement.num_chunks,
        num_microbatches=micro_batches,
        **options,
    )[engine.rank]


def check_gradients(rank: int, world_size: int, name: ScheduleName, micro_batches: int) -> None:
    engine, runner = make(rank, world_size, name)
    last: list[Action] = []
    engine.run(
        actions_of(engine, name, micro_batches),
        runner,
        signatures=[0] * micro_batches,
        backward=True,
        before_last_backward=last.append,
    )
    assert {(a.kind, a.micro_batch) for a in last} == {(Kind.W, micro_batches - 1)}
    assert len(last) == engine.placement.num_chunks
    weights = [n for n in runner.main if n.endswith(("up.weight", "down.weight"))]
    assert sorted(runner.arrivals) == sorted(weights * micro_batches)
    whole = [Stage(s) for s in range(engine.placement.num_stages)]
    for m in range(micro_batches):
        x = first(m)
        for stage in whole:
            x = stage(x)
        x.square().mean().backward()
    for name_, got in runner.gradients().items():
        stage, _, parameter = name_.partition(".")
        want = whole[int(stage)].get_parameter(parameter).grad
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("name", ["zb-h1", "zb-v"])
@pytest.mark.parametrize("micro_batches", [1, 3, 8])
def test_gradients_with_auxiliary_losses(world_size, name, micro_batches):
    run_ranks(check_gradients, world_size, name, micro_batches)


def check_forward_only(rank: int, world_size: int) -> None:
    """Evaluation in the V, then training, then evaluation again."""
    engine, runner = make(rank, world_size, "zb-v")
    for backward in (False, True, False):
        actions = actions_of(engine, "zb-v", 5, forward_only=not backward)
        engine.run(actions, runner, signatures=[0] * 5, backward=backward)
    assert len(runner.arrivals) == 5 * 2 * 2


def test_forward_only_in_the_v():
    run_ranks(check_forward_only, 2)


def fail_in_the_middle(rank: int, world_size: int) -> None:
    engine, runner = make(rank, world_size, "zb-h1")

    def before(action: Action) -> None:
        if rank == 1 and action.kind is Kind.W and action.micro_batch == 1:
            weights = engine.weight_gradients
            assert not weights.is_empty
            raise ArithmeticError("planted")

    try:
        engine.run(
            actions_of(engine, "zb-h1", 4),
            runner,
            signatures=[0] * 4,
            backward=True,
            before_compute=before,
        )
    except ArithmeticError:
        assert engine.weight_gradients.is_empty
        raise


def test_a_failed_run_leaves_nothing_behind():
    with pytest.raises(RankError, match="planted"):
        run_ranks(fail_in_the_middle, 2)


def check_memory(rank: int, world_size: int) -> None:
    """W frees what it used: after each, only what still waits is alive."""
    engine, runner = make(rank, world_size, "zb-v")
    kept: dict[tuple[int, int], list[weakref.ref]] = {}
    gradients = engine.weight_gradients

    def before(action: Action) -> None:
        gc.collect()
        for key, references in kept.items():
            alive = [reference() is not None for reference in references]
            assert all(alive) if key in gradients._waiting else not any(alive)
        for key, products in gradients._waiting.items():
            kept.setdefault(key, [weakref.ref(product) for product in products])

    engine.run(
        actions_of(engine, "zb-v", 6),
        runner,
        signatures=[0] * 6,
        backward=True,
        before_compute=before,
    )
    assert len(kept) > 6


def test_what_waits_is_freed_as_it_is_used():
    run_ranks(check_memory, 2)


def run_without_queue(rank: int, world_size: int) -> None:
    engine = PipelineEngine(axis_of(rank, world_size), 1, torch.device("cpu"))
    runner = Runner(engine.placement, rank)
    engine.run(actions_of(engine, "zb-h1", 2), runner, signatures=[0, 0], backward=True)


def test_an_engine_without_a_queue_refuses():
    with pytest.raises(RankError, match="give it a WeightGradients for split ones"):
        run_ranks(run_without_queue, 2)


ZB_V = dict(
    pipeline_parallel_size=2,
    micro_batch_size=2,
    pipeline=PipelineConfig(schedule="zb-v", virtual_pipeline_size=2),
)
OTHERS: dict[str, tuple[int, dict[str, Any]]] = {
    "same": (2, ZB_V),
    "single": (1, {}),
    "h1": (2, ZB_V | dict(pipeline=PipelineConfig(schedule="zb-h1"))),
}


@pytest.mark.slow
@pytest.mark.parametrize("other", OTHERS)
def test_a_v_resumes_in_other_layouts(other: str, tmp_path: Path) -> None:
    """Tied embeddings included, which are one parameter of the first rank in a V."""
    run = run_of(config=tiny_config(tie_word_embeddings=True), layout=ZB_V)
    whole = run_ranks_fresh(fit, 2, run, str(tmp_path / "whole"), STEPS, None)
    saved = str(tmp_path / "whole" / f"step={SAVED_AT}.ckpt")
    world_size, layout = OTHERS[other]
    run = run_of(config=run.config, layout=layout)
    rest = run_ranks_fresh(fit, world_size, run, str(tmp_path / "rest"), STEPS, saved)
    for step, (got, want) in enumerate(
        zip(rest[0]["losses"], whole[0]["losses"][SAVED_AT:], strict=True)
    ):
        tolerances.assert_loss_close(got, want, step)
    final, expected = (assemble([rank["final"] for rank in ranks]) for ranks in (rest, whole))
    assert final.keys() == expected.keys()
    for name, want in expected.items():
        if other == "same":
            assert torch.equal(final[name], want), name
        torch.testing.assert_close(final[name], want, rtol=1e-4, atol=2e-5)
