"""What layers with experts keep: the accounting against what autograd saves, on the CPU."""

from typing import Any

import pytest
import torch
from torch import nn

from megatron_lightning.config import GPTConfig, MoEConfig
from megatron_lightning.config.activations import (
    layer_rows,
)
from megatron_lightning.config.saved_tensors import ActivationSizes, kept_bytes_per_token
from megatron_lightning.layers.moe.layer import MoELayer
from megatron_lightning.layers.torch_backend import TorchBackend
from tests.saved_bytes import saved_bytes

SEQUENCE, BATCH = 128, 2
MODELS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "dropless": ({}, {}),
    "shared": (
        dict(
            shared_expert_ffn_hidden_size=64,
            shared_expert_gate=True,
            router_score_function="sigmoid",
        ),
        {},
    ),
    "gelu": ({}, dict(activation="gelu", gated_linear_unit=False)),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("model", MODELS)
def test_a_layer_of_experts(model: str, dtype: torch.dtype) -> None:
    moe, changes = MODELS[model]
    config = GPTConfig(
        vocab_size=1000,
        num_layers=2,
        hidden_size=256,
        num_attention_heads=8,
        num_query_groups=2,
        ffn_hidden_size=704,
        moe=MoEConfig(num_experts=8, ffn_hidden_size=128, **moe),
        **changes,
    )
    layer = MoELayer(config, TorchBackend())
    for parameter in layer.parameters():
        nn.init.normal_(parameter, std=0.02)
    layer = layer.to(dtype)
    hidden = torch.randn(SEQUENCE, BATCH, 256, dtype=dtype, requires_grad=True)
    measured = saved_bytes(lambda: layer(hidden))
    sizes = ActivationSizes(bytes_per_element=dtype.itemsize, fused_norm=False)
    rows = [
        row
        for row in layer_rows(config, sizes, experts=True)
        if row.name not in ("orders of rows", "hidden between")  # held beside the graph; not here
        and all(path.startswith("mlp") for path in (*row.kept_by, *row.enters))
        and not row.name.startswith("pre_mlp_layernorm")
    ]
    estimated = kept_bytes_per_token(rows) * SEQUENCE * BATCH
    print(f"{estimated:.0f} estimated, {measured} measured")
    assert estimated == pytest.approx(measured, rel=0.03)
