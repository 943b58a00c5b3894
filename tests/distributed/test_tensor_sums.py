"""Layers split over tensor ranks that all hold the whole sequence: one operation each with their
sums, the same numbers as with sums apart, and one compiled graph.
"""

import dataclasses
import functools
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch._dynamo.testing
from torch import Tensor, nn

from megatron_lightning.config import (
    GPTConfig,
    LatentAttentionConfig,
    RecomputeConfig,
    RuntimeConfig,
)
from megatron_lightning.layers.mlp import MLP
from megatron_lightning.layers.torch_backend import TorchBackend
from megatron_lightning.parallel.axes import MeshAxis
from megatron_lightning.parallel.collectives import begin_all_reduce_
from megatron_lightning.parallel.main_gradient import announce
from megatron_lightning.parallel.materialise import materialise
from megatron_lightning.parallel.mesh import ParallelMesh
from megatron_lightning.parallel.overlap import whole as whole_products
from megatron_lightning.parallel.overlap.layers import Overlap
from megatron_lightning.parallel.overlap.whole import Collectives
from megatron_lightning.parallel.peers.exchange import MessageExchange
from megatron_lightning.parallel.row import RowOutput
from megatron_lightning.parallel.tensor import apply_tensor_parallel
from tests.distributed.test_gated_overlap import GATED, Sum
from tests.distributed.test_moe_compiled import counted
from tests.distributed.test_tensor_overlap import PLAN, Pair, _axis, _own, _torch
from tests.harness import run_ranks, run_ranks_fresh
from tests.layout_runs import Run, assert_same_training, tiny_config, train


def pair_of(
    axis: MeshAxis, kind: Any, *, fused: bool = True, dtype: torch.dtype = torch.float32
) -> Pair:
    pair = Pair(kind)
    overlap = Overlap.of(Collectives(axis)) if fused else None
    table = apply_tensor_parallel(pair, PLAN, axis, overlap=overlap)
    materialise(pair, table, seed=0, device="cpu", dtype=dtype)
    return pair


def some_input(dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(8, 3, 6, generator=torch.Generator().manual_seed(0)).to(dtype)


def gradients(network: nn.Module, x: Tensor, frozen: tuple[str, ...] = ()) -> list[Tensor]:
    """The output, and what autograd is given for what is not frozen."""
    wanted = {"x": x, **dict(network.named_parameters())}
    for name, tensor in wanted.items():
        tensor.requires_grad_(name not in frozen)
    y = network(x)
    trained = [tensor for tensor in wanted.values() if tensor.requires_grad]
    return [y, *torch.autograd.grad(y.float().square().sum(), trained)]


def _same(rank: int, size: int, kind: Any, frozen: tuple[str, ...]) -> None:
    axis = _axis(size)
    fused, apart = pair_of(axis, kind), pair_of(axis, kind, fused=False)
    fused.load_state_dict(apart.state_dict())
    assert isinstance(fused.second.after, RowOutput)
    got = gradients(fused, some_input(), frozen)
    for a, b in zip(got, gradients(apart, some_input(), frozen), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)
    alone = Pair(kind)
    table = apply_tensor_parallel(alone, PLAN, MeshAxis(name="tp"))
    materialise(alone, table, seed=0, device="cpu")
    torch.testing.assert_close(got[0], alone(some_input()), rtol=1e-4, atol=1e-4)


FROZEN = [(), ("x",), ("first.weight",), ("second.weight", "first.bias"), ("x", "first.weight")]


@pytest.mark.parametrize("frozen", FROZEN)
@pytest.mark.parametrize("kind", [_own, _torch])
def test_with_their_sums_layers_give_what_they_give_apart(
    kind: Any, frozen: tuple[str, ...]
) -> None:
    run_ranks(_same, 2, kind, frozen)


class InPlace(Pair):
    """Writes to what its layers give."""

    def forward(self, x: Tensor) -> Tensor:
        y = self.second(self.first(x).relu_())
        y += 1
        return y


class Apart(Pair):
    """The same, without."""

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x).relu()) + 1


def _written(rank: int, size: int, way: str, sequence_parallel: bool) -> None:
    axis = _axis(size)
    results = []
    for kind in (Apart, InPlace):
        pair = kind(functools.partial(nn.Linear, bias=False, device="meta"))
        way_of = MessageExchange if way == "messages" else Collectives
        table = apply_tensor_parallel(
            pair,
            PLAN,
            axis,
            sequence_parallel=sequence_parallel,
            overlap=Overlap.of(way_of(axis)),
        )
        materialise(pair, table, seed=0, device="cpu")
        x = some_input().chunk(size)[rank].clone() if sequence_parallel else some_input()
        results.append(gradients(pair, x))
    for want, got in zip(*results, strict=True):
        assert torch.equal(want, got)


@pytest.mark.parametrize(
    ("way", "sequence_parallel"),
    [("collectives", False), ("collectives", True), ("messages", True)],
)
def test_what_layers_give_may_be_written_to(way: str, sequence_parallel: bool) -> None:
    run_ranks(_written, 2, way, sequence_parallel)


def _kept(rank: int, size: int) -> None:
    pair = pair_of(_axis(size), _own)
    pair.second.weight.requires_grad_(False)
    kept: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        pair.second(torch.ones(8, 3, 8, requires_grad=True))
    assert [t.shape for t in kept] == [pair.second.weight.shape]


def test_the_input_of_a_frozen_weight_is_not_kept() -> None:
    run_ranks(_kept, 2)


def _order(rank: int, size: int, compiled: bool) -> list[str]:
    """What is done in a backward pass, one after the other."""
    pair = pair_of(_axis(size), _own)
    done: list[str] = []

    class Noting(Sum):
        def add_product(self, grad: Tensor, x: Tensor) -> None:
            done.append("weight")
            super().add_product(grad, x)

    def begin(x: Tensor, axis: MeshAxis) -> Any:
        done.append("sum begins")
        finish = begin_all_reduce_(x, axis)

        def ends() -> Tensor:
            done.append("sum ends")
            return finish()

        return ends

    layers: list[Any] = [pair.first, pair.second]
    sums: list[Any] = [Noting(layer.weight) for layer in layers]
    for one, layer in zip(sums, layers, strict=True):
        announce(one)
        layer.sums_weight_gradient = True
    if compiled:
        torch._dynamo.reset()
        pair.compile(fullgraph=True, backend="aot_eager")
    with patch.object(whole_products, "begin_all_reduce_", begin):
        pair(some_input().requires_grad_()).square().sum().backward()
    return done


@pytest.mark.parametrize("compiled", [False, True])
def test_the_sum_of_an_inputs_gradient_runs_beside_the_weights_product(compiled: bool) -> None:
    first, second = ["sum begins", "weight", "sum ends"], ["weight"]
    assert run_ranks(_order, 2, compiled, timeout=180) == [second + first] * 2


def _compiled(
    rank: int, size: int, dtype: torch.dtype, frozen: tuple[str, ...], sums: bool
) -> tuple[int, int]:
    """Graphs and breaks of two windows of two micro-batches, the second in steady state."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    axis = _axis(size)
    results: list[list[Tensor]] = []
    for compiled in (False, True):
        pair = pair_of(axis, _own, dtype=dtype)
        layers: list[Any] = [pair.first, pair.second] if sums else []
        totals: list[Any] = [Sum(layer.weight) for layer in layers]
        for one, layer in zip(totals, layers, strict=True):
            announce(one)
            layer.sums_weight_gradient = True
        for name, parameter in pair.named_parameters():
            parameter.requires_grad_(name not in frozen)
        if compiled:
            pair.compile(backend=counter)
        found: list[Tensor] = []
        for step in range(4):
            x = (some_input(dtype) + step).requires_grad_("x" not in frozen)
            with torch._dynamo.config.patch(error_on_recompile=step > 0):
                y = pair(x)
                y.float().square().sum().backward()
            found += [y.detach()] if x.grad is None else [y.detach(), x.grad]
        # a region gives autograd what no result of an operation goes with
        totals_of = {one.parameter: one.total for one in totals}
        for parameter in pair.parameters():
            parts = (parameter.grad, totals_of.get(parameter))
            found += [sum(part for part in parts if part is not None) + torch.zeros(())]
        results.append(found)
    for want, got in zip(*results, strict=True):
        assert torch.equal(want, got)
    return counter.frame_count, sum(torch._dynamo.utils.counters["graph_break"].values())


@pytest.mark.parametrize(
    ("dtype", "frozen", "sums"),
    [
        (torch.float32, (), True),
        (torch.bfloat16, (), False),
        pytest.param(torch.bfloat16, (), True, marks=pytest.mark.slow),
        pytest.param(torch.float32, (), False, marks=pytest.mark.slow),
        pytest.param(torch.float32, ("x",), True, marks=pytest.mark.slow),
        pytest.param(torch.float32, ("second.weight",), True, marks=pytest.mark.slow),
        pytest.param(torch.float32, ("x", "first.weight"), False, marks=pytest.mark.slow),
    ],
)
def test_compiled_layers_are_one_graph_and_bitwise_the_eager_ones(
    dtype: torch.dtype, frozen: tuple[str, ...], sums: bool
) -> None:
    assert run_ranks(_compiled, 2, dtype, frozen, sums, timeout=180) == [(1, 0)] * 2


def _gated(rank: int, size: int, compiled: bool, sums: bool) -> None:
    """A second layer that makes its input again gives what one that keeps it does."""
    axis = ParallelMesh.build(device=torch.device("cpu"), tensor=size).tp
    overlap = Overlap.of(Collectives(axis))
    config = GPTConfig(
        vocab_size=8, num_layers=1, hidden_size=6, num_attention_heads=1, ffn_hidden_size=16
    )
    results: list[list[Tensor | None]] = []
    for recomputed in (False, True):
        mlp = MLP(config, TorchBackend(), device="meta")
        table = apply_tensor_parallel(mlp, GATED, axis, overlap=overlap)
        materialise(mlp, table, seed=0, device="cpu")
        mlp.activation.recomputed = recomputed
        layers: list[Any] = [mlp.linear_fc1, mlp.linear_fc2] if sums else []
        totals: list[Any] = [Sum(layer.weight) for layer in layers]
        for one, layer in zip(totals, layers, strict=True):
            announce(one)
            layer.sums_weight_gradient = True
        x = some_input().requires_grad_()
        if compiled:
            torch._dynamo.reset()
            mlp.compile(fullgraph=True, backend="aot_eager")
        y = mlp(x)
        y.square().sum().backward()
        found = [y, x.grad, *(p.grad for p in mlp.parameters()), *(one.total for one in totals)]
        results.append(found)
    for want, got in zip(*results, strict=True):
        assert (want is None) == (got is None)
        assert want is None or torch.equal(want, got)


@pytest.mark.parametrize(
    ("compiled", "sums"), [(False, False), (True, True)], ids=["eager", "compiled"]
)
def test_a_recomputed_product_takes_the_same_sum(compiled: bool, sums: bool) -> None:
    run_ranks(_gated, 2, compiled, sums, timeout=180)


LATENT = LatentAttentionConfig(
    kv_lora_rank=24, q_lora_rank=32, qk_head_dim=16, qk_pos_emb_head_dim=8, v_head_dim=20
)


def assert_compiled_trains_alike(run: Run) -> None:
    """One graph each for training and evaluation, in every step."""
    alone = run_ranks_fresh(train, 1, dataclasses.replace(run, layout={}))[0]
    ranks = run_ranks_fresh(counted, 2, run, timeout=280)
    assert_same_training(ranks, alone)
    assert [rank["graphs"] for rank in ranks] == [[2] * run.steps] * 2


@pytest.mark.slow
@pytest.mark.parametrize("recompute", ["none", "full"])
def test_a_compiled_network_trains_as_one_process(recompute: Any) -> None:
    layout: dict[str, Any] = dict(
        tensor_parallel_size=2,
        micro_batch_size=2,
        runtime=RuntimeConfig(compile_layers=True),
        recompute=RecomputeConfig(mode=recompute),
    )
    config = tiny_config(num_query_groups=4, add_bias_linear=True, gated_linear_unit=False)
    run = Run(config=config, layout=layout, steps=3, keep_gradients=(0, 2))
    assert_compiled_trains_alike(run)


@pytest.mark.slow
def test_a_compiled_network_with_collectives_apart_trains_as_one_process() -> None:
    layout: dict[str, Any] = dict(
        tensor_parallel_size=2,
        sequence_parallel=True,
        micro_batch_size=2,
        runtime=RuntimeConfig(compile_layers=True),
    )
    config = tiny_config(latent_attention=LATENT, num_query_groups=0)
    assert_compiled_trains_alike(Run(config=config, layout=layout, steps=3, keep_gradients=(0, 2)))
