"""MLP against its formula for every activation, gated and plain."""

import math

import pytest
import torch

from megatron_lightning.config import GPTConfig
from megatron_lightning.layers import MLP, TorchBackend
from megatron_lightning.parallel.random import Normal
from tests.saved_bytes import saved_bytes

FORMULAS = {
    "silu": lambda x: x / (1 + torch.exp(-x)),
    "gelu": lambda x: x * 0.5 * (1 + torch.erf(x / math.sqrt(2))),
    "gelu_tanh": lambda x: (
        0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))
    ),
    "relu": lambda x: x.clamp(min=0),
    "squared_relu": lambda x: x.clamp(min=0) ** 2,
}


def made(**changes):
    """An MLP of width 24 with random weights."""
    sizes = {"vocab_size": 8, "num_layers": 8, "hidden_size": 16, "num_attention_heads": 2}
    mlp = MLP(GPTConfig(**sizes, ffn_hidden_size=24, **changes), TorchBackend())
    torch.manual_seed(0)
    for parameter in mlp.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    return mlp


@pytest.mark.parametrize("biases", [False, True])
@pytest.mark.parametrize("activation", sorted(FORMULAS))
def test_plain(activation, biases):
    mlp = made(activation=activation, gated_linear_unit=False, add_bias_linear=biases)
    x = torch.randn(3, 2, 16)
    inner = x @ mlp.linear_fc1.weight.t() + (mlp.linear_fc1.bias if biases else 0)
    expected = FORMULAS[activation](inner) @ mlp.linear_fc2.weight.t()
    expected = expected + (mlp.linear_fc2.bias if biases else 0)
    torch.testing.assert_close(mlp(x), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("biases", [False, True])
@pytest.mark.parametrize("activation", sorted(FORMULAS))
def test_gated_with_the_gate_half_first(activation, biases):
    mlp = made(activation=activation, add_bias_linear=biases)
    assert mlp.linear_fc1.weight.shape == (2, 24, 16)
    x = torch.randn(3, 2, 16)
    gate_bias, up_bias = mlp.linear_fc1.bias if biases else (0, 0)
    gate = x @ mlp.linear_fc1.weight[0].t() + gate_bias
    up = x @ mlp.linear_fc1.weight[1].t() + up_bias
    expected = (FORMULAS[activation](gate) * up) @ mlp.linear_fc2.weight.t()
    expected = expected + (mlp.linear_fc2.bias if biases else 0)
    torch.testing.assert_close(mlp(x), expected, rtol=1e-5, atol=1e-5)


def test_a_part_of_the_width_is_a_smaller_mlp():
    whole, x = made(), torch.randn(3, 2, 16)
    total = torch.zeros(3, 2, 16)
    for part in range(2):
        shard = made()
        fc1, fc2 = whole.linear_fc1.weight, whole.linear_fc2.weight
        shard.linear_fc1.weight = torch.nn.Parameter(fc1.chunk(2, dim=1)[part].clone())
        shard.linear_fc2.weight = torch.nn.Parameter(fc2.chunk(2, dim=1)[part].clone())
        total = total + shard(x)
    torch.testing.assert_close(total, whole(x), rtol=1e-5, atol=1e-5)


def test_the_layer_that_ends_the_branch_starts_smaller():
    mlp = made(init_method_std=0.02)
    assert mlp.linear_fc1.initials["weight"] == Normal(0.02)
    assert mlp.linear_fc2.initials["weight"] == Normal(0.02 / 4)


@pytest.mark.parametrize(
    ("compiled", "biases", "frozen"),
    [
        (False, False, ""),
        (False, True, ""),
        (False, False, "linear_fc1.weight"),
        (False, False, "linear_fc2.weight"),
        pytest.param(True, True, "", marks=pytest.mark.slow),
    ],
)
def test_a_recomputed_activation_changes_no_bit(compiled, biases, frozen):
    torch._dynamo.reset()
    results = []
    for recomputed in (False, True):
        mlp = made(activation="silu", add_bias_linear=biases)
        mlp.activation.recomputed = recomputed
        if frozen:
            mlp.get_parameter(frozen).requires_grad_(False)
        call = torch.compile(mlp, backend="aot_eager", fullgraph=True) if compiled else mlp
        torch.manual_seed(1)
        x = torch.randn(3, 2, 16, requires_grad=True)
        call(x).square().sum().backward()
        results.append([x.grad, *(p.grad for p in mlp.parameters())])
    for want, got in zip(*results, strict=True):
        assert (want is None) == (got is None)
        assert want is None or torch.equal(want, got)


def test_a_recomputed_activation_is_not_kept():
    mlp, x = made(activation="silu"), torch.randn(3, 2, 16, requires_grad=True)
    rows = x[..., 0].numel() * 4
    everything = saved_bytes(lambda: mlp(x).sum())
    assert everything == rows * (16 + 2 * 24 + 24)
    mlp.activation.recomputed = True
    assert saved_bytes(lambda: mlp(x).sum()) == rows * (16 + 2 * 24)
    with torch.no_grad():
        assert torch.equal(mlp(x), made(activation="silu")(x))


@pytest.mark.parametrize("register", ["register_forward_hook", "register_forward_pre_hook"])
def test_a_recomputed_activation_is_called_while_it_has_hooks(register):
    mlp, x = made(activation="silu"), torch.randn(3, 2, 16, requires_grad=True)
    mlp.activation.recomputed = True
    wanted = mlp(x)
    seen = []
    handle = getattr(mlp.activation, register)(lambda module, args, *_: seen.append(args[0].shape))
    assert torch.equal(mlp(x), wanted)
    assert seen == [(3, 2, 2, 24)]
    handle.remove()
    mlp(x)
    assert len(seen) == 1


def test_what_a_hook_makes_of_a_recomputed_activation_counts():
    mlp, x = made(activation="silu"), torch.randn(3, 2, 16, requires_grad=True)
    mlp.activation.recomputed = True
    mlp.activation.register_forward_hook(lambda _, __, output: output * 0)
    assert not mlp(x).any()


def test_compiled_layers_call_an_activation_that_had_hooks_when_regions_were_set():
    torch._dynamo.reset()
    layers, seen = [made(activation="silu") for _ in range(3)], []
    for layer in layers:
        layer.activation.recomputed = True
    layers[1].activation.recomputed = False
    layers[1].activation.register_forward_hook(lambda *_: seen.append(1))
    x = torch.randn(3, 2, 16, requires_grad=True)
    for layer in layers:
        layer.compile(backend="aot_eager", fullgraph=True)
        assert torch.equal(layer(x), made(activation="silu")(x))
    assert seen == [1]
