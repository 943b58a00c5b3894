"""The sharded optimizer on gloo ranks against the same torch optimizer on whole parameters."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import Parameter
from torch.optim import Optimizer

from megatron_lightning.config.plan import ParameterInfo, replicated
from megatron_lightning.optim.distributed import DistributedOptimizer
from megatron_lightning.optim.shards import ParameterShards
from megatron_lightning.parallel.data import GradientBuckets
from megatron_lightning.parallel.mesh import ParallelMesh
from tests.harness import run_ranks

CPU = torch.device("cpu")
SHAPES = {"a": (7, 5), "a_bias": (7,), "b": (3, 4, 5), "scalar": (), "c": (64, 3), "unused": (9,)}
STEPS = 4


def parameters(dtype: torch.dtype = torch.float32) -> dict[str, Parameter]:
    generator = torch.Generator().manual_seed(5)
    return {n: Parameter(torch.randn(s, generator=generator).to(dtype)) for n, s in SHAPES.items()}


def gradient(name: str, step: int) -> Tensor:
    """Whole numbers, so that no order of summation matters."""
    generator = torch.Generator().manual_seed(100 * step + len(name) + ord(name[0]))
    return torch.randint(-8, 9, SHAPES[name], generator=generator).float()


def table_of(named: dict[str, Parameter]) -> dict[str, ParameterInfo]:
    return {
        n: ParameterInfo(
            name=n,
            global_shape=tuple(p.shape),
            offsets=(0,) * p.dim(),
            sizes=tuple(p.shape),
            split=replicated(),
        )
        for n, p in named.items()
    }


def groups_of(named: dict[str, Parameter]) -> list[dict[str, Any]]:
    """Two groups that take turns in the flat buffer, as with and without weight decay."""
    vectors = [p for p in named.values() if p.dim() < 2]
    return [
        {"params": [p for p in named.values() if p.dim() >= 2]},
        {"params": vectors, "lr": 0.05},
    ]


MAKERS: dict[str, Callable[[list[dict[str, Any]]], Optimizer]] = {
    "sgd": lambda g: torch.optim.SGD(g, lr=0.1, momentum=0.9, weight_decay=0.01),
    "adamw": lambda g: torch.optim.AdamW(g, lr=0.1, weight_decay=0.1, amsgrad=True),
    "adam": lambda g: torch.optim.Adam(g, lr=0.1, foreach=False),
    "adagrad": lambda g: torch.optim.Adagrad(g, lr=0.1, initial_accumulator_value=0.3),
    "adadelta": lambda g: torch.optim.Adadelta(g, lr=0.1),
    "adamax": lambda g: torch.optim.Adamax(g, lr=0.1),
    "nadam": lambda g: torch.optim.NAdam(g, lr=0.1),
    "radam": lambda g: torch.optim.RAdam(g, lr=0.1),
    "rmsprop": lambda g: torch.optim.RMSprop(g, lr=0.1, momentum=0.5, centered=True),
    "rprop": lambda g: torch.optim.Rprop(g, lr=0.1),
    "asgd": lambda g: torch.optim.ASGD(g, lr=0.1),
}


class Setup:
    """Buckets, shards and optimizer of one rank."""

    def __init__(
        self,
        maker: str = "adamw",
        *,
        dtype: torch.dtype = torch.float32,
        replicas: int = 1,
        bucket_size: int = 64,
        masters: torch.dtype | None = None,
        offload: bool = False,
        moments: torch.dtype | None = None,
        device: torch.device = CPU,
    ) -> None:
        self.mesh = ParallelMesh.build(device=device, data_replicas=replicas)
        self.named = {n: Parameter(p.detach().to(device)) for n, p in parameters(dtype).items()}
        self.optimizer = MAKERS[maker](groups_of(self.named))
        self.schedule = torch.optim.lr_scheduler.StepLR(self.optimizer, 1, gamma=0.5)
        self.groups = list(self.optimizer.param_groups)
        self.buckets = GradientBuckets(
            self.named,
            table_of(self.named),
            self.mesh,
            sequence_parallel=False,
            sharded=True,
            bucket_size=bucket_size,
        )
        self.shards = ParameterShards(self.buckets, dtype=masters, offload=offload)
        self.distributed = DistributedOptimizer(
            [self.optimizer], self.shards, self.named, moments_dtype=moments
        )

    def step(self, number: int, skip: tuple[str, ...] = ("unused",)) -> None:
        """One window in which the replicas' gradients add up to `gradient`, then a step."""
        self.buckets.reset()
        self.buckets.arm()
        for name in reversed(list(self.named)):
            if name not in skip and self.named[name].requires_grad:
                part = gradient(name, number) if self.mesh.rank == 0 else torch.zeros(SHAPES[name])
                (self.named[name] * part.to(self.mesh.device)).sum().backward()
        self.buckets.finish(2.0)
        self.buckets.publish()
        assert all(p.grad is None for p in self.named.values())
        self.distributed.attach_gradients()
        self.optimizer.step()
        self.distributed.finish_step(number, wait=True)
        self.distributed.detach_gradients()
        self.schedule.step()

    def values(self) -> dict[str, Tensor]:
        return {name: p.detach().cpu().clone() for name, p in self.named.items()}


def whole_parameters(maker: str) -> dict[str, Tensor]:
    """The same steps by the optimizer as torch made it."""
    named = parameters()
    optimizer = MAKERS[maker](groups_of(named))
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    for step in range(STEPS):
        for name, parameter in named.items():
            parameter.grad = None if name == "unused" else gradient(name, step) / 2
        optimizer.step()
        schedule.step()
    return {name: p.detach() for name, p in named.items()}


def train(rank: int, world_size: int, maker: str, options: dict[str, Any]) -> dict[str, Tensor]:
    setup = Setup(maker, **options)
    for step in range(STEPS):
        setup.step(step)
    assert all(
        now is then for now, then in zip(setup.optimizer.param_groups, setup.groups, strict=True)
    )
    return setup.values()


@pytest.mark.parametrize("maker", MAKERS)
def test_any_elementwise_optimizer_gives_the_same_bits(maker: str) -> None:
    wanted = whole_parameters(maker)
    for found in run_ranks(train, 4, maker, {}):
        for name, value in wanted.items():
            assert torch.equal(found[name], value), name
    assert torch.equal(wanted["unused"], parameters()["unused"])  # no decay without a gradient


@pytest.mark.parametrize(
    "options",
    [
        dict(replicas=2),
        dict(replicas=4),
        dict(bucket_size=1),
        dict(bucket_size=10_000),
        dict(offload=True),
    ],
)
def test_partial_sharding_buckets_and_offload_give_the_same_bits(options: dict[str, Any]) -> None:
    wanted = whole_parameters("adamw")
    for found in run_ranks(train, 4, "adamw", options):
        for name, value in wanted.items():
            assert torch.equal(found[name], value), name


def _state_bytes(rank: int, world_size: int, dtype: torch.dtype, moments: bool) -> tuple[int, int]:
    """(bytes of parameters, gradients, masters and optimizer state; number of parameters)."""
    mesh = ParallelMesh.build(device=CPU)
    torch.manual_seed(0)
    layers = [nn.Linear(160, 640), nn.Linear(640, 160), nn.LayerNorm(160)]
    model = nn.Sequential(*layers).to(dtype)
    named = dict(model.named_parameters())
    optimizer = torch.optim.AdamW(model.parameters())
    low = dtype is torch.bfloat16
    buckets = GradientBuckets(
        named, table_of(named), mesh, sequence_parallel=False, sharded=True, bucket_size=100_000
    )
    shards = ParameterShards(buckets, dtype=torch.float32 if low else None)
    kept = torch.bfloat16 if moments else None
    distributed = DistributedOptimizer([optimizer], shards, named, moments_dtype=kept)
    buckets.reset()
    model(torch.ones(1, 160, dtype=dtype)).float().sum().backward()
    buckets.finish(1.0)
    distributed.attach_gradients()
    optimizer.step()
    distributed.finish_step(0, wait=True)
    optimizer.zero_grad()
    tensors = [*named.values(), *buckets.buffers, *shards.tensors, *shards.parts().values()]
    tensors += [value for state in optimizer.state.values() for value in state.values()]
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    return sum(storages.values()), sum(p.numel() for p in named.values())


@pytest.mark.parametrize("world_size", [1, 2, 4])
@pytest.mark.parametrize(
    ("dtype", "moments", "replicated_bytes", "shared_bytes"),
    [
        (torch.bfloat16, False, 6, 12),
        (torch.float32, False, 8, 8),
        (torch.bfloat16, True, 6, 8),
    ],
)
def test_model_state_takes_the_bytes_that_the_formula_says(
    world_size: int, dtype: torch.dtype, moments: bool, replicated_bytes: int, shared_bytes: int
) -> None:
    for found, count in run_ranks(_state_bytes, world_size, dtype, moments):
        wanted = (replicated_bytes + shared_bytes / world_size) * count
        assert found == pytest.approx(wanted, rel=0.02)


def _unfreeze(rank: int, world_size: int) -> dict[str, Any]:
    """`c` begins frozen and outside of the optimizer, as under Lightning's BaseFinetuning."""
    named = parameters()
    named["c"].requires_grad_(False)
    mesh = ParallelMesh.build(device=CPU)
    others = [p for name, p in named.items() if name != "c"]
    optimizer = torch.optim.SGD(others, lr=1.0, momentum=0.5)
    buckets = GradientBuckets(
        named, table_of(named), mesh, sequence_parallel=False, sharded=True, bucket_size=64
    )
    shards = ParameterShards(buckets)
    distributed = DistributedOptimizer([optimizer], shards, named)
    for step in range(4):
        if step == 1:
            named["c"].requires_grad_(True)
            optimizer.add_param_group({"params": [named["c"]]})
            assert buckets.is_stale
        if step == 3:
            named["c"].requires_grad_(False)
        if buckets.is_stale:
            buckets.rebuild()
            distributed.adopt()
        buckets.reset()
        for name, parameter in named.items():
            if parameter.requires_grad:
                (parameter * gradient(name, step)).sum().backward()
        buckets.finish(world_size)
        distributed.attach_gradients()
        optimizer.step()
        distributed.finish_step(step, wait=True)
        optimizer.zero_grad()
    return {name: p.detach().clone() for name, p in named.items()}


def test_parameters_may_be_frozen_and_unfrozen() -> None:
    named = parameters()
    optimizer = torch.optim.SGD([p for n, p in named.items() if n != "c"], lr=1.0, momentum=0.5)
    for step in range(4):
        if step == 1:
            optimizer.add_param_group({"params": [named["c"]]})
        for name, parameter in named.items():
            trained = name != "c" or step in (1, 2)
            parameter.grad = gradient(name, step) if trained else None
        optimizer.step()
    for found in run_ranks(_unfreeze, 2):
        for name, parameter in named.items():
            assert torch.equal(found[name], parameter.detach()), name


def _moments(rank: int, world_size: int, replicas: int) -> tuple[dict[str, Tensor], list[str]]:
    setup = Setup("adamw", moments=torch.bfloat16, replicas=replicas)
    for step in range(STEPS):
        setup.step(step)
        kept = {
            v.dtype
            for state in setup.optimizer.state.values()
            for v in state.values()
            if isinstance(v, Tensor) and v.dim()
        }
        assert kept == {torch.bfloat16}
    return setup.values(), sorted(setup.shards.parts())


def test_low_precision_moments_stay_near_and_equal_on_copies() -> None:
    results = run_ranks(_moments, 4, 2)
    wanted = whole_parameters("adamw")
    for found, _ in results:
        for name, value in wanted.items():
            torch.testing.assert_close(found[name], value, rtol=0.02, atol=0.02)
            assert torch.equal(found[name], results[0][0][name])
    assert results[0][1] == results[2][1]  # ranks 0 and 2 hold equal parts


def _release(rank: int, world_size: int) -> dict[str, Tensor]:
    setup = Setup("adamw")
    setup.step(0)
    values = setup.values()
    setup.shards.release()
    storages = {p.untyped_storage().data_ptr() for p in setup.named.values()}
    assert len(storages) == len(setup.named)
    assert all(torch.equal(values[name], p.detach()) for name, p in setup.named.items())
    return values


def test_released_parameters_have_memory_of_their_own() -> None:
    run_ranks(_release, 2)


class Whole(torch.optim.SGD):
    """An optimizer of the user's that nobody knows."""


def test_other_optimizers_are_refused_by_name() -> None:
    named = parameters()
    mesh = ParallelMesh.single()
    buckets = GradientBuckets(named, table_of(named), mesh, sequence_parallel=False, sharded=True)
    shards = ParameterShards(buckets)
    with pytest.raises(ValueError, match="Whole.*elementwise = True"):
        DistributedOptimizer([Whole(named.values(), lr=0.1)], shards, named)
    stranger = torch.optim.SGD([Parameter(torch.ones(3))], lr=0.1)
    with pytest.raises(ValueError, match=r"shape \(3,\) that is not one of the module's"):
        DistributedOptimizer([stranger], shards, named)
    Whole.elementwise = True  # type: ignore[attr-defined]
    DistributedOptimizer([Whole(named.values(), lr=0.1)], shards, named)


def test_masters_of_low_precision_parameters_are_exact() -> None:
    """Steps too small for bfloat16 add up in the masters."""
    setup = Setup("sgd", dtype=torch.bfloat16, masters=torch.float32)
    before = setup.shards.parts()["a"].detach().clone()
    for _ in range(3):
        setup.optimizer.zero_grad()
        for part in setup.shards.parts().values():
            part.grad = torch.full_like(part, 1e-5)
        setup.optimizer.step()
        setup.distributed.finish_step(0, wait=True)
    after = setup.shards.parts()["a"].detach()
    assert not torch.equal(before, after)
    assert torch.equal(setup.named["a"].detach().flatten(), after.bfloat16())
