"""Compiled code that is told to keep its buffers writes to none that an operation holds on to."""

from collections.abc import Callable, Collection

import pytest
import torch
from torch import Tensor

from megatron_lightning.config import DataParallelConfig, PipelineConfig, RuntimeConfig
from megatron_lightning.config.parallel import ParallelConfig
from megatron_lightning.config.plan import ParallelPlan
from megatron_lightning.layers.block import TransformerLayer
from megatron_lightning.layers.linear import Linear
from megatron_lightning.layers.torch_backend import TorchBackend
from megatron_lightning.parallel.axes import LanedAxis, MeshAxis
from megatron_lightning.parallel.kept_buffers import (
    can_keep_buffers,
    compile_options,
    keeps_buffers,
    puts_off_in_regions,
)
from megatron_lightning.parallel.lanes import Lanes
from tests.layout_runs import tiny_config

held: list[tuple[Tensor, Tensor]] = []


@torch.library.custom_op("megatron_lightning_tests::hold", mutates_args=())
def hold(x: Tensor) -> Tensor:
    """Keeps what it is given, as a queue of weight gradients does, and a copy of it."""
    held.append((x, x.clone()))
    return x.new_ones(1)


@hold.register_fake
def _(x: Tensor) -> Tensor:
    return x.new_empty(1)


def in_place(a: Tensor) -> Tensor:
    """By default `sin` is written over what is held."""
    b = a @ a
    token = hold(b)
    return (b.sin() + a) @ a * token


def other_result(a: Tensor) -> Tensor:
    """By default the last product but one takes the memory of what is held."""
    b = (a @ a).sin()
    c = (a + hold(b)).cos()
    return (c @ a @ a).sin()


def made_in_place(a: Tensor) -> Tensor:
    """By default the compiler writes the rows into what is held."""
    b = (a @ a).sin()
    rows = torch.arange(2, device=a.device)
    return torch.index_put(b, (rows,), hold(b)) @ a


@pytest.mark.slow
@pytest.mark.parametrize("function", [in_place, other_result, made_in_place])
def test_nothing_is_written_to_what_is_held(function: Callable[[Tensor], Tensor]) -> None:
    assert can_keep_buffers(), "this torch has other switches: layers stay outside of regions"
    torch._dynamo.reset()
    held.clear()
    a = torch.randn(32, 32, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        torch.compile(function, **compile_options(keeps_buffers=True))(a)
    ((got, want),) = held
    assert torch.equal(got, want)
    torch._dynamo.reset()


def test_where_weight_gradients_are_put_off_in_regions() -> None:
    plan, alone, two = ParallelPlan(), MeshAxis(name="tp"), MeshAxis(name="tp", size=2)
    config = ParallelConfig(
        pipeline_parallel_size=2,
        pipeline=PipelineConfig(schedule="zb-h1"),
        runtime=RuntimeConfig(compile_layers=True),
    )

    def put_off(axis: MeshAxis, **changes: object) -> bool:
        values = {name: getattr(config, name) for name in config.__dataclass_fields__}
        return puts_off_in_regions(plan, axis, ParallelConfig(**{**values, **changes}))

    assert put_off(alone)
    assert put_off(two, sequence_parallel=True)
    assert put_off(two)
    lanes = Lanes(torch.device("cpu"))
    assert not put_off(LanedAxis(name="tp", size=2, group=None, second=None, lanes=lanes))
    assert not put_off(alone, pipeline=PipelineConfig(schedule="1f1b"))
    assert not put_off(alone, runtime=RuntimeConfig())
    assert not put_off(alone, data_parallel=DataParallelConfig(fuse_weight_gradients=False))


def test_layers_that_put_nothing_off_keep_no_buffers() -> None:
    """In low precision weight gradients are made at once, so a layer with no other linear has
    nothing to keep.
    """
    plan = ParallelPlan(layers="layers")
    with torch.device("meta"):
        layer = TransformerLayer(tiny_config(), 0, TorchBackend())
    linears = [name for name, module in layer.named_modules() if isinstance(module, Linear)]
    assert len(linears) == 4
    everywhere = [f"layers.1.{name}" for name in linears]

    def keeps(path: str, quantized: Collection[str]) -> bool:
        return keeps_buffers(path, layer, plan=plan, quantized=quantized)

    assert not keeps("layers.1", everywhere)
    assert keeps("layers.1", everywhere[1:])
    assert keeps("layers.0", everywhere)
    assert not keeps("further.0", [])  # compiled too, but their linears stay outside of regions
    assert not keeps_buffers("layers.1", layer, plan=ParallelPlan(), quantized=[])
