"""Rotary embedding against stored ratios and naive formulas."""

import math

import pytest
import torch

from megatron_lightning.config import RotaryConfig
from megatron_lightning.layers.rotary import (
    RotaryEmbedding,
    attention_factor,
    inverse_frequencies,
)

LLAMA = {"base": 500000.0, "scaling": "llama3", "original_max_position_embeddings": 8192}


@pytest.mark.parametrize(
    ("factor", "at_32", "slow"), [(8.0, 0.371122, 0.125), (32.0, 0.303743, 0.03125)]
)
def test_llama3_scaling_keeps_fast_pairs_and_stretches_slow_ones(factor, at_32, slow):
    plain = inverse_frequencies(128, RotaryConfig(base=500000.0))
    ratio = inverse_frequencies(128, RotaryConfig(**LLAMA, factor=factor)) / plain
    assert torch.equal(ratio[:29], torch.ones(29))
    assert ratio[32].item() == pytest.approx(at_32, abs=1e-6)
    torch.testing.assert_close(ratio[35:], torch.full((29,), slow))


def test_plain_frequencies_are_a_geometric_series():
    found = inverse_frequencies(8, RotaryConfig(base=10000.0))
    torch.testing.assert_close(found, torch.tensor([1.0, 0.1, 0.01, 0.001]))


def test_linear_scaling_is_position_interpolation():
    config = RotaryConfig(scaling="linear", factor=4.0)
    found = inverse_frequencies(16, config) * 40
    torch.testing.assert_close(found, inverse_frequencies(16, RotaryConfig()) * 10)


def naive_yarn(dim, config):
    """The paper's definition, pair by pair, in double precision."""
    found = []
    for i in range(dim // 2):
        frequency = config.base ** (-2 * i / dim)
        edges = []
        for turns in (config.beta_fast, config.beta_slow):
            edge = dim * math.log(config.original_max_position_embeddings / (turns * 2 * math.pi))
            edges.append(edge / (2 * math.log(config.base)))
        low, high = (math.floor(edges[0]), math.ceil(edges[1])) if config.truncate else edges
        low, high = max(low, 0), min(high, dim - 1)
        stretched = min(max((i - low) / (high - low), 0.0), 1.0)
        found.append(frequency * (1 - stretched) + frequency / config.factor * stretched)
    return torch.tensor(found)


@pytest.mark.parametrize("truncate", [True, False])
def test_yarn_against_the_definition(truncate):
    config = RotaryConfig(
        base=150000.0,
        scaling="yarn",
        factor=32.0,
        original_max_position_embeddings=4096,
        truncate=truncate,
    )
    found = inverse_frequencies(64, config)
    torch.testing.assert_close(found, naive_yarn(64, config), rtol=1e-5, atol=0)
    plain = inverse_frequencies(64, RotaryConfig(base=150000.0))
    assert found[0] == plain[0]
    torch.testing.assert_close(found[-1], plain[-1] / 32)


def test_yarn_attention_factor():
    yarn = {"scaling": "yarn", "factor": 32.0, "original_max_position_embeddings": 4096}
    assert attention_factor(RotaryConfig(**yarn)) == pytest.approx(1.3465735902799727)
    assert attention_factor(RotaryConfig(**yarn, mscale=0.707, mscale_all_dim=0.707)) == 1.0
    assert attention_factor(RotaryConfig(**yarn, attention_factor=0.5)) == 0.5
    assert attention_factor(RotaryConfig(scaling="linear", factor=32.0)) == 1.0


def naive_rotation(x, positions, frequencies):
    """Turn each pair as a complex number: x (S, B, heads, D), positions (S, B)."""
    half = len(frequencies)
    pairs = torch.complex(x[..., :half].double(), x[..., half : 2 * half].double())
    angles = positions.double()[..., None, None] * frequencies.double()
    turned = pairs * torch.polar(torch.ones_like(angles), angles)
    return torch.cat((turned.real, turned.imag, x[..., 2 * half :].double()), dim=-1).float()


@pytest.mark.parametrize("percent", [1.0, 0.5])
def test_rotation_is_a_complex_product_of_halves(percent):
    torch.manual_seed(0)
    rotary, x = RotaryConfig(percent=percent), torch.randn(5, 2, 3, 16)
    dim = int(16 * percent)
    positions = torch.tensor([[0, 1, 2, 0, 1], [7, 8, 9, 10, 11]])
    tables = RotaryEmbedding(dim, rotary)(5, positions, x.device)
    expected = naive_rotation(x, positions.t(), inverse_frequencies(dim, rotary))
    torch.testing.assert_close(tables.rotate(x), expected)


def test_rotation_without_positions_counts_from_zero():
    torch.manual_seed(0)
    embedding, x = RotaryEmbedding(16, RotaryConfig()), torch.randn(6, 2, 4, 16)
    counted = embedding(6, None, x.device).rotate(x)
    given = embedding(6, torch.arange(6).expand(2, 6), x.device).rotate(x)
    assert torch.equal(counted, given)


def test_rotation_of_grouped_heads_equals_that_of_flat_heads():
    torch.manual_seed(0)
    tables = RotaryEmbedding(16, RotaryConfig())(6, None, torch.device("cpu"))
    x = torch.randn(6, 2, 2, 3, 16)
    assert torch.equal(tables.rotate(x).flatten(2, 3), tables.rotate(x.flatten(2, 3)))


def test_low_precision_input_is_rotated_in_float32():
    torch.manual_seed(0)
    tables = RotaryEmbedding(64, RotaryConfig())(4096, None, torch.device("cpu"))
    x = torch.randn(4096, 1, 1, 64, dtype=torch.bfloat16)
    found = tables.rotate(x)
    assert found.dtype == torch.bfloat16
    assert torch.equal(found, tables.rotate(x.float()).bfloat16())


def test_tables_are_remembered_only_while_nothing_changes():
    embedding, cpu = RotaryEmbedding(16, RotaryConfig()), torch.device("cpu")
    first = embedding(6, None, cpu)
    assert embedding(6, None, cpu) is first
    assert embedding(7, None, cpu).cos.shape[0] == 7
    positions = torch.arange(7).repeat(2, 1)
    given = embedding(7, positions, cpu)
    assert embedding(7, positions, cpu) is given
    positions += 3
    changed = embedding(7, positions, cpu)
    assert changed is not given
    assert changed.cos[0, 0, 0].item() == pytest.approx(math.cos(3.0))


def test_tables_made_in_a_validation_serve_a_later_training_step():
    embedding = RotaryEmbedding(16, RotaryConfig())
    with torch.inference_mode():
        embedding(6, None, torch.device("cpu"))
        positions = torch.arange(6).expand(2, 6)
        embedding(6, positions, torch.device("cpu"))
        embedding(6, None, torch.device("cpu"))
    x = torch.randn(6, 2, 4, 16, requires_grad=True)
    embedding(6, None, x.device).rotate(x).sum().backward()
    assert x.grad is not None
