"""FP8 layers split over tensor ranks: one compiled graph, and the numbers of eager ones; by parts
on their way as messages, and by collectives. torch has the products of `_scaled_mm` on the CPU too.
"""

from typing import Any

import pytest
import torch
import torch._dynamo.testing
from torch import Tensor

from megatron_lightning.config import GPTConfig
from megatron_lightning.layers.mlp import MLP
from megatron_lightning.layers.torch_backend import TorchBackend
from megatron_lightning.parallel.axes import MeshAxis
from megatron_lightning.parallel.materialise import materialise
from megatron_lightning.parallel.mesh import ParallelMesh
from megatron_lightning.parallel.overlap.layers import Overlap
from megatron_lightning.parallel.overlap.whole import Collectives
from megatron_lightning.parallel.peers.exchange import Exchange, MessageExchange, Turn
from megatron_lightning.parallel.quantized.apply import overlap_of
from megatron_lightning.parallel.quantized.borders import one_operation
from megatron_lightning.parallel.quantized.products import QuantizedProducts
from megatron_lightning.parallel.quantized.quantization import Quantization
from megatron_lightning.parallel.tensor import apply_tensor_parallel
from megatron_lightning.precision.delayed import DelayedScaling
from megatron_lightning.precision.fp8 import FP8RowRecipe, FP8TensorRecipe
from megatron_lightning.precision.operands import Recipe
from tests.distributed.test_gated_overlap import GATED
from tests.harness import run_ranks

LAYERS = ("linear_fc1", "linear_fc2")


class Counted(MessageExchange):
    """Counts its turns."""

    turns = 0

    def begin(self, rows: int, columns: int, dtype: torch.dtype) -> Turn:
        self.turns += 1
        return super().begin(rows, columns, dtype)


def mlp_of(
    kind: str, mesh: ParallelMesh, splits: bool, overlap: Overlap
) -> tuple[MLP, Quantization]:
    """An MLP on this rank, quantized as `apply_quantization` does it, which would refuse a CPU."""
    axis, cpu = mesh.tp, torch.device("cpu")
    config = GPTConfig(
        vocab_size=8,
        num_layers=1,
        hidden_size=32,
        num_attention_heads=1,
        ffn_hidden_size=64,
        add_bias_linear=True,
        init_method_std=0.2,
    )
    mlp = MLP(config, TorchBackend(), device="meta")
    table = apply_tensor_parallel(mlp, GATED, axis, sequence_parallel=splits, overlap=overlap)
    materialise(mlp, table, seed=0, device="cpu", dtype=torch.bfloat16)
    delayed = None
    if kind == "delayed":
        delayed = DelayedScaling(LAYERS, gradient="e5m2", length=4, margin=0, device=cpu)
    quantization = Quantization(mesh, delayed)
    for name, split in zip(LAYERS, ("columns", "rows"), strict=True):
        layer: Any = mlp.get_submodule(name)
        recipe: Recipe = FP8RowRecipe("e5m2")
        if kind != "rowwise":
            recipe = FP8TensorRecipe("e5m2", None if delayed is None else delayed.recipe(name))
        layer.quantized = QuantizedProducts(
            recipe=recipe,
            split=split,
            tensor_axis=axis,
            context_axis=MeshAxis(name="cp"),
            splits_sequence=False,
            clock=quantization.clock,
            overlap=overlap_of(layer),
            in_regions=one_operation(axis, sequence_parallel=splits, sequence_dim=0),
        )
        quantization.add(layer.quantized, layer)
    return mlp, quantization


def train(
    mesh: ParallelMesh,
    kind: str,
    length: int,
    splits: bool,
    compiler: Any,
    exchange: Exchange | Collectives | None = None,
) -> list[Tensor]:
    """`splits`: each rank has a part of the sequence."""
    parts = mesh.tp.size if splits else 1
    overlap = Overlap.of(exchange or Collectives(mesh.tp))
    mlp, quantization = mlp_of(kind, mesh, splits, overlap)
    if compiler is not None:
        mlp.compile(backend=compiler, fullgraph=True)
    results: list[Tensor] = []
    generator = torch.Generator().manual_seed(0)
    for _ in range(2):
        quantization.begin_run(training=True)
        for _ in range(2):
            whole = torch.randn(length, 2, 32, generator=generator).bfloat16()
            x = whole.chunk(parts)[mesh.tp.rank % parts].clone().requires_grad_()
            y = mlp(x)
            y.float().square().sum().backward()
            assert x.grad is not None
            results += [y.detach(), x.grad]
        quantization.finish_window()
        with torch.no_grad():
            for parameter in mlp.parameters():
                assert parameter.grad is not None
                results.append(parameter.grad.clone())
                parameter -= parameter.grad.sign() * 1e-2
                parameter.grad = None
    quantization.begin_run(training=False)
    with torch.no_grad():
        results.append(mlp(torch.ones(length // parts, 2, 32).bfloat16()))
    return results


def compare(rank: int, size: int, kind: str, length: int, splits: bool) -> int:
    """Graphs of the compiled run."""
    torch._dynamo.reset()
    mesh = ParallelMesh.build(device=torch.device("cpu"), tensor=size)
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    wanted = train(mesh, kind, length, splits, None)
    for got, want in zip(train(mesh, kind, length, splits, counter), wanted, strict=True):
        assert torch.equal(got, want)
    return counter.frame_count


def compare_by_parts(rank: int, size: int, kind: str, length: int) -> tuple[int, list[int]]:
    """Graphs of the compiled run; turns of it, and of the eager one."""
    torch._dynamo.reset()
    mesh = ParallelMesh.build(device=torch.device("cpu"), tensor=size)
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    wanted, turns = train(mesh, kind, length, True, None), []
    for compiler in (counter, None):
        exchange = Counted(mesh.tp)
        got = train(mesh, kind, length, True, compiler, exchange)
        assert all(map(torch.equal, got, wanted))
        assert len(got) == len(wanted)
        turns.append(exchange.turns)
    return counter.frame_count, turns


@pytest.mark.parametrize(
    ("kind", "length", "splits"),
    [
        ("tensorwise", 16, True),  # parts of 16 rows are rounded before they are gathered
        ("rowwise", 16, True),
        ("tensorwise", 12, False),
        pytest.param("tensorwise", 12, True, marks=pytest.mark.slow),  # those of 12 rows behind it
        pytest.param("rowwise", 12, True, marks=pytest.mark.slow),
        pytest.param("rowwise", 16, False, marks=pytest.mark.slow),
        pytest.param("delayed", 16, True, marks=pytest.mark.slow),
        pytest.param("delayed", 12, True, marks=pytest.mark.slow),
        pytest.param("delayed", 16, False, marks=pytest.mark.slow),
    ],
)
def test_split_layers_are_one_graph_and_train_the_same(
    kind: str, length: int, splits: bool
) -> None:
    of_training_and_evaluation = 2
    graphs = run_ranks(compare, 2, kind, length, splits, timeout=180)
    assert graphs == [of_training_and_evaluation] * 2


@pytest.mark.parametrize(
    ("kind", "length", "turns"),
    [
        ("tensorwise", 16, 4 * 4 + 2),
        pytest.param("rowwise", 16, 4 * 4 + 2, marks=pytest.mark.slow),
        pytest.param("delayed", 16, 4 * 4 + 2, marks=pytest.mark.slow),
        # Parts of 12 rows are gathered before they are rounded, by a collective.
        pytest.param("tensorwise", 12, 4 * 3 + 1, marks=pytest.mark.slow),
        pytest.param("rowwise", 12, 4 * 3 + 1, marks=pytest.mark.slow),
    ],
)
def test_products_by_parts_give_the_same(kind: str, length: int, turns: int) -> None:
    """Of two ranks, whose partial sums are the same in either order: 4 passes and an evaluation."""
    of_training_and_evaluation = 2
    found = run_ranks(compare_by_parts, 2, kind, length, timeout=180)
    assert found == [(of_training_and_evaluation, [turns, turns])] * 2
