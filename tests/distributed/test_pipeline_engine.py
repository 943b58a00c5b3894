"""The pipeline engine on gloo ranks: gradients of every schedule equal those of one process."""

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleInterleaved1F1B

from megatron_lightning.parallel.schedules.actions import Kind, Placement
from megatron_lightning.parallel.schedules.build import build_schedule
from megatron_lightning.runtime.pipeline_engine import PipelineEngine
from tests.harness import run_ranks
from tests.pipeline_stages import (
    Runner,
    Stage,
    axis_of,
    batch,
    compare,
    engine_run,
    here,
    loss_of,
    reference,
)


def check_training(rank, world_size, name, chunks, lengths):
    engine = PipelineEngine(axis_of(rank, world_size), chunks, here())
    runner = engine_run(rank, world_size, engine, name, chunks, lengths)
    compare(rank, runner, reference(world_size * chunks, lengths), lengths)


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("num_microbatches", [1, 2, 3, 6])
@pytest.mark.parametrize(
    ("name", "chunks"),
    [("1f1b", 1), ("gpipe", 1), ("gpipe", 2), ("interleaved", 2), ("interleaved", 3)],
)
def test_gradients_equal_one_process(world_size, name, chunks, num_microbatches):
    """Tuples with an integer, a constant and a passed-through differentiable tensor."""
    run_ranks(check_training, world_size, name, chunks, [5] * num_microbatches)


@pytest.mark.parametrize(("name", "chunks"), [("1f1b", 1), ("interleaved", 2), ("gpipe", 3)])
def test_one_rank_needs_no_group(name, chunks):
    check_training(0, 1, name, chunks, [5, 3, 5])


def check_changing_shapes(rank, world_size, chunks):
    """Lengths differ between micro-batches and between runs of one engine; validation between."""
    engine = PipelineEngine(axis_of(rank, world_size), chunks, here())
    for lengths in ([5, 3, 5, 7], [3, 3], [9], [5, 3, 5, 7]):
        runner = engine_run(rank, world_size, engine, "interleaved", chunks, lengths)
        compare(rank, runner, reference(world_size * chunks, lengths), lengths)
        runner = engine_run(
            rank, world_size, engine, "interleaved", chunks, lengths, backward=False
        )
        assert all(p.grad is None for s in runner.stages.values() for p in s.parameters())
    assert len(engine.received_specs) <= 2 * 4 * chunks  # runs, lengths
    return len(engine.received_specs)


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("chunks", [1, 2])
def test_shapes_may_change(world_size, chunks):
    counts = run_ranks(check_changing_shapes, world_size, chunks)
    assert counts[-1] == 2 * 4 * chunks
    assert counts[0] == 2 * 4 * (chunks - 1)


def check_forward_only(rank, world_size, chunks, lengths):
    engine = PipelineEngine(axis_of(rank, world_size), chunks, here())
    with torch.inference_mode():
        runner = engine_run(
            rank, world_size, engine, "interleaved", chunks, lengths, backward=False
        )
    if rank == world_size - 1:
        _, _, losses = reference(world_size * chunks, lengths)
        assert [runner.losses[m] for m in range(len(lengths))] == pytest.approx(losses, rel=1e-6)


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("chunks", [1, 2])
@pytest.mark.parametrize("num_microbatches", [1, 5])
def test_forward_only(world_size, chunks, num_microbatches):
    run_ranks(check_forward_only, world_size, chunks, [4] * num_microbatches)


def check_callbacks(rank, world_size):
    engine = PipelineEngine(axis_of(rank, world_size), 2, here())
    placement = engine.placement
    stages = {placement.stage(rank, c): Stage(placement.stage(rank, c)) for c in range(2)}
    runner = Runner(stages, placement, rank, [4] * 4)
    actions = build_schedule(
        "interleaved", pipeline_size=world_size, num_chunks=2, num_microbatches=4
    )[rank]
    seen: list[str] = []
    engine.run(
        actions,
        runner,
        signatures=[4] * 4,
        backward=True,
        before_compute=lambda action: seen.append(str(action)),
        before_last_backward=lambda action: seen.append(f"last {action.chunk}"),
    )
    expected: list[str] = []
    for action in actions:
        if action.kind in (Kind.F, Kind.B):
            if action.kind is Kind.B and action.micro_batch == 3:
                expected.append(f"last {action.chunk}")
            expected.append(str(action))
    assert seen == expected


def test_callbacks_come_before_the_computation():
    run_ranks(check_callbacks, 2)


class FrozenRunner(Runner):
    """The first stage is frozen, the last has no loss for micro-batch 1."""

    def forward(self, micro_batch, chunk, received):
        result = super().forward(micro_batch, chunk, received)
        return None if received is not None and micro_batch == 1 else result


def check_frozen(rank, world_size):
    engine = PipelineEngine(axis_of(rank, world_size), 1, here())
    runner = FrozenRunner({rank: Stage(rank)}, engine.placement, rank, [4] * 3)
    if rank == 0:
        runner.stages[0].requires_grad_(False)
        runner.first.requires_grad_(False)
    actions = build_schedule("1f1b", pipeline_size=2, num_microbatches=3)[rank]
    engine.run(actions, runner, signatures=[4] * 3, backward=True)
    if rank == 0:
        return None
    return runner.stages[1].linear.weight.grad


def test_a_frozen_stage_and_a_micro_batch_without_loss():
    _, got = run_ranks(check_frozen, 2)
    stages = [Stage(0).requires_grad_(False), Stage(1)]
    for micro_batch in (0, 2):
        hidden, positions, scale, skip = batch(micro_batch, 4)
        carried = stages[1](*stages[0](hidden, positions, scale, skip * 0.7))
        loss_of(carried).backward()
    torch.testing.assert_close(got, stages[1].linear.weight.grad, rtol=1e-6, atol=1e-6)


def check_against_torch(rank, world_size, chunks, num_microbatches):
    """The schedules that torch has as a second opinion on the gradients."""

    class Plain(nn.Module):
        def __init__(self, stage: int) -> None:
            super().__init__()
            self.inner = Stage(stage).linear

        def forward(self, hidden: Tensor) -> Tensor:
            return torch.tanh(self.inner(hidden))

    class PlainRunner(Runner):
        def forward(self, micro_batch, chunk, received):
            stage = self.placement.stage(self.rank, chunk)
            hidden = batches[micro_batch] if received is None else received[0]
            hidden = self.stages[stage](hidden)
            return loss_of((hidden,)) if stage + 1 == self.placement.num_stages else hidden

    placement = Placement(world_size, chunks)
    mine = [placement.stage(rank, c) for c in range(chunks)]
    batches = [batch(m, 4)[0] for m in range(num_microbatches)]
    device = here()

    engine = PipelineEngine(axis_of(rank, world_size), chunks, device)
    ours = PlainRunner({s: Plain(s) for s in mine}, placement, rank, [4] * num_microbatches)
    actions = build_schedule(
        "interleaved",
        pipeline_size=world_size,
        num_chunks=chunks,
        num_microbatches=num_microbatches,
    )[rank]
    engine.run(actions, ours, signatures=[4] * num_microbatches, backward=True)

    theirs = {s: Plain(s) for s in mine}
    stages = [PipelineStage(theirs[s], s, placement.num_stages, device) for s in mine]
    options = {"loss_fn": lambda output, _: loss_of((output,)), "scale_grads": False}
    schedule = (
        Schedule1F1B(stages[0], num_microbatches, **options)
        if chunks == 1
        else ScheduleInterleaved1F1B(stages, num_microbatches, **options)
    )
    whole = torch.cat(batches)
    schedule.step(
        *((whole,) if rank == 0 else ()),
        **({"target": whole} if rank == world_size - 1 else {}),
    )
    for stage, module in theirs.items():
        for got, want in zip(ours.stages[stage].parameters(), module.parameters(), strict=True):
            torch.testing.assert_close(got.grad, want.grad, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(("world_size", "chunks"), [(2, 1), (4, 1), (2, 2)])
def test_gradients_equal_torch_pipelining(world_size, chunks):
    run_ranks(check_against_torch, world_size, chunks, 4)


@pytest.mark.gpu
def test_everything_again_over_nccl():
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    for name, chunks in (("1f1b", 1), ("gpipe", 2), ("interleaved", 2), ("interleaved", 3)):
        for num_microbatches in (1, 2, 3, 6):
            lengths = [5] * num_microbatches
            run_ranks(check_training, 2, name, chunks, lengths, backend="nccl")
    for chunks in (1, 2):
        run_ranks(check_changing_shapes, 2, chunks, backend="nccl")
        run_ranks(check_forward_only, 2, chunks, [4] * 5, backend="nccl")
