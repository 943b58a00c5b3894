"""Rules and counts of latent attention and multi-token prediction."""

import math
import re
from dataclasses import replace

import pytest

from megatron_lightning.config import (
    GPTConfig,
    LatentAttentionConfig,
    MoEConfig,
    MultiTokenPredictionConfig,
    RotaryConfig,
)
from megatron_lightning.models import GPTModel

LATENT = LatentAttentionConfig(kv_lora_rank=12, q_lora_rank=8, qk_head_dim=6, v_head_dim=10)
SIZES = dict(vocab_size=40, num_layers=3, hidden_size=32, num_attention_heads=4)


def config(**changes: object) -> GPTConfig:
    return GPTConfig(**{**SIZES, "latent_attention": LATENT, **changes})


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"head_dim": 16}, "head_dim=16 with latent_attention.*= 70"),
        ({"num_query_groups": 2}, "num_query_groups=2 with latent_attention"),
        ({"position_embedding": "learned"}, "position_embedding='learned' with latent_attention"),
        ({"rotary": RotaryConfig(percent=0.5)}, "rotary.percent=0.5 with latent_attention"),
        ({"qk_layernorm": True}, "qk_layernorm=True with latent_attention"),
        ({"add_bias_linear": True}, "add_bias_linear=True with latent_attention"),
        ({"add_qkv_bias": True}, "add_qkv_bias=True with latent_attention"),
        (
            {"latent_attention": replace(LATENT, qk_pos_emb_head_dim=5)},
            "qk_pos_emb_head_dim=5 must be even",
        ),
        (
            {"latent_attention": replace(LATENT, kv_lora_rank=0)},
            "kv_lora_rank=0 must be at least 1",
        ),
        (
            {"multi_token_prediction": MultiTokenPredictionConfig(num_layers=0)},
            "multi_token_prediction.num_layers=0",
        ),
        (
            {"multi_token_prediction": MultiTokenPredictionConfig(loss_scaling_factor=-1.0)},
            "loss_scaling_factor=-1.0",
        ),
    ],
)
def test_what_does_not_fit_is_named(changes: dict[str, object], text: str) -> None:
    (problem,) = config(**changes).check()
    assert re.search(text, problem), problem


def test_learned_positions_without_latent_attention_are_refused_for_predictions() -> None:
    made = GPTConfig(
        **SIZES,
        position_embedding="learned",
        multi_token_prediction=MultiTokenPredictionConfig(),
    )
    (problem,) = made.check()
    assert "position_embedding='learned' with multi_token_prediction" in problem


@pytest.mark.parametrize("moe", [None, MoEConfig(num_experts=4, first_dense_layers=1)])
@pytest.mark.parametrize("q_lora_rank", [0, 8])
@pytest.mark.parametrize("norm", ["rmsnorm", "layernorm"])
def test_counted_parameters_are_those_of_the_network(
    norm: str, q_lora_rank: int, moe: MoEConfig | None
) -> None:
    made = config(
        norm=norm,
        moe=moe,
        latent_attention=replace(LATENT, q_lora_rank=q_lora_rank),
        multi_token_prediction=MultiTokenPredictionConfig(num_layers=2),
    )
    assert made.check() == []
    shapes = GPTModel(made).global_shapes().values()
    assert made.num_parameters() == sum(map(math.prod, shapes))


def test_floating_point_operations() -> None:
    """Counted by hand: products with weights 6 each, scores and values of all heads."""
    made = config(ffn_hidden_size=48)
    latent = LATENT.matmul_weights(32, 4)
    assert latent == 32 * 8 + 8 * 4 * 70 + 32 * (12 + 64) + 12 * 4 * 16 + 40 * 32
    layer = latent + 3 * 32 * 48
    attention = 6 * 4 * (70 + 10) * 100
    assert made.flops_per_token(100) == 6 * (3 * layer + 40 * 32) + 3 * attention
    further = made.with_changes(multi_token_prediction=MultiTokenPredictionConfig())
    added = 6 * (layer + 40 * 32 + 2 * 32 * 32) + attention
    assert further.flops_per_token(100) == made.flops_per_token(100) + added


def test_both_pass_through_plain_values() -> None:
    made = config(multi_token_prediction=MultiTokenPredictionConfig(num_layers=2))
    assert GPTConfig.from_dict(made.to_dict()) == made
    assert made.head_dim == 70
    assert made.with_changes(latent_attention=replace(LATENT, qk_head_dim=10)).head_dim == 74
    assert made.with_changes(latent_attention=None).head_dim == 8
