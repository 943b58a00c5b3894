"""Experts in FP8 with a scale for each row: against float64 of rounded factors, one expert after
the other, and what torch's grouped product is given.
"""

import copy
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megatron_lightning.config import QuantizationConfig
from megatron_lightning.config.plan import ParameterInfo
from megatron_lightning.config.plan import experts as experts_split
from megatron_lightning.layers.moe.experts import ExpertLinear
from megatron_lightning.parallel.axes import MeshAxis
from megatron_lightning.parallel.collectives import all_reduce_
from megatron_lightning.parallel.mesh import ParallelMesh
from megatron_lightning.parallel.quantized.apply import _experts
from megatron_lightning.parallel.quantized.experts import RowScaledExperts
from megatron_lightning.parallel.quantized.experts_in_turn import QuantizedExperts
from megatron_lightning.parallel.quantized.products import WeightClock
from megatron_lightning.parallel.quantized.tensor_split import TensorSplit
from megatron_lightning.parallel.random import Normal
from megatron_lightning.precision import grouped
from megatron_lightning.precision.fp8_casts import cast_stack_columns
from megatron_lightning.precision.grouped import ExpertRecipe
from megatron_lightning.precision.operands import Operand, Role, identity
from tests.harness import run_ranks
from tests.interpreter import run_interpreted

COUNTS = (3, 0, 20, 9)
ROWS, IN, OUT = 40, 64, 96  # eight rows of garbage behind the counts


def experts(
    *,
    simulate: bool,
    rounds: bool = True,
    split: TensorSplit = "none",
    axis: MeshAxis | None = None,
) -> Any:
    return RowScaledExperts(
        recipe=ExpertRecipe(simulate=simulate, rounds_weight_gradient=rounds),
        split=split,
        axis=axis or MeshAxis(name="alone"),
        clock=WeightClock(),
    )


def make(dtype: torch.dtype) -> tuple[ExpertLinear, Tensor, Tensor]:
    """Layer, rows and gradient; sizes of rows and features differ widely."""
    generator = torch.Generator().manual_seed(5)
    layer = ExpertLinear(len(COUNTS), IN, (2, OUT // 2), bias=False, initial=Normal(1.0))
    weight = torch.randn(layer.weight.shape, generator=generator) * 0.1
    layer.weight.data.copy_(weight * torch.logspace(-2, 1, IN))
    rows = torch.randn(ROWS, IN, generator=generator) * torch.logspace(-3, 3, ROWS)[:, None]
    grad = torch.randn(ROWS, 2, OUT // 2, generator=generator) * (
        0.1 if dtype is torch.float16 else 1e-4
    )
    rows[sum(COUNTS) :] = torch.nan
    grad[sum(COUNTS) :] = torch.nan
    return layer.to(dtype), rows.to(dtype), grad.to(dtype)


def run(layer: ExpertLinear, rows: Tensor, grad: Tensor, low: object) -> list[Tensor]:
    """Output, gradients of input and weight; without rows that hold nothing."""
    layer.quantized_experts = low  # type: ignore[assignment]
    layer.zero_grad()
    own = rows.clone().requires_grad_()
    y = layer(own, torch.tensor(COUNTS))
    y.backward(grad)
    assert own.grad is not None
    assert layer.weight.grad is not None
    used = sum(COUNTS)
    return [y.detach()[:used].flatten(1), own.grad[:used], layer.weight.grad.flatten(1, 2)]


def rounded(x: Tensor) -> Tensor:
    """Each row to E4M3 by the largest power of two that keeps it within 448, in float64."""
    scale = 2.0 ** torch.floor(torch.log2(448 / x.double().abs().amax(-1, keepdim=True)))
    return (x.double() * scale).float().to(torch.float8_e4m3fn).double() / scale


def reference(
    layer: ExpertLinear, rows: Tensor, grad: Tensor, *, rounds: bool = True
) -> list[Tensor]:
    """One expert after the other, summed in float64."""
    weights = layer.weight.detach().flatten(1, 2)
    ends = torch.tensor(COUNTS).cumsum(0).tolist()
    y, dx, dw = [], [], []
    for expert, (count, end) in enumerate(zip(COUNTS, ends, strict=True)):
        x, g = rows[end - count : end], grad[end - count : end].flatten(1)
        w = weights[expert]
        y.append(rounded(x) @ rounded(w).t())
        dx.append(rounded(g) @ rounded(w.t()).t())
        if not count:
            dw.append(torch.zeros(OUT, IN))
        elif rounds:
            dw.append(rounded(g.t()) @ rounded(x.t()).t())
        else:
            dw.append(g.double().t() @ x.double())
    return [torch.cat(y), torch.cat(dx), torch.stack(dw)]


def error(got: Tensor, want: Tensor) -> float:
    """The largest of any row, of its norm."""
    off = (got.double() - want).norm(dim=-1) / want.norm(dim=-1).clamp(min=1e-30)
    return float(off.max())


@pytest.mark.parametrize("rounds", [True, False])
@pytest.mark.parametrize("simulate", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_against_float64_of_rounded_factors(
    dtype: torch.dtype, simulate: bool, rounds: bool
) -> None:
    """On the CPU FP8's own products run too; bfloat16 is what they write. With and without weight
    gradients.
    """
    layer, rows, grad = make(dtype)
    limit = 1e-5 if dtype is torch.float32 and simulate else 4e-3
    names = ("output", "input", "weight")
    results = run(layer, rows, grad, experts(simulate=simulate, rounds=rounds))
    wanted = reference(layer, rows, grad, rounds=rounds)
    for name, got, want in zip(names, results, wanted, strict=True):
        assert got.dtype is dtype
        present = want.norm(dim=-1) > (1e-2 if dtype is torch.float16 else 0)  # normal numbers
        assert error(got[present], want[present]) < limit, name
    assert not results[2][1].any()


def test_simulation_and_units_round_alike() -> None:
    x = torch.randn(5, 48).bfloat16() * torch.logspace(-9, 9, 5)[:, None].bfloat16()
    w = torch.randn(3, 32, 48).bfloat16()
    w[1] = 0
    roles: tuple[Role, ...] = ("input", "gradient")
    simulated, real = ExpertRecipe(simulate=True), ExpertRecipe(simulate=False)
    pairs = [(simulated.tokens(x, role), real.tokens(x, role)) for role in roles]
    pairs += [(simulated.weight(w), real.weight(w)), (simulated.transposed(w), real.transposed(w))]
    for want, got in pairs:
        assert got.values.dtype is torch.float8_e4m3fn
        assert got.values.is_contiguous()
        assert torch.equal(got.values.float(), want.values.float())
        assert got.scale is not None
        assert want.scale is not None
        assert torch.equal(got.scale, want.scale)


def test_what_the_grouped_product_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    """Dtypes, strides and scales are checked by torch, on the meta device as on a GPU. One call a
    product, without a look at the counts.
    """
    fast = []

    def scaled_grouped_mm(*factors: Tensor, offs: Tensor, **options: Any) -> Tensor:
        fast.append(options["use_fast_accum"])
        meta = [each.to("meta") for each in factors]
        shape = actual(*meta, offs=offs.to("meta"), **options).shape
        a, b, scale_a, scale_b = factors
        y = torch.full(shape, torch.nan)
        begin = 0
        for expert, end in enumerate(offs.tolist()):
            if b.dim() == 3:
                product = a[begin:end].float() @ b[expert].float()
                y[begin:end] = product * scale_a[begin:end, None] * scale_b[expert]
            else:  # what a kernel asserts
                assert end > begin
                assert (end - begin) % 16 == 0
                product = a[:, begin:end].float() @ b[begin:end].float()
                of_a, of_b = (each.view(len(offs), -1)[expert] for each in (scale_a, scale_b))
                y[expert] = product * of_a[:, None] * of_b
            begin = end
        return y.to(options["out_dtype"])

    layer, rows, grad = make(torch.bfloat16)
    want = run(layer, rows, grad, experts(simulate=False))
    monkeypatch.setattr(grouped, "can_group", lambda values, num_experts: True)
    actual: Any = torch._scaled_grouped_mm
    monkeypatch.setattr(
        grouped.torch,
        "_scaled_grouped_mm",
        lambda *a, **k: actual(*a, **k) if a[0].is_meta else scaled_grouped_mm(*a, **k),
    )
    got = run(layer, rows, grad, experts(simulate=False))
    assert fast == [True, True, True]
    for one, other in zip(got, want, strict=True):
        assert error(one, other.double()) < 5e-3


def test_weights_are_rounded_once_in_a_window(monkeypatch: pytest.MonkeyPatch) -> None:
    """And again once they have changed; the transpose not at all without a backward pass."""
    made = []
    for name in ("weight", "transposed"):
        call = getattr(ExpertRecipe, name)

        def counted(self: ExpertRecipe, *arguments: Any, name: str, call: Any) -> Operand:
            made.append(name)
            return call(self, *arguments)

        monkeypatch.setattr(ExpertRecipe, name, _method(partial(counted, name=name, call=call)))
    layer, rows, grad = make(torch.bfloat16)
    low = experts(simulate=False)
    with torch.no_grad():
        layer.quantized_experts = low
        layer(rows, torch.tensor(COUNTS))
    assert made == ["weight"]
    first = run(layer, rows, grad, low)
    again = run(layer, rows, grad, low)
    assert made == ["weight", "transposed"]
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    low.clock.tick()
    run(layer, rows, grad, low)
    assert made == ["weight", "transposed"] * 2
    with torch.no_grad():
        layer.weight.mul_(2)
    doubled = run(layer, rows, grad, low)
    assert made == ["weight", "transposed"] * 3
    assert torch.equal(doubled[0], first[0] * 2)
    low.keeps_weights = False
    low.clock.tick()
    for uses in (4, 5):
        run(layer, rows, grad, low)
        assert made == ["weight", "transposed"] * uses
    assert copy.deepcopy(low)._itself.operand is None


def _method(call: Any) -> Any:
    return lambda self, *arguments: call(self, *arguments)


def test_a_weight_that_does_not_learn() -> None:
    """As under adapters: its input is not kept, and gradients pass."""
    layer, rows, grad = make(torch.float32)
    want = run(layer, rows, grad, experts(simulate=True))[1]
    layer.weight.requires_grad_(False)
    own = rows.clone().requires_grad_()
    y = layer(own, torch.tensor(COUNTS))
    kept = y.grad_fn.next_functions[0][0].saved_tensors  # type: ignore[union-attr]
    assert len(kept) == 2  # weight and counts
    y.backward(grad)
    assert own.grad is not None
    assert torch.equal(own.grad[: sum(COUNTS)], want)


@pytest.mark.parametrize("rounds", [True, False])
def test_the_weights_gradient_may_be_put_off(rounds: bool) -> None:
    layer, rows, grad = make(torch.float32)
    want = run(layer, rows, grad, experts(simulate=True, rounds=rounds))[2]
    taken = []

    class Sink:
        def defer_call(self, multiply: Any) -> bool:
            taken.append(multiply)
            return True

    layer.weight_sink = Sink()
    layer.zero_grad()
    layer(rows, torch.tensor(COUNTS)).backward(grad)
    assert layer.weight.grad is None
    [multiply] = taken
    assert torch.equal(multiply(), want)


def split_experts(rank: int, world_size: int, split: TensorSplit) -> list[Tensor]:
    """A tensor rank's part, put together from all."""
    axis = ParallelMesh.build(device=torch.device("cpu"), tensor=world_size).tp
    layer, rows, grad = make(torch.float32)
    rows, grad = rows.nan_to_num(), grad.nan_to_num()
    dim = -1 if split == "rows" else -2
    part = ExpertLinear(
        len(COUNTS),
        IN // (world_size if split == "rows" else 1),
        (2, OUT // 2 // (world_size if split == "columns" else 1)),
        bias=False,
        initial=Normal(1.0),
    )
    part.weight.data.copy_(layer.weight.data.chunk(world_size, dim)[rank])
    if split == "rows":
        rows = rows.chunk(world_size, -1)[rank]
    else:
        grad = grad.chunk(world_size, -1)[rank].contiguous()
    y, dx, _ = run(part, rows, grad, experts(simulate=True, split=split, axis=axis))
    return [
        all_reduce_(y, axis) if split == "rows" else y,
        dx if split == "rows" else all_reduce_(dx, axis),
    ]


@pytest.mark.parametrize("split", ["columns", "rows"])
def test_scales_do_not_know_of_tensor_ranks(split: TensorSplit) -> None:
    layer, rows, grad = make(torch.float32)
    y, dx, _ = run(layer, rows, grad, experts(simulate=True))
    ranks = run_ranks(split_experts, 2, split)
    if split == "rows":
        whole_y, whole_dx = ranks[0][0], torch.cat([rank[1] for rank in ranks], -1)
    else:
        parts = [rank[0].unflatten(-1, (2, -1)) for rank in ranks]
        whole_y, whole_dx = torch.cat(parts, -1).flatten(1), ranks[0][1]
    assert error(whole_y, y.double()) < 1e-6
    assert error(whole_dx, dx.double()) < 1e-6


def test_weight_gradients_of_large_experts_are_rounded() -> None:
    """By global sizes: those of Mixtral are, those of 128 experts of width 768 are not."""
    config = QuantizationConfig(recipe="fp8_rowwise", simulate=True, experts=True)
    mesh = ParallelMesh.single()
    cases = [((8, 2, 14336, 4096), True), ((8, 4096, 14336), True)]
    cases += [((128, 2, 768, 2048), False), ((128, 2048, 768), False)]
    for shape, rounds in cases:
        row = ParameterInfo(
            name="experts.weight",
            global_shape=shape,
            offsets=(0,) * len(shape),
            sizes=(*shape[:-1], shape[-1] // 2),
            split=experts_split(2),
            expert=True,
        )
        made = _experts(
            config,
            "experts",
            row,
            row.split,
            mesh,
            clock=WeightClock(),
            streams=None,
            seed=0,
            keeps_weights=True,
        )
        assert isinstance(made, RowScaledExperts)
        assert made.recipe.rounds_weight_gradient == rounds


@pytest.mark.parametrize(
    ("recipe", "at_once"),
    [
        ("fp8_rowwise", True),
        ("fp8_tensorwise", True),
        ("fp8_delayed", True),
        ("fp8_blockwise", False),
        ("mxfp8", False),
        ("nvfp4", False),
    ],
)
def test_recipes_that_give_experts_a_scale_for_each_row(recipe: Any, at_once: bool) -> None:
    config = QuantizationConfig(recipe=recipe, simulate=True, experts=True)
    shape = (4, 2, 8, 16)
    row = ParameterInfo(
        name="experts.weight",
        global_shape=shape,
        offsets=(0,) * 4,
        sizes=shape,
        split=experts_split(2),
        expert=True,
    )
    mesh = ParallelMesh.single()
    made = _experts(
        config,
        "experts",
        row,
        row.split,
        mesh,
        clock=WeightClock(),
        streams=None,
        seed=0,
        keeps_weights=True,
    )
    assert isinstance(made, RowScaledExperts if at_once else QuantizedExperts)
    if isinstance(made, QuantizedExperts):
        assert len(made.products) == 4


def test_bad_gradient_formats_are_explained() -> None:
    config = QuantizationConfig(recipe="fp8_rowwise", experts=True, gradient_format="e5m2")
    [problem] = config.check()
    assert "gradient_format='e5m2'" in problem
    assert "None" in problem
    assert not QuantizationConfig(recipe="fp8_rowwise", gradient_format="e5m2").check()
    assert not QuantizationConfig(recipe="fp8_tensorwise", experts=True).check()


KERNELS = """
import torch
from megatron_lightning.precision import fp8_casts
from megatron_lightning.precision.grouped import ExpertRecipe
from megatron_lightning.precision.kernels import fp8_stacks
from megatron_lightning.precision.operands import identity
torch.manual_seed(0)
# Exact in E4M3: the interpreter doesn't round as a GPU does, and makes numbers of NaN.
x = torch.randint(-15, 16, (3, 300, 80)).half() * 2.0 ** torch.randint(-9, 9, (80,)).half()
x[1] = 0
x[2, 7, 5] = torch.inf
values, inverse = fp8_casts.cast_stack_columns(x, "e4m3", identity)
got, own = fp8_stacks.cast_columns(x, None, torch.float8_e4m3fn, 448.0)
largest = fp8_stacks.column_largest(x)
assert torch.equal(largest.view(3, 80), x.float().abs().amax(1))
for got, own in ((got, own), fp8_stacks.cast_columns(x, largest, torch.float8_e4m3fn, 448.0)):
    torch.testing.assert_close(own, inverse, rtol=0, atol=0, equal_nan=True)
    fine = values.float().isfinite()
    assert torch.equal(got.float()[fine], values.float()[fine])
x = torch.randint(-15, 16, (60, 80)).half() * 2.0 ** torch.randint(-9, 9, (80,)).half()
x[32:] = torch.nan
counts = torch.tensor([3, 0, 20, 9])
want = ExpertRecipe(simulate=False).columns(x, "input", counts)
values, scale, ends = fp8_stacks.cast_groups(x, counts, torch.float8_e4m3fn, 448.0)
assert ends.tolist() == want.ends.tolist() == [16, 32, 64, 80]
assert torch.equal(scale, want.scale)
assert values.shape[1] >= 80 and values.shape[1] % 16 == 0
assert torch.equal(values[:, :80].float(), want.values.float())
"""


@pytest.mark.skipif("torch.cuda.is_available()", reason="the tests on CUDA show the same")
def test_kernels_in_the_interpreter() -> None:
    run_interpreted(KERNELS)


def test_stacked_casts_take_largest_values_over_ranks() -> None:
    """As if another rank held a larger value in one row of the transpose."""
    x = torch.randn(2, 16, 32).bfloat16()

    def reduce(amax: Tensor) -> Tensor:
        amax[3] = 1e4
        return amax

    _, plain = cast_stack_columns(x, "e4m3", identity)
    values, inverse = cast_stack_columns(x, "e4m3", reduce)
    assert values.shape == (2, 32, 16)
    changed = (plain != inverse).flatten().nonzero().flatten().tolist()
    assert changed == [3]
    assert (
        nn.functional.cosine_similarity(
            (values.float() * inverse).flatten(), x.float().transpose(1, 2).flatten(), dim=0
        )
        > 0.99
    )
