"""Latent attention against formulas written out head by head, and its cores against each other."""

import math

import pytest
import torch
from torch import Tensor

from megatron_lightning.config import GPTConfig, LatentAttentionConfig, RotaryConfig
from megatron_lightning.layers import RotaryEmbedding, SequenceInfo, TorchBackend
from megatron_lightning.layers.latent_attention import LatentAttention, score_factor

YARN = RotaryConfig(
    interleaved=True,
    scaling="yarn",
    factor=4.0,
    original_max_position_embeddings=16,
    mscale_all_dim=0.7,
)
SIZES = dict(kv_lora_rank=10, qk_head_dim=6, qk_pos_emb_head_dim=4)


def config(q_lora_rank: int = 8, v_head_dim: int = 5, **changes: object) -> GPTConfig:
    latent = LatentAttentionConfig(**SIZES, q_lora_rank=q_lora_rank, v_head_dim=v_head_dim)
    sizes = dict(vocab_size=32, num_layers=2, hidden_size=24, num_attention_heads=3)
    return GPTConfig(**{**sizes, "rotary": YARN, "latent_attention": latent, **changes})


def built(made: GPTConfig, attention: str = "reference") -> LatentAttention:
    torch.manual_seed(0)
    layer = LatentAttention(made, 0, TorchBackend(attention=attention))
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    return layer


def normed(x: Tensor, weight: Tensor) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight


def turned(x: Tensor, angle: Tensor) -> Tensor:
    """Neighbouring elements as one complex number, turned by the angles (S, R / 2)."""
    pairs = torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous())
    return torch.view_as_real(pairs * torch.polar(torch.ones_like(angle), angle)).flatten(-2)


def written_out(layer: LatentAttention, hidden: Tensor, made: GPTConfig) -> Tensor:
    """One sample (S, H), head by head, from the formulas of the paper."""
    weights = dict(layer.named_parameters())
    latent = layer.latent
    tables = RotaryEmbedding(made.rotary_dim, made.rotary)(len(hidden), None, torch.device("cpu"))
    angle = torch.atan2(tables.sin, tables.cos)[:, 0]
    query = hidden
    if latent.q_lora_rank:
        query = normed(
            hidden @ weights["linear_q_down_proj.weight"].t(), weights["q_layernorm.weight"]
        )
        query = query @ weights["linear_q_up_proj.weight"].t()
    else:
        query = query @ weights["linear_q_proj.weight"].t()
    down = hidden @ weights["linear_kv_down_proj.weight"].t()
    compressed, shared = down[:, : latent.kv_lora_rank], down[:, latent.kv_lora_rank :]
    compressed = normed(compressed, weights["kv_layernorm.weight"])
    up = compressed @ weights["linear_kv_up_proj.weight"].t()
    rotated = turned(shared, angle)
    heads = []
    log = 0.1 * math.log(YARN.factor)
    scale = (log * YARN.mscale_all_dim + 1) ** 2 / math.sqrt(latent.query_dim)
    factor = (log * YARN.mscale + 1) / (log * YARN.mscale_all_dim + 1)
    for head in range(made.num_attention_heads):
        own_query = query[:, head * latent.query_dim :][:, : latent.query_dim]
        size = latent.qk_head_dim + latent.v_head_dim
        own_key, value = up[:, head * size :][:, :size].split((latent.qk_head_dim, size - 6), -1)
        plain = own_query[:, : latent.qk_head_dim] @ own_key.t()
        position = turned(own_query[:, latent.qk_head_dim :], angle) @ rotated.t() * factor**2
        scores = (plain + position) * scale
        scores = scores.masked_fill(torch.ones_like(scores).triu(1).bool(), -torch.inf)
        heads.append(scores.softmax(-1) @ value)
    return torch.cat(heads, -1) @ weights["linear_proj.weight"].t()


@pytest.mark.parametrize("v_head_dim", [5, 12])
@pytest.mark.parametrize("q_lora_rank", [0, 8])
def test_formulas(q_lora_rank: int, v_head_dim: int) -> None:
    made = config(q_lora_rank, v_head_dim)
    assert made.check() == []
    layer = built(made)
    hidden = torch.randn(7, 2, 24)
    tables = RotaryEmbedding(made.rotary_dim, made.rotary)(7, None, torch.device("cpu"))
    found = layer(hidden, tables)
    expected = torch.stack([written_out(layer, x, made) for x in hidden.unbind(1)], 1)
    torch.testing.assert_close(found, expected, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("window", [0, 3])
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("v_head_dim", [5, 12])
def test_fused_cores(v_head_dim: int, packed: bool, window: int) -> None:
    """Values of another size than queries and keys; with gradients."""
    made = config(v_head_dim=v_head_dim, window_size=window)
    sequence = SequenceInfo(((3, 5), (8,))) if packed else None
    tables = RotaryEmbedding(made.rotary_dim, made.rotary)(8, None, torch.device("cpu"))
    hidden = torch.randn(8, 2, 24)
    seen = []
    for attention in ("reference", "fused"):
        layer = built(made, attention)
        x = hidden.clone().requires_grad_()
        out = layer(x, tables, sequence)
        out.square().sum().backward()
        seen.append((out.detach(), x.grad))
    torch.testing.assert_close(seen[1], seen[0], rtol=1e-4, atol=1e-4)


def test_factor_on_scores() -> None:
    assert score_factor(RotaryConfig(interleaved=True)) == 1.0
    assert score_factor(YARN) == pytest.approx((0.07 * math.log(4.0) + 1) ** 2)


def test_interleaved_pairs_are_the_halves_in_another_order() -> None:
    """So scores of a model don't change when both its queries and keys are reordered."""
    x = torch.randn(5, 2, 3, 8)
    order = torch.tensor([0, 2, 4, 6, 1, 3, 5, 7])
    halves = RotaryEmbedding(8, RotaryConfig())(5, None, torch.device("cpu"))
    pairs = RotaryEmbedding(8, RotaryConfig(interleaved=True))(5, None, torch.device("cpu"))
    assert torch.equal(pairs.rotate(x), halves.rotate(x[..., order]))
