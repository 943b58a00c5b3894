"""Which operands low-precision layers make, when, and what they refuse."""

import functools

import pytest
import torch
from torch import Tensor

from megatron_lightning.parallel.axes import MeshAxis
from megatron_lightning.parallel.mesh import ParallelMesh
from megatron_lightning.parallel.quantized.products import QuantizedProducts
from megatron_lightning.parallel.quantized.quantization import Quantization
from megatron_lightning.precision.operands import (
    BOTH,
    Noise,
    Pair,
    Recipe,
    Reduce,
    Role,
    Wanted,
    identity,
)
from megatron_lightning.precision.simulated import MXFP8Recipe, RowRecipe

Asked = list[tuple[str, Wanted]]


class Recording(RowRecipe):
    """Notes what is asked for."""

    def __init__(self) -> None:
        super().__init__("e5m2")
        self.asked: Asked = []

    def pair(
        self,
        x: Tensor,
        role: Role,
        *,
        over_rows: Reduce = identity,
        over_columns: Reduce = identity,
        noise: Noise | None = None,
        wanted: Wanted = BOTH,
    ) -> Pair:
        self.asked.append((role, wanted))
        return super().pair(
            x, role, over_rows=over_rows, over_columns=over_columns, noise=noise, wanted=wanted
        )

    def taken(self) -> Asked:
        asked, self.asked = self.asked, []
        return asked


def products(
    recipe: Recipe,
    quantization: Quantization,
    *,
    keeps_weights: bool = True,
    tensor: MeshAxis | None = None,
) -> QuantizedProducts:
    return QuantizedProducts(
        recipe=recipe,
        split="none",
        tensor_axis=tensor or MeshAxis(name="tp"),
        context_axis=MeshAxis(name="cp"),
        splits_sequence=tensor is not None,
        clock=quantization.clock,
        keeps_weights=keeps_weights,
    )


def on_one_rank() -> Quantization:
    return Quantization(ParallelMesh.single(), None)


ITSELF, TRANSPOSED = (True, False), (False, True)


@pytest.mark.parametrize("keeps_weights", [True, False])
def test_operands_are_made_where_a_product_takes_them(keeps_weights: bool) -> None:
    """The input's transpose only for a weight's gradient; weights once in a window, or (fully
    sharded) at each use what that use takes.
    """
    recipe = Recording()
    layer = products(recipe, on_one_rank(), keeps_weights=keeps_weights)
    weight = torch.nn.Parameter(torch.randn(32, 48))
    x = torch.randn(16, 48, requires_grad=True)
    run = functools.partial(layer, x, bias=None, before=None, sums=False)
    first = [] if keeps_weights else [("weight", ITSELF)]
    second = [] if keeps_weights else [("weight", TRANSPOSED)]

    y = run(weight=weight)
    made = ("weight", BOTH if keeps_weights else ITSELF)
    assert recipe.taken() == [("input", BOTH), made]
    y.sum().backward()
    assert recipe.taken() == [("gradient", BOTH), *second]

    for evaluating in (torch.no_grad, torch.inference_mode):
        for given in (weight, weight.view(-1, 48)):
            with evaluating():
                evaluated = run(weight=given)
            assert torch.equal(evaluated, y)
            assert recipe.taken() == [("input", ITSELF), *first]

    weight.requires_grad_(False)  # under low-rank adapters: only the input's gradient
    x.grad = None
    run(weight=weight).sum().backward()
    asked = recipe.taken()
    assert asked == [("input", ITSELF), *first, ("gradient", ITSELF), *second]
    assert x.grad is not None
    want = products(RowRecipe("e5m2"), on_one_rank())
    other = x.detach().clone().requires_grad_()
    want(other, weight, None, None, sums=False).sum().backward()
    assert other.grad is not None
    assert torch.equal(x.grad, other.grad)


def test_weights_changed_by_others_are_seen() -> None:
    """In place, at another address, and between evaluations past the version counter, as reading
    a checkpoint and weight averaging do it.
    """
    quantization = on_one_rank()
    layer = products(RowRecipe("e5m2"), quantization)
    weight = torch.nn.Parameter(torch.randn(32, 48))
    x = torch.randn(16, 48)

    def evaluate() -> Tensor:
        quantization.begin_run(training=False)
        with torch.no_grad():
            return layer(x, weight, None, None, sums=False)

    before = evaluate()
    assert torch.equal(evaluate(), before)
    with torch.no_grad():
        weight.mul_(2)
        assert torch.equal(layer(x, weight, None, None, sums=False), 2 * before)
    weight.data = weight.data * 2
    assert torch.equal(layer(x, weight, None, None, sums=False), 4 * before)
    weight.data.mul_(2)
    assert torch.equal(evaluate(), 8 * before)


def test_blocks_of_tokens_over_tensor_ranks_are_refused() -> None:
    """24 rows of a rank are less than a block of 32: one process would put others beside them."""
    tensor = MeshAxis(name="tp", size=2)
    layer = products(MXFP8Recipe("e4m3"), on_one_rank(), tensor=tensor)
    grad = torch.randn(24, 32)
    with pytest.raises(ValueError, match="24 tokens .*tensor_parallel_size=2.*multiple of 32"):
        layer.gradient(grad, BOTH, None)
    assert layer.gradient(grad, ITSELF, None).itself is not None  # its blocks are of features
    assert layer.gradient(torch.randn(64, 32), BOTH, None).transposed is not None
    whole = products(MXFP8Recipe("e4m3"), on_one_rank())
    assert whole.gradient(grad, BOTH, None).transposed is not None
