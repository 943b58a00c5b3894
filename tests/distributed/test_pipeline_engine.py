"""The pipeline engine on gloo ranks: gradients of every schedule equal those of one process."""

import contextlib
import gc
import weakref

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleInterleaved1F1B
from torch.multiprocessing.reductions import StorageWeakRef

from megatron_lightning.parallel.axes import MeshAxis
from megatron_lightning.parallel.schedules.actions import Action, Kind, Placement
from megatron_lightning.parallel.schedules.build import build_schedule
from megatron_lightning.runtime.pipeline_engine import PipelineEngine
from megatron_lightning.runtime.stage_messages import StageMessages
from tests.harness import RankError, run_ranks

WIDTH = 8


class Stage(nn.Module):
    """One virtual stage; hands on (hidden, positions, a float that wants no gradient, a skip)."""

    def __init__(self, stage: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(stage)
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.unused = nn.Parameter(torch.zeros(1))
        with torch.no_grad():
            for parameter in self.linear.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator) / WIDTH**0.5)
        self.to(here())

    def forward(self, hidden: Tensor, positions: Tensor, scale: Tensor, skip: Tensor):
        hidden = torch.tanh(self.linear(hidden)) * scale + 0.1 * positions[:, None] + 0.5 * skip
        return hidden, positions, scale, skip


def here() -> torch.device:
    """Where the ranks of this test compute."""
    on_gpu = dist.is_initialized() and dist.get_backend() == "nccl"
    return torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")


def batch(micro_batch: int, length: int) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(1000 + micro_batch)
    hidden = torch.randn(length, WIDTH, generator=generator)
    positions = torch.arange(length)
    tensors = hidden, positions, torch.full((1,), 0.9), hidden.tanh()
    return tuple(tensor.to(here()) for tensor in tensors)


def loss_of(outputs: tuple[Tensor, ...]) -> Tensor:
    return outputs[0].square().sum() * 0.1


class Runner:
    """Runs stages on given lengths; records what it was asked to do."""

    def __init__(self, stages: dict[int, Stage], placement: Placement, rank: int, lengths) -> None:
        self.stages, self.placement, self.rank, self.lengths = stages, placement, rank, lengths
        self.losses: dict[int, float] = {}
        self.first = nn.Linear(WIDTH, WIDTH, device=here())  # makes the skip differentiable
        with torch.no_grad():
            self.first.weight.copy_(torch.eye(WIDTH, device=here()) * 0.7)
            self.first.bias.zero_()

    def forward(self, micro_batch: int, chunk: int, received):
        stage = self.placement.stage(self.rank, chunk)
        if received is None:
            assert stage == 0
            hidden, positions, scale, skip = batch(micro_batch, self.lengths[micro_batch])
            received = hidden, positions, scale, self.first(skip)
        outputs = self.stages[stage](*received)
        if stage + 1 < self.placement.num_stages:
            return outputs
        loss = loss_of(outputs)
        self.losses[micro_batch] = loss.item()
        return loss


def reference(
    num_stages: int, lengths
) -> tuple[list[dict[str, Tensor | None]], Tensor, list[float]]:
    """Gradients of each stage, of the first stage's extra layer, and losses, in one process."""
    stages = {s: Stage(s) for s in range(num_stages)}
    runner = Runner(stages, Placement(1, 1), 0, lengths)
    losses = []
    for micro_batch, length in enumerate(lengths):
        hidden, positions, scale, skip = batch(micro_batch, length)
        carried = hidden, positions, scale, runner.first(skip)
        for stage in stages.values():
            carried = stage(*carried)
        loss = loss_of(carried)
        loss.backward()
        losses.append(loss.item())
    grads = [{n: p.grad for n, p in stages[s].named_parameters()} for s in stages]
    return grads, runner.first.weight.grad, losses


def axis_of(rank: int, world_size: int) -> MeshAxis:
    ranks = tuple(range(world_size))
    group = dist.group.WORLD if world_size > 1 else None
    return MeshAxis(name="pp", rank=rank, size=world_size, ranks=ranks, group=group)


def engine_run(rank, world_size, engine, name, chunks, lengths, *, backward=True, stages=None):
    placement = engine.placement
    stages = stages or {
        placement.stage(rank, c): Stage(placement.stage(rank, c)) for c in range(chunks)
    }
    runner = Runner(stages, placement, rank, lengths)
    actions = build_schedule(
        name,
        pipeline_size=world_size,
        num_chunks=chunks,
        num_microbatches=len(lengths),
        forward_only=not backward,
    )
    engine.run(actions[rank], runner, signatures=lengths, backward=backward)
    return runner


def compare(rank, runner, expected, lengths):
    grads, first_grad, losses = expected
    for stage, module in runner.stages.items():
        for name, parameter in module.named_parameters():
            want = grads[stage][name]
            if want is None:
                assert parameter.grad is None
            else:
                torch.testing.assert_close(parameter.grad, want, rtol=1e-6, atol=1e-6)
    if 0 in runner.stages:
        torch.testing.assert_close(runner.first.weight.grad, first_grad, rtol=1e-6, atol=1e-6)
    if len(grads) - 1 in runner.stages:
        assert [runner.losses[m] for m in range(len(lengths))] == pytest.approx(losses, rel=1e-6)


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


class MixedRunner:
    """Sends many tensors of odd dtypes and shapes, and checks them at the other end."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.weight = nn.Parameter(torch.full((3,), 2.0, dtype=torch.bfloat16, device=here()))

    def tensors(self) -> tuple[Tensor, ...]:
        tensors = (
            torch.arange(6).view(2, 3).t(),  # not contiguous
            torch.tensor([True, False, True]),
            torch.tensor(3.5, dtype=torch.float64),  # no dims
            torch.empty(0, 4),
            torch.arange(5, dtype=torch.int16),
            torch.tensor([1 + 2j, 3 - 1j]),
            torch.linspace(-2, 2, 7).to(torch.float8_e4m3fn),
            *(torch.full((1,) * i, float(i)) for i in range(1, 6)),
        )
        return tuple(tensor.to(here()) for tensor in tensors)

    def forward(self, micro_batch, chunk, received):
        if self.rank == 0:
            x = self.weight * (micro_batch + 1)
            return (*self.tensors(), x, x.float().sum(), x)
        *plain, x, total, again = received
        for got, want in zip(plain, self.tensors(), strict=True):
            assert got.dtype is want.dtype
            assert got.shape == want.shape
            assert torch.equal(
                got.view(-1).to(torch.complex64), want.reshape(-1).to(torch.complex64)
            )
            assert not got.requires_grad
        assert x.requires_grad
        assert total.requires_grad
        return (x.float() * again.float()).sum()  # total is not used: its gradient is zero


def check_mixed(rank, world_size):
    engine = PipelineEngine(axis_of(rank, world_size), 1, here())
    runner = MixedRunner(rank)
    actions = build_schedule("1f1b", pipeline_size=2, num_microbatches=3)[rank]
    for _ in range(2):
        engine.run(actions, runner, signatures=["same"] * 3, backward=True)
    if rank == 0:  # d/dw of sum over m of (w (m+1))^2 = 2 w 14, two runs
        assert torch.equal(runner.weight.grad, torch.full_like(runner.weight, 2 * 4.0 * 14))


def test_tuples_of_any_dtype_and_shape():
    run_ranks(check_mixed, 2)


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


class MemoryRunner:
    """Counts how many outputs have memory. The stage ends in an add, which saves nothing."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.bias = nn.Parameter(torch.zeros(16))
        self.storages: list[StorageWeakRef] = []
        self.peak = 0

    def forward(self, micro_batch, chunk, received):
        self.peak = max(self.peak, sum(not storage.expired() for storage in self.storages))
        x = torch.ones(16) if received is None else received[0]
        output = x + self.bias
        if self.rank == 1:
            return output.sum()
        self.storages.append(StorageWeakRef(output.untyped_storage()))
        return output


def check_memory(rank, world_size):
    """All forwards come first, yet few outputs stay: only those that may not have left."""
    engine = PipelineEngine(axis_of(rank, world_size), 1, here())
    runner = MemoryRunner(rank)
    actions = build_schedule("gpipe", pipeline_size=2, num_microbatches=32)[rank]
    engine.run(actions, runner, signatures=[0] * 32, backward=True)
    assert torch.equal(runner.bias.grad, torch.full((16,), 32.0))
    return runner.peak


def test_sent_outputs_are_freed():
    assert 1 <= run_ranks(check_memory, 2)[0] <= StageMessages.max_sends_under_way + 1


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


def check_changed_output(rank, world_size):
    engine = PipelineEngine(axis_of(rank, world_size), 1, here())
    engine_run(rank, world_size, engine, "1f1b", 1, [4])
    runner = Runner({rank: Stage(rank)}, engine.placement, rank, [5])
    actions = build_schedule("1f1b", pipeline_size=2, num_microbatches=1)[rank]
    engine.run(actions, runner, signatures=[4], backward=True)


def test_another_shape_for_the_same_signature_is_an_error():
    with pytest.raises(RankError, match="earlier one of the same signature 4"):
        run_ranks(check_changed_output, 2, timeout=20)


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
    run_ranks(check_mixed, 2, backend="nccl")
