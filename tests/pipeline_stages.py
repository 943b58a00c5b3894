"""Stages for the pipeline engine, run by it on ranks and one after the other in one process."""

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatron_lightning.parallel.axes import MeshAxis
from megatron_lightning.parallel.schedules.actions import Placement
from megatron_lightning.parallel.schedules.build import build_schedule

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
