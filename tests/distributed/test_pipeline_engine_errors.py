"""What the pipeline engine says of runs that can't be, and what is left of those that failed."""

import contextlib
import gc
import weakref

import pytest
import torch

from megatron_lightning.parallel.axes import MeshAxis
from megatron_lightning.parallel.schedules.actions import Action, Kind
from megatron_lightning.parallel.schedules.build import build_schedule
from megatron_lightning.runtime.pipeline_engine import PipelineEngine
from tests.harness import RankError, run_ranks
from tests.pipeline_stages import Runner, Stage, axis_of, here


class FailingRunner(Runner):
    def forward(self, micro_batch, chunk, received):
        if self.rank == 1 and micro_batch == 1:
            raise KeyError("from the user's code")
        return super().forward(micro_batch, chunk, received)


def check_failure(rank, world_size):
    engine = PipelineEngine(axis_of(rank, world_size), 1, here())
    runner = FailingRunner({rank: Stage(rank)}, engine.placement, rank, [4] * 3)
    actions = build_schedule("1f1b", pipeline_size=2, num_microbatches=3)[rank]
    engine.run(actions, runner, signatures=[4] * 3, backward=True)


def test_an_exception_of_the_runner_passes_through():
    with pytest.raises(RankError, match="from the user's code"):
        run_ranks(check_failure, 2, timeout=20)


class Returning:
    def __init__(self, value) -> None:
        self.value = value

    def forward(self, micro_batch, chunk, received):
        return self.value


@pytest.mark.parametrize(
    ("actions", "arguments", "value", "message"),
    [
        ("F", {"backward": True}, None, "backward=True, but the action list holds no backwards"),
        ("FB", {"backward": False}, None, "backward=False, but the action list holds backwards"),
        ("FIW", {"backward": True}, None, "full backwards"),
        ("FB", {"signatures": []}, None, "signatures for 0 micro-batches"),
        ("FB", {}, torch.zeros(2, requires_grad=True), r"scalar loss .* returned \(2,\)"),
        ("FB", {}, "text", "scalar loss .* returned str"),
    ],
)
def test_what_cannot_run_is_explained(actions, arguments, value, message):
    engine = PipelineEngine(MeshAxis(name="pp"), 1, here())
    arguments = {"signatures": [0], "backward": True} | arguments
    with pytest.raises(ValueError, match=message):
        engine.run([Action(Kind(k), 0, 0) for k in actions], Returning(value), **arguments)


def test_an_output_that_cannot_be_handed_on_is_explained():
    engine = PipelineEngine(MeshAxis(name="pp"), 2, here())
    (actions,) = build_schedule("interleaved", pipeline_size=1, num_chunks=2, num_microbatches=1)
    with pytest.raises(ValueError, match="chunk 0 must return a tensor .* but returned one dict"):
        engine.run(actions, Returning({"hidden": 1}), signatures=[0], backward=True)


def test_a_run_leaves_no_reference():
    """Neither a finished nor a failed run keeps its runner (and what that holds) until a gc."""
    engine = PipelineEngine(MeshAxis(name="pp"), 1, torch.device("cpu"))
    gc.disable()
    try:
        for value in (torch.ones((), requires_grad=True), "no loss"):
            runner = Returning(value)
            seen = weakref.ref(runner)
            with contextlib.suppress(ValueError):
                engine.run(
                    [Action(Kind.F, 0, 0), Action(Kind.B, 0, 0)],
                    runner,
                    signatures=[0],
                    backward=True,
                )
            del runner
            assert seen() is None
    finally:
        gc.enable()
