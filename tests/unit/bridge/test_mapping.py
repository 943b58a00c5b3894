"""Forms move every element where an independent torch expression moves it, box by box, and back."""

import random
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_lightning.bridge import (
    FAMILIES,
    Form,
    Fused,
    PackedQKV,
    Piece,
    Rearranged,
    Rule,
    Same,
    Stacked,
    Transposed,
    apply_rules,
)
from megatron_lightning.checkpoint import Box
from megatron_lightning.config import (
    AttentionConfig,
    ClampConfig,
    GPTConfig,
    LatentAttentionConfig,
    MoEConfig,
    MultiTokenPredictionConfig,
    StreamConfig,
)
from megatron_lightning.models import GPTModel

HEADS, GROUPS, DIM, HIDDEN = 6, 2, 4, 5


def packed(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    parts = [x.unflatten(0, (GROUPS, -1, DIM)) for x in (query, key, value)]
    return torch.cat(parts, dim=1).flatten(0, 2)


def split(x: Tensor) -> list[Tensor]:
    return list(x.split([HEADS * DIM, GROUPS * DIM, GROUPS * DIM]))


QKV = PackedQKV(HEADS, GROUPS, DIM)
ROWS = (HEADS + 2 * GROUPS) * DIM
CASES = {
    "same": (Same(), (4, 3), lambda x: x),
    "stacked": (Stacked(2), (2, 4, 3), lambda a, b: torch.stack((a, b))),
    "stacked bias": (Stacked(2), (2, 4), lambda a, b: torch.stack((a, b))),
    "qkv": (QKV, (ROWS, HIDDEN), packed),
    "qkv bias": (QKV, (ROWS,), packed),
    "fused qkv": (Fused(QKV), (ROWS, HIDDEN), lambda x: packed(*split(x))),
    "fused halves": (Fused(Stacked(2)), (2, 4, 3), lambda x: x.unflatten(0, (2, -1))),
    "transposed": (Transposed(), (4, 3), lambda x: x.t()),
    "transposed bias": (Transposed(), (4,), lambda x: x),
    "gpt2": (Transposed(Fused(QKV)), (ROWS, HIDDEN), lambda x: packed(*split(x.t()))),
    "gpt2 bias": (Transposed(Fused(QKV)), (ROWS,), lambda x: packed(*split(x))),
    "experts": (Stacked(3), (3, 4, 2), lambda *x: torch.stack(x)),
    "gated experts": (
        Stacked(3, Stacked(2)),
        (3, 2, 4, 5),
        lambda *x: torch.stack(x).unflatten(0, (3, 2)),
    ),
    "gated experts in turns": (
        Rearranged(((0,), (3,), (2, 1))),
        (3, 2, 4, 5),
        lambda x: torch.stack((x[..., ::2], x[..., 1::2]), 1).transpose(-1, -2),
    ),
    "their biases": (
        Rearranged(((0,), (2, 1))),
        (3, 2, 4),
        lambda x: torch.stack((x[..., ::2], x[..., 1::2]), 1),
    ),
    "halves of experts": (
        Rearranged(((0,), (3,), (1, 2))),
        (3, 2, 4, 5),
        lambda x: torch.stack((x[..., :4], x[..., 4:]), 1).transpose(-1, -2),
    ),
    "experts transposed": (
        Rearranged(((0,), (2,), (1,))),
        (3, 4, 5),
        lambda x: x.transpose(-1, -2),
    ),
}


def seen(piece: Piece, tensor: Tensor) -> Tensor:
    return tensor if piece.view is None else tensor.view(piece.view)


def gather(form: Form, box: Box, shape: tuple[int, ...], theirs: list[Tensor]) -> Tensor:
    """The box of our tensor, put together from pieces."""
    ours = torch.full(box.sizes, torch.nan)
    for piece in form.pieces(shape):
        held = piece.cut(box)
        if held is not None:
            place = held.ours.shift(box.offsets, sign=-1).slices()
            assert ours[place].isnan().all(), "pieces overlap"
            ours[place] = held.to_ours(seen(held, theirs[held.source])[held.theirs.slices()])
    return ours


@pytest.mark.parametrize("case", CASES)
def test_any_box_and_back(case: str) -> None:
    form, shape, expression = CASES[case]
    theirs = [torch.randn(s) for s in form.shapes(shape)]
    whole = expression(*theirs)
    assert tuple(whole.shape) == shape
    assert torch.equal(gather(form, Box.whole(shape), shape, theirs), whole)
    draw = random.Random(case)
    for _ in range(20):
        offsets = tuple(draw.randrange(size) for size in shape)
        sizes = tuple(draw.randint(1, s - o) for s, o in zip(shape, offsets, strict=True))
        box = Box(offsets, sizes)
        assert torch.equal(gather(form, box, shape, theirs), whole[box.slices()])
    back = [torch.full_like(tensor, torch.nan) for tensor in theirs]
    for piece in form.pieces(shape):
        place = seen(piece, back[piece.source])[piece.theirs.slices()]
        place.copy_(piece.to_theirs(whole[piece.ours.slices()]))
    assert all(torch.equal(a, b) for a, b in zip(back, theirs, strict=True))


GEMMA: dict[str, Any] = {
    "window_size": 3,
    "stream": StreamConfig(embedding_scale=4.0, zero_centered_norm=True, branch_norm=True),
}
CHANGES: dict[str, dict[str, Any]] = {
    "gpt2": {
        "num_query_groups": 4,
        "norm": "layernorm",
        "gated_linear_unit": False,
        "add_bias_linear": True,
        "position_embedding": "learned",
        "activation": "gelu_tanh",
    },
    "deepseek_v3": {
        "num_query_groups": 4,
        "latent_attention": LatentAttentionConfig(
            kv_lora_rank=6, q_lora_rank=5, qk_head_dim=3, qk_pos_emb_head_dim=2, v_head_dim=4
        ),
        "moe": MoEConfig(
            num_experts=4,
            ffn_hidden_size=8,
            shared_expert_ffn_hidden_size=16,
            first_dense_layers=1,
            router_score_function="sigmoid",
            router_num_groups=2,
            router_group_topk=1,
            expert_bias=True,
        ),
        "multi_token_prediction": MultiTokenPredictionConfig(num_layers=2),
    },
    "mixtral": {"moe": MoEConfig(num_experts=4)},
    "qwen3_moe": {
        "qk_layernorm": True,
        "moe": MoEConfig(num_experts=4, ffn_hidden_size=8, layer_pattern="DE"),
    },
    "gpt_oss": {
        "add_bias_linear": True,
        "attention": AttentionConfig(sinks=True),
        "clamp": ClampConfig(),
        "moe": MoEConfig(num_experts=4, router_bias=True),
    },
    "qwen2": {"add_qkv_bias": True},
    "qwen3": {"qk_layernorm": True},
    "gemma2": GEMMA,
    "gemma3_text": {**GEMMA, "qk_layernorm": True},
}


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("name", sorted(FAMILIES))
def test_tables_hold_every_parameter_of_their_networks(name: str, tied: bool) -> None:
    family = FAMILIES[name]
    sizes = dict(vocab_size=33, num_layers=2, hidden_size=16, num_attention_heads=4)
    changes = {"num_query_groups": 2, **CHANGES.get(name, {})}
    config = GPTConfig(**sizes, **changes, tie_word_embeddings=tied)
    assert family.expresses(config) is None
    shapes = {n.removeprefix("network."): s for n, s in GPTModel(config).global_shapes().items()}
    table = apply_rules(family.rules(config), shapes)
    assert table.entries.keys() == shapes.keys()
    assert sum(Box.whole(s).numel for s in table.theirs.values()) == config.num_parameters()


def test_a_parameter_without_a_rule_is_named() -> None:
    rules = [Rule("layers.{layer}.weight", "h.{layer}.w")]
    table = apply_rules(rules, {"layers.11.weight": (2, 3)})
    assert table.theirs == {"h.11.w": (2, 3)}
    with pytest.raises(ValueError, match=r"no rule .*layers\.0\.bias"):
        apply_rules(rules, {"layers.0.bias": (2,)})
