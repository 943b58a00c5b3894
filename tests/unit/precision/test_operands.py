"""Recipes against references written value by value from the formats' definitions."""

import math
from fractions import Fraction

import pytest
import torch
from torch import Tensor

from megatron_lightning.precision.fp8 import (
    FP8BlockRecipe,
    FP8RowRecipe,
    FP8TensorRecipe,
    blocks_problem,
    device_problem,
)
from megatron_lightning.precision.operands import Operand, Recipe, product
from megatron_lightning.precision.simulated import (
    BlockRecipe,
    MXFP8Recipe,
    NVFP4Recipe,
    RowRecipe,
    TensorRecipe,
    hadamard,
)
from tests.unit.precision.test_formats import TABLES, nearest

GENERATOR = torch.Generator().manual_seed(5)


def matrix(rows: int, columns: int) -> Tensor:
    """Values of very different sizes, some rows and blocks all zero."""
    x = torch.randn(rows, columns, generator=GENERATOR)
    x *= torch.randn(rows, columns, generator=GENERATOR).mul(2).exp2()
    x *= torch.randn(rows, 1, generator=GENERATOR).mul(4).exp2()
    x[1] = 0
    x[:, 20:28] *= 1e-3
    return x


def whole(operand: Operand | None) -> Tensor:
    """The factor that an operand stands for, in float64."""
    assert operand is not None
    values = operand.values.double()
    return values if operand.scale is None else values * operand.scale.double()


def to_format(value: float, scale: Fraction, name: str) -> float:
    """Value -> rounded(value / scale) * scale, exactly."""
    return float(nearest(TABLES[name], Fraction(value) / scale) * scale)


def power_scale(values: list[float], limit: int) -> Fraction:
    """Smallest power of two whose multiples up to `limit` reach the largest of the values."""
    amax = max(map(abs, values))
    if amax == 0:
        return Fraction(1)
    return Fraction(2) ** math.ceil(math.log2(amax / limit) - 1e-12)


def by_reference(x: Tensor, height: int, width: int, name: str) -> Tensor:
    """Blocks of height x width, scales powers of two, one value after the other."""
    want = torch.empty_like(x, dtype=torch.float64)
    limit = 448 if name == "e4m3" else 57344
    for r in range(0, x.shape[0], height):
        for c in range(0, x.shape[1], width):
            block = x[r : r + height, c : c + width]
            scale = power_scale(block.flatten().tolist(), limit)
            done = [[to_format(v, scale, name) for v in row] for row in block.tolist()]
            want[r : r + height, c : c + width] = torch.tensor(done, dtype=torch.float64)
    return want


ROLES = {"input": "e4m3", "weight": "e4m3", "gradient": "e5m2"}


@pytest.mark.parametrize("role", ROLES)
@pytest.mark.parametrize("shape", [(24, 40), (33, 48)])
def test_tensor_and_row_scales(shape: tuple[int, int], role: str) -> None:
    x = matrix(*shape)
    pair = TensorRecipe("e5m2").pair(x, role)  # type: ignore[arg-type]
    want = by_reference(x, *shape, ROLES[role])
    assert torch.equal(whole(pair.itself), want)
    assert torch.equal(whole(pair.transposed), want.t())
    pair = RowRecipe("e5m2").pair(x, role)  # type: ignore[arg-type]
    assert torch.equal(whole(pair.itself), by_reference(x, 1, shape[1], ROLES[role]))
    columns = by_reference(x.t().contiguous(), 1, shape[0], ROLES[role])
    assert torch.equal(whole(pair.transposed), columns)


@pytest.mark.parametrize("recipe", [BlockRecipe("e4m3"), MXFP8Recipe("e4m3")])
def test_blocks(recipe: Recipe) -> None:
    """Also blocks that the matrix does not fill."""
    x = matrix(9, 140)
    width = recipe.block
    for role in ("input", "gradient"):
        pair = recipe.pair(x, role)  # type: ignore[arg-type]
        assert torch.equal(whole(pair.itself), by_reference(x, 1, width, "e4m3"))
        turned = by_reference(x.t().contiguous(), 1, width, "e4m3")
        assert torch.equal(whole(pair.transposed), turned)
    pair = recipe.pair(x, "weight")
    height = 1 if width == 32 else width
    assert torch.equal(whole(pair.itself), by_reference(x, height, width, "e4m3"))
    if width == 128:
        assert torch.equal(whole(pair.transposed), whole(pair.itself).t())


def four_bits(x: Tensor, height: int) -> Tensor:
    """NVFP4 by its definition (arXiv 2509.25149, appendix): scalar by scalar, in float32 where
    scales are float32.
    """
    amax = float(x.abs().max())
    encode = torch.tensor(2688.0) / torch.tensor(amax)
    want = torch.empty_like(x, dtype=torch.float64)
    for r in range(0, x.shape[0], height):
        for c in range(0, x.shape[1], 16):
            block = x[r : r + height, c : c + 16]
            raw = block.abs().max() * (encode / 6.0)
            scale = float(nearest(TABLES["e4m3"], Fraction(float(raw))))
            into = encode / scale if scale else torch.tensor(0.0)
            for i, row in enumerate(block):
                for j, value in enumerate(row):
                    four = nearest(TABLES["e2m1"], Fraction(float(value * into)))
                    want[r + i, c + j] = float(four) * scale
    return want * (torch.tensor(1.0) / encode).double()


def test_four_bits() -> None:
    x = matrix(33, 48)
    recipe = NVFP4Recipe(signs=None)
    pair = recipe.pair(x, "input")
    assert torch.equal(whole(pair.itself), four_bits(x, 1))
    assert torch.equal(whole(pair.transposed), four_bits(x.t().contiguous(), 1))
    pair = recipe.pair(x, "weight")
    assert torch.equal(whole(pair.itself), four_bits(x, 16))
    assert torch.equal(whole(pair.transposed), four_bits(x, 16).t())


def test_four_bit_values_are_those_of_the_format() -> None:
    """Every block is an E4M3 scale times E2M1 values."""
    pair = NVFP4Recipe(signs=None).pair(matrix(16, 64), "input")
    assert pair.itself is not None
    for block in pair.itself.values.view(-1, 16):
        fits = [
            scale
            for scale in TABLES["e4m3"][1:]
            if all(abs(Fraction(v)) / scale in TABLES["e2m1"] for v in block.tolist())
        ]
        assert fits


def test_stochastic_rounding_of_gradients_keeps_the_mean() -> None:
    x = torch.randn(32, 48, generator=GENERATOR)
    recipe = NVFP4Recipe(signs=None)
    total = torch.zeros(32, 48, dtype=torch.float64)
    draws = 400
    for i in range(draws):
        noise = torch.rand(32, 48, generator=torch.Generator().manual_seed(i))
        pair = recipe.pair(x, "gradient", noise=lambda noise=noise: noise)
        total += whole(pair.itself)
    # The largest of a block saturates where its scale was rounded down.
    inside = x.abs() < 0.9 * x.unflatten(1, (-1, 16)).abs().amax(-1).repeat_interleave(16, 1)
    nearest_error = (whole(recipe.pair(x, "gradient").itself) - x)[inside].norm()
    assert float((total / draws - x)[inside].norm()) < 0.12 * float(nearest_error)
    inputs = recipe.pair(x, "input", noise=lambda: torch.ones(32, 48))
    assert torch.equal(whole(inputs.itself), whole(recipe.pair(x, "input").itself))


def test_the_hadamard_transform_cancels_and_spreads_outliers() -> None:
    matrix16 = hadamard(16)
    assert torch.equal(matrix16 @ matrix16.t(), torch.eye(16))
    signs = torch.tensor([1.0, -1.0] * 8)
    plain, spread = NVFP4Recipe(stochastic=False), NVFP4Recipe(stochastic=False, signs=signs)
    x = torch.randn(40, 24, generator=GENERATOR)
    x[7] *= 50  # a token
    grad = torch.randn(40, 32, generator=GENERATOR)
    want = grad.t().double() @ x.double()
    errors = []
    for recipe in (plain, spread):
        a, b = recipe.pair(grad, "gradient").transposed, recipe.pair(x, "input").transposed
        assert a is not None
        assert b is not None
        errors.append(float((product(a, b, torch.float32) - want).norm() / want.norm()))
    assert errors[1] < 0.25
    # Without rounding the two transforms cancel: 40 tokens are padded to 48.
    rotated = [spread._transformed(m.t()) for m in (grad, x)]
    assert torch.allclose(rotated[0] @ rotated[1].t(), want.float(), atol=1e-3)


@pytest.mark.parametrize(
    "recipe",
    [
        TensorRecipe("e5m2"),
        RowRecipe("e5m2"),
        BlockRecipe("e4m3"),
        MXFP8Recipe("e4m3"),
        NVFP4Recipe(signs=torch.ones(16)),
        FP8TensorRecipe("e5m2"),
        FP8RowRecipe("e5m2"),
    ],
    ids=lambda recipe: type(recipe).__name__,
)
def test_zeros_and_what_is_not_finite(recipe: Recipe) -> None:
    """Zeros stay zeros, without NaN; an overflow of float16 is not hidden from the loss scaler."""
    for role in ROLES:
        pair = recipe.pair(torch.zeros(32, 32), role)  # type: ignore[arg-type]
        for operand in pair:
            assert operand is not None
            values = operand.values.float()
            assert not values.any()
            assert operand.scale is None or operand.scale.isfinite().all()
    for bad in (torch.inf, torch.nan):
        x = torch.ones(32, 32)
        x[3, 5] = bad
        pair = recipe.pair(x, "gradient")
        for operand, place in ((pair.itself, 3), (pair.transposed, 5)):
            assert operand is not None
            scale = operand.scale if operand.scale is not None else torch.ones(())
            assert not (operand.values.float() * scale)[place].isfinite().all()


@pytest.mark.parametrize("tokens", [1, 3, 16, 37])
@pytest.mark.parametrize(
    ("real", "simulated"),
    [(FP8TensorRecipe("e5m2"), TensorRecipe("e5m2")), (FP8RowRecipe("e5m2"), RowRecipe("e5m2"))],
)
def test_scaled_products_give_what_simulation_gives(
    real: Recipe, simulated: Recipe, tokens: int
) -> None:
    """Products of `_scaled_mm` on the CPU: any number of tokens, whose padding changes nothing."""
    x = torch.randn(tokens, 64, generator=GENERATOR).bfloat16()
    weight = torch.randn(48, 64, generator=GENERATOR).bfloat16()
    grad = torch.randn(tokens, 48, generator=GENERATOR).bfloat16()
    for dtype in (torch.bfloat16, torch.float32):
        results = []
        for recipe in (real, simulated):
            xs, ws, gs = (
                recipe.pair(m, role)  # type: ignore[arg-type]
                for m, role in ((x, "input"), (weight, "weight"), (grad, "gradient"))
            )
            results.append(
                [
                    recipe.product(a, b, dtype, forward=False)  # type: ignore[arg-type]
                    for a, b in (
                        (xs.itself, ws.itself),
                        (gs.itself, ws.transposed),
                        (gs.transposed, xs.transposed),
                    )
                ]
            )
        for got, want in zip(*results, strict=True):
            assert got.dtype is dtype
            assert torch.allclose(got.float(), want.float(), rtol=8e-3, atol=1e-4)


@pytest.mark.parametrize("shape", [(256, 384), (300, 144), (3, 16), (1, 272)])
def test_block_operands_are_those_of_simulation(shape: tuple[int, int]) -> None:
    """Values and scales laid out as products take them stand for what simulation rounds to."""
    rows, columns = shape
    x = matrix(max(rows, 2), max(columns, 28))[:rows, :columns].bfloat16()
    for role in ("input", "weight", "gradient"):
        real = FP8BlockRecipe("e4m3").pair(x, role)
        simulated = BlockRecipe("e4m3").pair(x, role)
        for got, want in zip(real, simulated, strict=True):
            assert got is not None
            assert got.scale is not None
            assert want is not None
            high, wide = want.values.shape
            assert got.values.shape == (high, wide + -wide % 16)  # of features nothing is added
            scale = got.scale.repeat_interleave(128, 1)[:, :wide]
            if role == "weight":
                assert got.scale.shape[1] % 4 == 0
                scale = scale.repeat_interleave(128, 0)[:high]
            else:
                assert got.scale.t().is_contiguous()
            assert torch.equal(got.values.float()[:, :wide] * scale, want.values.float())
            assert not got.values.float()[:, wide:].any()


@pytest.mark.parametrize("rows", [16, 21])
def test_transposed_operands_are_contiguous(rows: int) -> None:
    """As products take them, with and without tokens that are padded."""
    x = torch.randn(rows, 32, generator=GENERATOR)
    for recipe in (FP8TensorRecipe("e5m2"), FP8RowRecipe("e5m2"), FP8BlockRecipe("e4m3")):
        transposed = recipe.pair(x, "input").transposed
        assert transposed is not None
        assert transposed.values.is_contiguous()


def test_scales_of_blocks_need_a_device_and_a_cuda_that_have_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One message for each, with what is there, what is needed and what to do."""
    device = torch.device("cuda", 0)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "H200")
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    for capability, words in (((9, 0), None), ((10, 0), "10.0"), ((8, 6), "8.6")):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _, c=capability: c)
        problem = device_problem(device, blocks=True)
        assert (problem is None) == (words is None)
        assert words is None or (words in str(problem) and "simulate=True" in str(problem))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    for version in ("12.8", "12.4", None):
        monkeypatch.setattr(torch.version, "cuda", version)
        assert device_problem(device) is None
        problem = device_problem(device, blocks=True)
        assert problem is not None
        assert f"CUDA {version}" in problem
        assert "12.9" in problem
        assert "recipe='fp8_rowwise'" in problem
    monkeypatch.setattr(torch.version, "cuda", "12.9")
    assert blocks_problem() is None


def test_devices_without_fp8_are_refused_with_the_remedy() -> None:
    problem = device_problem(torch.device("cpu"))
    assert problem is not None
    assert "cpu" in problem
    assert "simulate=True" in problem
