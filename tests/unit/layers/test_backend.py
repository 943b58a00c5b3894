"""The back-end seam: refusals at build time, and a network from a foreign back end."""

from dataclasses import dataclass

import pytest
import torch

from megatron_lightning.config import GPTConfig
from megatron_lightning.layers import LayerNorm, RMSNorm, TorchBackend, check_supported
from megatron_lightning.models import GPTNetwork

SIZES = {"vocab_size": 8, "num_layers": 2, "hidden_size": 32, "num_attention_heads": 4}


@dataclass(frozen=True, kw_only=True)
class Narrow(TorchBackend):
    """A back end that can do only one norm."""

    name: str = "narrow"

    def supports(self, config):
        if config.norm == "rmsnorm":
            return []
        return [f"norm={config.norm!r} has no kernel; use 'rmsnorm'"]


def test_config_errors_and_refusals_come_together():
    config = GPTConfig(**SIZES, norm="layernorm", hidden_dropout=2.0)
    with pytest.raises(ValueError, match=r"hidden_dropout=2.0") as error:
        check_supported(Narrow(), config)
    assert "back end 'narrow': norm='layernorm' has no kernel; use 'rmsnorm'" in str(error.value)


def test_a_network_asks_its_back_end_before_it_builds():
    with pytest.raises(ValueError, match="back end 'narrow'"):
        GPTNetwork(GPTConfig(**SIZES, norm="layernorm"), Narrow())
    assert GPTNetwork(GPTConfig(**SIZES), Narrow()).config.norm == "rmsnorm"


def test_norms_by_config():
    backend = TorchBackend()
    assert isinstance(backend.norm(GPTConfig(**SIZES), 4), RMSNorm)
    norm = backend.norm(GPTConfig(**SIZES, norm="layernorm", norm_epsilon=1e-3), 4)
    assert isinstance(norm, LayerNorm)
    assert norm.epsilon == 1e-3


def test_every_parameter_and_nothing_else_has_initial_values():
    config = GPTConfig(
        **SIZES, norm="layernorm", add_bias_linear=True, position_embedding="learned"
    )
    network = GPTNetwork(config, device="meta")
    for path, module in network.named_modules():
        own = {name for name, _ in module.named_parameters(recurse=False)}
        if own:
            assert own <= set(module.initials), path
    assert not list(network.buffers())
    assert all(p.device == torch.device("meta") for p in network.parameters())
