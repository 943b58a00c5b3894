"""Layers of experts on CUDA: the grouped product against the loop, and no wait of the host.

pytest tests/gpu/test_moe_cuda.py -m gpu -s
"""

import copy
import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megatron_lightning.config import GPTConfig, MoEConfig
from megatron_lightning.layers.moe import ExpertLinear, MoELayer
from megatron_lightning.layers.moe.experts import (
    can_group,
    expert_product,
    expert_weight_gradient,
)
from megatron_lightning.layers.torch_backend import TorchBackend
from megatron_lightning.parallel.random import Normal

pytestmark = pytest.mark.gpu

H, F_, E, K = 256, 96, 8, 2
LAYERS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "plain": ({}, {}),
    "losses_and_bias": (
        {
            "router_score_function": "sigmoid",
            "router_num_groups": 4,
            "router_group_topk": 2,
            "load_balancing": "seq_aux_loss",
            "aux_loss_coeff": 0.1,
            "z_loss_coeff": 0.1,
            "expert_bias": True,
        },
        {},
    ),
    "gelu_with_biases": (
        {"router_bias": True},
        {"add_bias_linear": True, "gated_linear_unit": False, "activation": "gelu"},
    ),
    "shared_latent": ({"shared_expert_ffn_hidden_size": 128, "latent_size": 128}, {}),
    "dropped": ({"capacity_factor": 0.5}, {}),
    "padded": (
        {"capacity_factor": 1.0, "pad_to_capacity": True, "drop_policy": "position"},
        {},
    ),
    "sinkhorn": ({"load_balancing": "sinkhorn"}, {}),
    "forced": ({"load_balancing": "forced"}, {}),
}


def make(name: str) -> MoELayer:
    moe, model = LAYERS[name]
    config = GPTConfig(
        **{
            "vocab_size": 10,
            "num_layers": 2,
            "hidden_size": H,
            "num_attention_heads": 4,
            "moe": MoEConfig(num_experts=E, router_topk=K, ffn_hidden_size=F_, **moe),
            **model,
        }
    )
    layer = MoELayer(config, TorchBackend())
    torch.manual_seed(1)
    for parameter in layer.parameters():
        nn.init.normal_(parameter, std=0.05)
    return layer.cuda()


def run(layer: MoELayer, hidden: Tensor, weight: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    x = hidden.detach().requires_grad_()
    out = layer(x)
    (out.float() * weight).sum().backward()
    assert x.grad is not None
    grads = {"input": x.grad}
    for name, parameter in layer.named_parameters():
        assert parameter.grad is not None, name
        grads[name] = parameter.grad
    return out, grads


@pytest.mark.parametrize("name", LAYERS)
def test_bfloat16_against_float64_of_the_same_numbers(name: str) -> None:
    """The reference routes with the low-precision layer's choice, which rounding may change."""
    low = make(name).bfloat16()
    high = copy.deepcopy(low).double()
    high.router.config = dataclasses.replace(high.router.config, router_dtype="float64")
    hidden = torch.randn(64, 4, H, device="cuda").bfloat16()
    weight = torch.randn(64, 4, H, device="cuda")
    low.router.logits = rounded(low.router.logits)
    high.router.logits = rounded(high.router.logits)
    out, grads = run(low, hidden, weight)
    want, expected = run(high, hidden.double(), weight.double())
    assert error(out, want) < 1e-2
    for key, grad in grads.items():
        print(f"{name} {key}: {error(grad, expected[key]):.2e}")
        assert error(grad, expected[key]) < 3e-2, key


def rounded(logits: Any) -> Any:
    """Logits of few bits, so that both layers order experts alike; gradients pass."""

    def call(hidden: Tensor) -> Tensor:
        exact = logits(hidden)
        coarse = (exact.detach() * 64).round() / 64
        # Ties would be broken by chance: experts differ by a little.
        spread = torch.arange(exact.shape[1], device=exact.device, dtype=exact.dtype) / 4096
        return exact + (coarse + spread - exact.detach())

    return call


def error(got: Tensor, want: Tensor) -> float:
    return float((got.double() - want.double()).norm() / (want.double().norm() + 1e-12))


@pytest.mark.parametrize("counts", [[0, 1, 7, 33, 0, 200, 15, 0], [0] * 8, [256] + [0] * 7])
def test_grouped_product_equals_the_loop(counts: list[int]) -> None:
    linear = ExpertLinear(8, 128, (2, 64), bias=False, initial=Normal(0.02))
    nn.init.normal_(linear.weight, std=0.1)
    grouped = linear.cuda().bfloat16()
    single = copy.deepcopy(grouped).float()
    rows = torch.randn(sum(counts) + 5, 128, device="cuda").bfloat16()
    numbers = torch.tensor(counts, device="cuda")
    assert can_group(rows, grouped.weight.view(8, -1, 128))
    used = sum(counts)
    weight = torch.randn(used, 2, 64, device="cuda")
    (grouped(rows, numbers)[:used].float() * weight).sum().backward()
    (single(rows.float(), numbers)[:used] * weight).sum().backward()
    assert grouped.weight.grad is not None
    assert single.weight.grad is not None
    assert error(grouped.weight.grad, single.weight.grad) < 1e-2
    for expert, count in enumerate(counts):
        if count == 0:
            assert grouped.weight.grad[expert].abs().max() == 0


@pytest.mark.parametrize("name", LAYERS)
def test_the_host_waits_for_nothing(name: str) -> None:
    layer = make(name).bfloat16()
    hidden = torch.randn(64, 4, H, device="cuda").bfloat16()
    weight = torch.randn(64, 4, H, device="cuda")
    run(layer, hidden, weight)  # statistics and workspaces are made
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        run(layer, hidden, weight)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("counts", [[0, 1, 7, 33, 0, 200, 15, 0], [256] + [0] * 7])
def test_gradients_put_off_equal_those_at_once(counts: list[int]) -> None:
    """The grouped products that a split backward uses, against autograd's own."""
    torch.manual_seed(2)
    weight = torch.randn(8, 64, 128, device="cuda").bfloat16()
    rows = torch.randn(sum(counts) + 5, 128, device="cuda").bfloat16().requires_grad_()
    numbers = torch.tensor(counts, device="cuda")
    leaf = weight.clone().requires_grad_()
    y = expert_product(rows, leaf, numbers)
    grad = torch.randn_like(y)
    y.backward(grad)
    used = sum(counts)
    assert leaf.grad is not None
    assert rows.grad is not None
    later = expert_weight_gradient(grad, rows.detach(), weight, numbers)
    assert error(later, leaf.grad) < 1e-3
    back = expert_product(grad, weight.transpose(-2, -1), numbers)
    assert error(back[:used], rows.grad[:used]) < 1e-3
