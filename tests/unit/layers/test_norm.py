"""Norms against their formulas."""

import pytest
import torch

from megatron_lightning.layers.norm import LayerNorm, RMSNorm
from megatron_lightning.parallel.random import Constant


def filled(norm):
    """Give every parameter distinct values."""
    torch.manual_seed(1)
    for parameter in norm.parameters():
        torch.nn.init.normal_(parameter, 1.0, 0.3)
    return norm


def test_rms_norm_formula():
    norm, x = filled(RMSNorm(24, 1e-2)), torch.randn(5, 2, 24, dtype=torch.float32)
    expected = x / (x.square().mean(-1, keepdim=True) + 1e-2).sqrt() * norm.weight
    torch.testing.assert_close(norm(x), expected)


def test_layer_norm_formula():
    norm, x = filled(LayerNorm(24, 1e-2)), torch.randn(5, 2, 24)
    variance = x.var(-1, keepdim=True, unbiased=False)
    expected = (x - x.mean(-1, keepdim=True)) / (variance + 1e-2).sqrt() * norm.weight + norm.bias
    torch.testing.assert_close(norm(x), expected)


@pytest.mark.parametrize("kind", [RMSNorm, LayerNorm])
def test_statistics_of_bfloat16_are_float32(kind):
    norm, x = filled(kind(512, 1e-5)).bfloat16(), torch.randn(7, 512).bfloat16() * 30
    exact = norm.float()(x.float())
    found = norm.bfloat16()(x)
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found.float(), exact, rtol=2**-7, atol=2**-8)


def test_initial_values_are_stated_for_every_parameter():
    for norm in (RMSNorm(4, 1e-5), LayerNorm(4, 1e-5)):
        assert set(norm.initials) == {name for name, _ in norm.named_parameters()}
    assert LayerNorm(4, 1e-5).initials == {"weight": Constant(1.0), "bias": Constant(0.0)}
