"""Products that hide the collectives of a split sequence: same values as one after the other."""

import functools
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from megatron_lightning.config.plan import Gradient, ParallelPlan, column, follows, replicated, row
from megatron_lightning.layers.linear import Linear
from megatron_lightning.parallel.axes import MeshAxis
from megatron_lightning.parallel.column import ColumnInput
from megatron_lightning.parallel.main_gradient import announce
from megatron_lightning.parallel.materialise import materialise
from megatron_lightning.parallel.mesh import ParallelMesh
from megatron_lightning.parallel.overlap.choice import choose_overlap
from megatron_lightning.parallel.overlap.layers import Overlap
from megatron_lightning.parallel.overlap.whole import Collectives
from megatron_lightning.parallel.peers import memory as peer_memory
from megatron_lightning.parallel.peers.exchange import MessageExchange
from megatron_lightning.parallel.random import Normal
from megatron_lightning.parallel.row import RowOutput
from megatron_lightning.parallel.tensor import apply_tensor_parallel
from tests.harness import run_ranks

PLAN = ParallelPlan(
    splits={
        "first.weight": column(),
        "first.bias": follows(),
        "second.weight": row(),
        "second.bias": replicated(Gradient.SEQUENCE),
    }
)


class Pair(nn.Module):
    """A column-split and a row-split layer, as in an MLP."""

    def __init__(self, kind: Callable[[int, int], nn.Module]) -> None:
        super().__init__()
        self.first, self.second = kind(6, 16), kind(16, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.tanh(self.first(x)))


def _own(fan_in: int, fan_out: int) -> nn.Module:
    return Linear(fan_in, fan_out, bias=True, initial=Normal(1.0), device="meta")


def _torch(fan_in: int, fan_out: int) -> nn.Module:
    return nn.Linear(fan_in, fan_out, device="meta")


def _pair(axis: MeshAxis, kind: Callable[[int, int], nn.Module], overlap: Overlap | None) -> Pair:
    pair = Pair(kind)
    table = apply_tensor_parallel(
        pair, PLAN, axis, sequence_parallel=axis.size > 1, overlap=overlap
    )
    materialise(pair, table, seed=0, device="cpu")
    return pair


def _axis(size: int) -> MeshAxis:
    return ParallelMesh.build(device=torch.device("cpu"), tensor=size).tp


def _overlap(axis: MeshAxis, by_parts: bool = True) -> Overlap:
    return Overlap.of(MessageExchange(axis) if by_parts else Collectives(axis))


def _input() -> Tensor:
    return torch.randn(8, 3, 6, generator=torch.Generator().manual_seed(0))


def _part(axis: MeshAxis) -> Tensor:
    return _input().chunk(axis.size)[axis.rank].clone().requires_grad_()


def _gradients(pair: Pair, x: Tensor, frozen: tuple[str, ...]) -> tuple[Tensor, list[Tensor]]:
    wanted = {"x": x, **dict(pair.named_parameters())}
    for name, tensor in wanted.items():
        tensor.requires_grad_(name not in frozen)
    y = pair(x)
    found = torch.autograd.grad(
        y.square().sum(), [tensor for tensor in wanted.values() if tensor.requires_grad]
    )
    return y, [y, *found]


def _same(rank: int, size: int, kind: Any, frozen: tuple[str, ...], by_parts: bool = True) -> None:
    axis = _axis(size)
    overlapped, plain = _pair(axis, kind, _overlap(axis, by_parts)), _pair(axis, kind, None)
    overlapped.load_state_dict(plain.state_dict())
    assert isinstance(overlapped.second.after, RowOutput)
    y, got = _gradients(overlapped, _part(axis), frozen)
    _, want = _gradients(plain, _part(axis), frozen)
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)
    whole = Pair(kind)
    materialise(
        whole, apply_tensor_parallel(whole, PLAN, MeshAxis(name="tp")), seed=0, device="cpu"
    )
    torch.testing.assert_close(y, whole(_input()).chunk(size)[rank], rtol=1e-4, atol=1e-4)


FROZEN = [(), ("x",), ("first.weight",), ("second.weight", "first.bias"), ("x", "first.weight")]


@pytest.mark.parametrize("by_parts", [True, False])
@pytest.mark.parametrize("frozen", FROZEN)
def test_two_ranks_give_what_the_plain_form_and_one_process_give(
    frozen: tuple[str, ...], by_parts: bool
) -> None:
    run_ranks(_same, 2, _own, frozen, by_parts)


@pytest.mark.parametrize("kind", [_own, _torch])
def test_four_ranks(kind: Callable[[int, int], nn.Module]) -> None:
    run_ranks(_same, 4, kind, ())


def _kept(rank: int, size: int, by_parts: bool) -> None:
    axis = _axis(size)
    pair, x = _pair(axis, _own, _overlap(axis, by_parts)), _part(axis)
    kept: list[int] = []
    with torch.autograd.graph.saved_tensors_hooks(
        lambda t: kept.append(t.numel()) or t, lambda t: t
    ):
        y = pair.first(x)
    assert y.shape == (8, 3, 8)
    assert sorted(kept) == [pair.first.weight.numel(), x.numel()]


@pytest.mark.parametrize("by_parts", [True, False])
def test_only_the_own_part_of_the_sequence_is_kept(by_parts: bool) -> None:
    run_ranks(_kept, 2, by_parts)


class Sum:
    """The sum of one weight's gradients."""

    put_off = None

    def __init__(self, weight: nn.Parameter) -> None:
        self.parameter = weight
        self.total = torch.zeros_like(weight)

    def add_product(self, grad: Tensor, x: Tensor) -> None:
        self.total += grad.flatten(0, -2).t() @ x.flatten(0, -2)


def _sums(rank: int, size: int, compiled: bool, by_parts: bool) -> None:
    """Weight gradients go to their sums; in a compiled region too, without a graph break."""
    axis = _axis(size)
    pair, plain = _pair(axis, _own, _overlap(axis, by_parts)), _pair(axis, _own, None)
    sums = [Sum(layer.weight) for layer in (pair.first, pair.second)]
    for one, layer in zip(sums, (pair.first, pair.second), strict=True):
        announce(one)
        layer.sums_weight_gradient = True
    run = torch.compile(pair, fullgraph=True, backend="inductor") if compiled else pair
    for _ in range(2):
        x, again = _part(axis), _part(axis)
        run(x).square().sum().backward()
        plain(again).square().sum().backward()
        torch.testing.assert_close(x.grad, again.grad, rtol=1e-5, atol=1e-5)
    for one, layer, expected in zip(
        sums, (pair.first, pair.second), (plain.first, plain.second), strict=True
    ):
        assert layer.weight.grad is None
        torch.testing.assert_close(one.total, expected.weight.grad, rtol=1e-5, atol=1e-4)
        torch.testing.assert_close(layer.bias.grad, expected.bias.grad, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("by_parts", [True, False])
def test_weight_gradients_go_to_their_sums(by_parts: bool) -> None:
    run_ranks(_sums, 2, False, by_parts)


@pytest.mark.slow
@pytest.mark.parametrize("by_parts", [True, False])
def test_one_compiled_graph(by_parts: bool) -> None:
    run_ranks(_sums, 2, True, by_parts, timeout=180)


def _compiled_apart(rank: int, size: int, frozen: tuple[str, ...]) -> None:
    axis = _axis(size)
    pair, plain = _pair(axis, _own, _overlap(axis)), _pair(axis, _own, None)
    _, want = _gradients(plain, _part(axis), frozen)
    pair.compile(fullgraph=True, backend="aot_eager")
    _, got = _gradients(pair, _part(axis), frozen)
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("frozen", [(), ("x",), ("first.weight",)])
def test_compiled_gives_autograd_the_gradients(frozen: tuple[str, ...]) -> None:
    run_ranks(_compiled_apart, 2, frozen, timeout=180)


def _fallbacks(rank: int, size: int) -> None:
    """Autocast and a part that is too small take other ways; recomputation gives the same."""
    axis = _axis(size)
    exchange = MessageExchange(axis)
    pair = _pair(axis, _own, Overlap.of(exchange))
    x = _part(axis)
    (want,) = torch.autograd.grad(pair(x).sum(), x)
    (again,) = torch.autograd.grad(checkpoint(pair, x, use_reentrant=False).sum(), x)
    assert torch.equal(again, want)
    with torch.autocast("cpu", torch.bfloat16):
        y = pair(x)
    (half,) = torch.autograd.grad(y.float().sum(), x)
    torch.testing.assert_close(half, want, rtol=0.1, atol=0.3)
    small = Overlap.of(exchange, least_bytes=1 << 20)
    assert isinstance(pair.first.before, ColumnInput)
    assert small.way(1 << 17, x.dtype).endswith("collectives")
    assert small.way(1 << 20, x.dtype).endswith("messages")
    assert small.gathers(x, -x.dim())
    assert not small.gathers(x, 1)
    assert not small.scatters(x[1:], 0)


def test_what_takes_the_plain_way() -> None:
    run_ranks(_fallbacks, 2)


def _choices(rank: int, size: int) -> None:
    """What is chosen, and that memory is tried once, not again for each chunk of layers."""
    axis, cpu, gpu = _axis(size), torch.device("cpu"), torch.device("cuda", 0)
    choose = functools.partial(choose_overlap, axis, timeout_seconds=1.0)
    plain = choose(cpu, wanted=False)
    messages = choose(cpu, wanted=True)
    assert plain is not None
    assert messages is not None
    assert plain.exchange.kind == "collectives"
    assert messages.exchange.kind == "messages"
    assert choose(cpu, wanted=False).exchange is plain.exchange
    del messages
    tried: list[MeshAxis] = []

    def fail(axis: MeshAxis, *_: Any) -> tuple[None, str]:
        tried.append(axis)
        return None, "no way"

    with patch.object(peer_memory, "_try", fail):
        first, second = choose(gpu, wanted=None), choose(gpu, wanted=None)
    assert first is not None
    assert second is not None
    assert first.exchange is second.exchange
    assert first.exchange is plain.exchange
    assert tried == [axis]


def test_what_is_chosen() -> None:
    run_ranks(_choices, 2)


def test_forbidden_access_between_gpus_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCL_P2P_DISABLE", "1")
    monkeypatch.setattr(peer_memory.dist, "all_gather_object", lambda *_, **__: None)
    reason = peer_memory._why_not(MeshAxis(name="tp", size=2), torch.device("cuda", 0))
    assert reason is not None
    assert "NCCL_P2P_DISABLE" in reason
