"""An MLP whose product is computed again moves its sums as one that keeps it does."""

from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from megatron_lightning.config import GPTConfig
from megatron_lightning.config.plan import Gradient, ParallelPlan, column, follows, replicated, row
from megatron_lightning.layers.mlp import MLP
from megatron_lightning.layers.torch_backend import TorchBackend
from megatron_lightning.parallel.axes import MeshAxis
from megatron_lightning.parallel.main_gradient import announce
from megatron_lightning.parallel.materialise import materialise
from megatron_lightning.parallel.mesh import ParallelMesh
from megatron_lightning.parallel.overlap import by_parts as overlapped
from megatron_lightning.parallel.overlap import whole as whole_products
from megatron_lightning.parallel.overlap.layers import Overlap
from megatron_lightning.parallel.overlap.whole import Collectives
from megatron_lightning.parallel.peers.exchange import MessageExchange
from megatron_lightning.parallel.tensor import apply_tensor_parallel
from tests.harness import run_ranks

GATED = ParallelPlan(
    splits={
        "linear_fc1.weight": column(1),
        "linear_fc1.bias": follows(1),
        "linear_fc2.weight": row(),
        "linear_fc2.bias": replicated(Gradient.SEQUENCE),
    }
)


class Sum:
    """The sum of one weight's gradients."""

    put_off = None

    def __init__(self, weight: torch.nn.Parameter) -> None:
        self.parameter = weight
        self.total = torch.zeros_like(weight)

    def add_product(self, grad: Tensor, x: Tensor) -> None:
        self.total += (grad.flatten(0, -2).t() @ x.flatten(0, -2)).view_as(self.total)


def _gated(axis: MeshAxis, overlap: Overlap) -> MLP:
    config = GPTConfig(
        vocab_size=8,
        num_layers=1,
        hidden_size=6,
        num_attention_heads=1,
        ffn_hidden_size=16,
        add_bias_linear=True,
        init_method_std=1.0,
    )
    mlp = MLP(config, TorchBackend(), device="meta")
    table = apply_tensor_parallel(mlp, GATED, axis, sequence_parallel=True, overlap=overlap)
    materialise(mlp, table, seed=0, device="cpu")
    return mlp


def _recomputed(
    rank: int, size: int, frozen: tuple[str, ...], by_parts: bool, sums: bool, compiled: bool
) -> None:
    axis = ParallelMesh.build(device=torch.device("cpu"), tensor=size).tp
    exchange = MessageExchange(axis) if by_parts else Collectives(axis)
    results, turns = [], []
    for recomputed in (False, True):
        mlp = _gated(axis, Overlap.of(exchange))
        mlp.activation.recomputed = recomputed
        layers: list[Any] = [mlp.linear_fc1, mlp.linear_fc2] if sums else []
        totals: list[Any] = [Sum(layer.weight) for layer in layers]
        for one, layer in zip(totals, layers, strict=True):
            announce(one)
            layer.sums_weight_gradient = True
        for name, parameter in mlp.named_parameters():
            parameter.requires_grad_(name not in frozen)
        x = torch.randn(8, 3, 6, generator=torch.Generator().manual_seed(0)).chunk(size)[rank]
        x = x.clone().requires_grad_("x" not in frozen)
        kept: list[torch.Size] = []
        if compiled:
            mlp.compile(fullgraph=True, backend="aot_eager")
        with (
            patch.object(overlapped, "product_scatter", wraps=overlapped.product_scatter) as part,
            patch.object(
                whole_products, "product_scatter", wraps=whole_products.product_scatter
            ) as whole,
            torch.autograd.graph.saved_tensors_hooks(
                lambda t, kept=kept: kept.append(t.shape) or t, lambda t: t
            ),
        ):
            y = mlp(x)
        assert compiled or (torch.Size([8, 3, 8]) in kept) != recomputed
        turns.append((part.call_count, whole.call_count))
        y.square().sum().backward()
        found = [y, x.grad, *(p.grad for p in mlp.parameters()), *(one.total for one in totals)]
        results.append(found)
    assert turns == [(1, 0) if by_parts else (0, 1)] * 2
    for want, got in zip(*results, strict=True):
        assert (want is None) == (got is None)
        assert want is None or torch.equal(want, got)


@pytest.mark.parametrize("sums", [False, True])
@pytest.mark.parametrize("by_parts", [True, False])
def test_a_recomputed_product_moves_its_sums_alike(by_parts: bool, sums: bool) -> None:
    run_ranks(_recomputed, 2, (), by_parts, sums, False)


@pytest.mark.parametrize(
    "frozen", [("linear_fc2.weight",), ("x", "linear_fc1.weight", "linear_fc1.bias")]
)
def test_a_recomputed_product_beside_what_is_frozen(frozen: tuple[str, ...]) -> None:
    run_ranks(_recomputed, 2, frozen, True, False, False)


@pytest.mark.slow
@pytest.mark.parametrize("sums", [False, True])
@pytest.mark.parametrize("by_parts", [True, False])
def test_a_recomputed_product_in_one_compiled_graph(by_parts: bool, sums: bool) -> None:
    run_ranks(_recomputed, 2, (), by_parts, sums, True, timeout=180)
