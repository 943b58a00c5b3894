"""Weights cast together, bit for bit what each is alone: the kernels in triton's interpreter."""

import pytest
import torch
from torch import Tensor

from megatron_lightning.parallel.quantized import quantization as quantizations
from megatron_lightning.precision.fp8 import FP8TensorRecipe
from megatron_lightning.precision.operands import Pair
from megatron_lightning.precision.weight_casts import WeightCasts, fit
from tests.interpreter import run_interpreted
from tests.unit.parallel.test_quantized_region import Layer, quantize

SHAPES = [(48, 32), (160, 272), (16, 16), (256, 64)]


def assert_same_pair(got: Pair, want: Pair) -> None:
    for one, two in zip(got, want, strict=True):
        assert one is not None
        assert two is not None
        assert one.values.dtype is two.values.dtype
        assert torch.equal(one.values.view(torch.uint8), two.values.view(torch.uint8))
        assert one.scale is not None
        assert two.scale is not None
        assert one.scale.item() == two.scale.item()
        assert one.scale.data_ptr() % 16 == 0


def check(device: str, dtype: torch.dtype) -> None:
    """Casts of some weights, and of what becomes of them."""
    torch.manual_seed(0)
    recipe = FP8TensorRecipe("e5m2")
    weights = [torch.randn(shape).mul(i + 1).to(device, dtype) for i, shape in enumerate(SHAPES)]
    weights[2].zero_()
    casts = WeightCasts(weights)
    for _ in range(2):
        pairs = casts.cast()
        for weight, pair in zip(weights, pairs, strict=True):
            alone = recipe.pair(weight, "weight")
            assert_same_pair(pair, alone)
        for weight in weights:
            weight.mul_(-3)
        weights = [weight.clone() for weight in weights]
        assert casts.follow(weights)
    assert casts.cast()[0] is pairs[0]  # whatever is cast, into the same memory
    assert not casts.follow(weights[1:])
    assert not casts.follow([weight.float() for weight in weights])
    assert_same_pair(casts.cast()[0], recipe.pair(weights[0], "weight"))


INTERPRETED = """
import torch
from megatron_lightning.precision import fp8_casts
from tests.unit.precision.test_weight_casts import check

fp8_casts._by_kernel = lambda x: True  # the interpreter's casts cut off
for dtype in (torch.bfloat16, torch.float16):
    check("cpu", dtype)
"""


def test_casts_in_the_interpreter() -> None:
    run_interpreted(INTERPRETED)


class Casts:
    """`WeightCasts` by plain torch."""

    made = 0

    def __init__(self, weights: list[Tensor]) -> None:
        Casts.made += 1
        self.weights = weights

    def follow(self, weights: list[Tensor]) -> bool:
        self.weights = weights
        return True

    def cast(self) -> list[Pair]:
        return [FP8TensorRecipe("e5m2").pair(weight, "weight") for weight in self.weights]


@pytest.mark.parametrize("kind", ["tensorwise", "delayed", "rowwise"])
def test_layers_take_what_was_cast_at_the_beginning(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(quantizations, "fit", bool)
    monkeypatch.setattr(quantizations, "WeightCasts", Casts)
    Casts.made = 0
    torch.manual_seed(0)
    layers = [Layer().bfloat16() for _ in range(2)]
    quantization = quantize(layers, kind)
    quantization._whole = True
    linears = [layer.fc1 for layer in layers] + [layer.fc2 for layer in layers]
    for _ in range(2):
        quantization.begin_run(training=True)
        for linear in linears:
            products, weight = linear.quantized, linear.weight.flatten(0, -2)
            assert products is not None
            held = products._weight
            assert (held is not None) == (kind == "tensorwise")
            if held is not None:
                assert products.weight(weight, (True, True)) is held
                assert_same_pair(held, products.recipe.pair(weight.detach(), "weight"))
                with torch.no_grad():
                    linear.weight.mul_(2)  # within the window
                again = products.weight(weight, (True, True))
                assert again is not held
                assert_same_pair(again, products.recipe.pair(weight.detach(), "weight"))
        quantization.finish_window()
    assert Casts.made == (kind == "tensorwise")


def test_which_weights_fit() -> None:
    assert not fit([])
    assert not fit([torch.ones(16, 16, dtype=torch.bfloat16)])  # there is no kernel here
