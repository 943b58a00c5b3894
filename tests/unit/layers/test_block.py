"""One transformer layer: residual branches, dropout, and the parameter names that checkpoints rely
on.
"""

import torch

from megatron_lightning.config import GPTConfig
from megatron_lightning.layers import TorchBackend, TransformerLayer


def made(**changes):
    """A layer with random weights."""
    sizes = {"vocab_size": 8, "num_layers": 2, "hidden_size": 32, "num_attention_heads": 4}
    layer = TransformerLayer(GPTConfig(**sizes, **changes), 0, TorchBackend())
    torch.manual_seed(0)
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return layer


def test_two_residual_branches():
    layer, x = made(), torch.randn(5, 2, 32)
    middle = x + layer.self_attention(layer.input_layernorm(x))
    expected = middle + layer.mlp(layer.pre_mlp_layernorm(middle))
    torch.testing.assert_close(layer(x), expected)


def test_dropout_of_everything_leaves_the_residual_stream():
    layer, x = made(hidden_dropout=0.999999), torch.randn(5, 2, 32)
    assert torch.equal(layer(x), x)
    assert not torch.equal(layer.eval()(x), x)


def test_parameter_names():
    names = {name for name, _ in made(qk_layernorm=True, add_bias_linear=True).named_parameters()}
    assert names == {
        "input_layernorm.weight",
        "self_attention.linear_qkv.weight",
        "self_attention.linear_qkv.bias",
        "self_attention.q_layernorm.weight",
        "self_attention.k_layernorm.weight",
        "self_attention.linear_proj.weight",
        "self_attention.linear_proj.bias",
        "pre_mlp_layernorm.weight",
        "mlp.linear_fc1.weight",
        "mlp.linear_fc1.bias",
        "mlp.linear_fc2.weight",
        "mlp.linear_fc2.bias",
    }
