"""Attention cores against a loop over heads and positions, and the packing of the projection."""

import math

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from megatron_lightning.config import GPTConfig, RotaryConfig
from megatron_lightning.layers import (
    Dropout,
    FusedAttention,
    ReferenceAttention,
    RotaryEmbedding,
    SelfAttention,
    TorchBackend,
    causal_mask,
)
from megatron_lightning.parallel.streams import Layout

CORES = [FusedAttention, ReferenceAttention]


def made(kind, window=0, p=0.0, scale=0.25):
    """A core with heads dropped with probability p."""
    return kind(scale=scale, window_size=window, dropout=Dropout(p, Layout.HEADS))


def inputs(length=7, rows=2, heads=4, groups=2, dim=16, dtype=torch.float32):
    """Queries, keys and values that require gradients."""
    torch.manual_seed(0)
    shapes = [(length, rows, heads, dim), (length, rows, groups, dim), (length, rows, groups, dim)]
    return [torch.randn(shape, dtype=dtype, requires_grad=True) for shape in shapes]


def naive(query, key, value, scale, window):
    """One query at a time: softmax over the keys that it sees."""
    length, rows, heads, _ = query.shape
    per_group = heads // key.shape[2]
    out = torch.empty(length, rows, heads, value.shape[-1], dtype=query.dtype)
    for i in range(length):
        first = max(0, i - window + 1) if window else 0
        for b in range(rows):
            for n in range(heads):
                keys, values = (x[first : i + 1, b, n // per_group] for x in (key, value))
                weights = (keys @ query[i, b, n] * scale).softmax(dim=0)
                out[i, b, n] = weights @ values
    return out.flatten(2)


@pytest.mark.parametrize("groups", [1, 2, 4])
@pytest.mark.parametrize("window", [0, 1, 3, 7, 100])
@pytest.mark.parametrize("kind", CORES)
def test_cores_against_a_loop(kind, window, groups):
    query, key, value = inputs(groups=groups)
    found = made(kind, window)(query, key, value)
    torch.testing.assert_close(found, naive(query, key, value, 0.25, window), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", CORES)
def test_a_core_without_dropout_drops_nothing(kind):
    query, key, value = inputs()
    core = kind(scale=0.25)
    found = core(query, key, value)
    assert core.training
    assert not core.drops
    assert torch.equal(found, made(kind)(query, key, value))


def test_torchs_dropout_in_a_core_is_refused_when_it_is_built():
    with pytest.raises(ValueError, match=r"dropout=Dropout\(p=0\.1.*layers\.Dropout\(p, Layout"):
        FusedAttention(scale=0.25, dropout=torch.nn.Dropout(0.1))
    torch.manual_seed(0)
    written_out = ReferenceAttention(scale=0.25, dropout=torch.nn.Dropout(1.0))
    assert not written_out(*inputs()).any()


@pytest.mark.parametrize("window", [0, 1, 3, 11, 16, 17, 32, 33])
def test_fused_equals_the_reference_with_gradients(window):
    results = []
    for kind in CORES:
        q, k, v = inputs(length=33)
        found = made(kind, window)(q, k, v)
        (found * torch.linspace(-1, 1, found.numel()).view(found.shape)).sum().backward()
        results.append((found, q.grad, k.grad, v.grad))
    for fused, reference in zip(*results, strict=True):
        torch.testing.assert_close(fused, reference, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", CORES)
def test_low_precision_stays_near_the_exact_result(kind):
    exact = made(kind)(*inputs(length=64))
    found = made(kind)(*(x.bfloat16() for x in inputs(length=64)))
    assert found.dtype == torch.bfloat16
    assert (found.float() - exact).norm() / exact.norm() < 1e-2


def test_window_counts_the_token_itself():
    seen = causal_mask(4, 2, torch.device("cpu"))
    expected = [[1, 0, 0, 0], [1, 1, 0, 0], [0, 1, 1, 0], [0, 0, 1, 1]]
    assert seen.int().tolist() == expected


@pytest.mark.parametrize("kind", CORES)
def test_dropout_acts_in_training_only_and_keeps_the_mean(kind):
    q, k, v = (x.detach() for x in inputs(length=16))
    core = made(kind, p=0.25)
    torch.manual_seed(1)
    mean = torch.stack([core(q, k, v) for _ in range(600)]).mean(0)
    kept = core.eval()(q, k, v)
    assert torch.equal(kept, made(kind)(q, k, v))
    assert (mean - kept).norm() / kept.norm() < 0.1
    assert not torch.equal(core.train()(q, k, v), kept)


def config(**changes):
    """A small grouped-query config."""
    sizes = {"vocab_size": 8, "num_layers": 1, "hidden_size": 48, "num_attention_heads": 6}
    return GPTConfig(**{**sizes, "num_query_groups": 2, "head_dim": 10, **changes})


def filled(module, std=0.3):
    """Give every parameter random values."""
    torch.manual_seed(2)
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter, std=std)
    return module


@pytest.mark.parametrize("norm", ["rmsnorm", "layernorm"])
@pytest.mark.parametrize("biases", [False, True])
def test_self_attention_written_out(biases, norm):
    cfg = config(
        add_bias_linear=biases, qk_layernorm=True, norm=norm, rotary=RotaryConfig(percent=0.6)
    )
    attention = filled(SelfAttention(cfg, 0, TorchBackend()))
    hidden = torch.randn(5, 2, 48)
    rotary = RotaryEmbedding(cfg.rotary_dim, cfg.rotary)(5, None, hidden.device)
    found = attention(hidden, rotary)

    weight = attention.linear_qkv.weight
    rows = torch.arange(cfg.qkv_size).view(2, 5, 10)  # groups of 3 query heads, key, value
    index = {"q": rows[:, :3].flatten(), "k": rows[:, 3].flatten(), "v": rows[:, 4].flatten()}

    def project(which):
        y = hidden @ weight[index[which]].t()
        if biases:
            y = y + attention.linear_qkv.bias[index[which]]
        return y.unflatten(-1, (-1, 10))

    query = rotary.rotate(attention.q_layernorm(project("q")))
    key = rotary.rotate(attention.k_layernorm(project("k")))
    context = naive(query, key, project("v"), 1 / math.sqrt(10), 0)
    expected = context @ attention.linear_proj.weight.t()
    if biases:
        expected = expected + attention.linear_proj.bias
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_rows_of_one_group_are_a_smaller_attention():
    """What a tensor-parallel shard relies on: group sizes are read from the weight that is held."""
    cfg = config()
    whole, hidden = filled(SelfAttention(cfg, 0, TorchBackend())), torch.randn(5, 2, 48)
    total = torch.zeros(5, 2, 48)
    for part in range(2):
        shard = SelfAttention(cfg, 0, TorchBackend())
        qkv, proj = whole.linear_qkv.weight, whole.linear_proj.weight
        shard.linear_qkv.weight = torch.nn.Parameter(qkv.chunk(2, dim=0)[part])
        shard.linear_proj.weight = torch.nn.Parameter(proj.chunk(2, dim=1)[part])
        total = total + shard(hidden)
    torch.testing.assert_close(total, whole(hidden), rtol=1e-4, atol=1e-5)


def test_biases_are_only_where_the_config_wants_them():
    qkv_only = SelfAttention(config(add_qkv_bias=True), 0, TorchBackend())
    assert qkv_only.linear_qkv.bias is not None
    assert qkv_only.linear_proj.bias is None
    assert SelfAttention(config(), 0, TorchBackend()).linear_qkv.bias is None


def test_window_pattern_reaches_the_cores():
    cfg = config(num_layers=3, window_size=4, window_pattern="SF")
    cores = [SelfAttention(cfg, i, TorchBackend()).core_attention for i in range(3)]
    assert [core.window_size for core in cores] == [4, 0, 4]


def test_the_core_can_be_replaced():
    attention, hidden = filled(SelfAttention(config(), 0, TorchBackend())), torch.randn(5, 2, 48)

    class First(torch.nn.Module):
        def forward(self, query, key, value, sequence):
            return query.flatten(2)

    attention.core_attention = First()
    assert attention(hidden).shape == (5, 2, 48)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("window", "kernels"),
    [
        (0, [SDPBackend.FLASH_ATTENTION]),
        (256, [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION]),
    ],
)
def test_a_fused_kernel_serves_grouped_queries_on_the_gpu(window, kernels):
    """With all other kernels forbidden, it runs, and agrees with the reference in float32."""
    fast = [x.detach().cuda().bfloat16() for x in inputs(1024, heads=8, groups=2, dim=64)]
    fast = [x.requires_grad_() for x in fast]
    with sdpa_kernel(kernels):
        found = made(FusedAttention, window)(*fast)
        found.float().square().sum().backward()
    slow = [x.detach().float().requires_grad_() for x in fast]
    expected = made(ReferenceAttention, window)(*slow)
    expected.square().sum().backward()
    assert (found - expected).norm() / expected.norm() < 1e-2
    for low, exact in zip(fast, slow, strict=True):
        assert (low.grad - exact.grad).norm() / exact.grad.norm() < 2e-2
