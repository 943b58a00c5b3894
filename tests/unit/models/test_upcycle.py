"""A dense model becomes one with experts, and begins where it was."""

from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_lightning.config import GPTConfig, MoEConfig
from megatron_lightning.models import GPTModel, upcycle

SIZES: dict[str, Any] = {
    "vocab_size": 61,
    "num_layers": 3,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "ffn_hidden_size": 48,
    "init_method_std": 0.1,
}
TOKENS = torch.randint(0, 61, (2, 9), generator=torch.Generator().manual_seed(1))


def dense_model(**changes: Any) -> GPTModel:
    model = GPTModel(GPTConfig(**{**SIZES, **changes}))
    model.configure_model()
    return model


@pytest.mark.parametrize(
    ("model", "moe"),
    [
        ({}, {}),
        ({"tie_word_embeddings": True}, {"router_topk": 4, "layer_pattern": "DE"}),
        (
            {"add_bias_linear": True, "gated_linear_unit": False, "norm": "layernorm"},
            {"router_score_function": "sigmoid", "router_bias": True},
        ),
        (
            {},
            {
                "router_score_function": "sigmoid",
                "expert_bias": True,
                "load_balancing": "none",
                "first_dense_layers": 1,
            },
        ),
    ],
)
def test_logits_stay(model: dict[str, Any], moe: dict[str, Any]) -> None:
    dense = dense_model(**model)
    made = upcycle(dense, MoEConfig(num_experts=6, **moe), seed=4)
    with torch.no_grad():
        torch.testing.assert_close(made(TOKENS), dense(TOKENS), rtol=1e-4, atol=1e-5)
    state = made.built_network().state_dict()
    experts = [name for name in state if ".experts.linear_fc1.weight" in name]
    assert len(experts) == made.config.num_moe_layers
    for name in experts:
        source = dense.built_network().state_dict()[name.replace(".experts", "")]
        assert all(torch.equal(expert, source) for expert in state[name])
    routers = [state[name] for name in state if name.endswith("router.weight")]
    assert all(0.08 < float(router.std()) < 0.12 for router in routers)
    assert len({float(router.sum()) for router in routers}) == len(routers)


def test_routers_follow_the_seed() -> None:
    dense = dense_model()
    moe = MoEConfig(num_experts=6)
    name = "decoder.layers.0.mlp.router.weight"
    first, same, other = (
        upcycle(dense, moe, seed=seed).built_network().state_dict()[name] for seed in (1, 1, 2)
    )
    assert torch.equal(first, same)
    assert not torch.equal(first, other)


def test_from_a_folder_of_hugging_face(golden: Path) -> None:
    """Nothing is read before the network is built."""
    folder = golden / "models" / "llama"
    dense = GPTModel.from_hf(folder)
    made = upcycle(dense, MoEConfig(num_experts=4))
    assert dense.network is None
    assert made.network is None
    tokens = torch.randint(0, made.config.vocab_size, (2, 9))
    with torch.no_grad():
        torch.testing.assert_close(made(tokens), dense(tokens), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"ffn_hidden_size": 24}, "moe.ffn_hidden_size=24.*width 48"),
        ({"latent_size": 8}, "moe.latent_size=8"),
        ({"shared_expert_ffn_hidden_size": 8}, "moe.shared_expert_ffn_hidden_size=8"),
        ({"router_topk": 7}, "router_topk=7"),
    ],
)
def test_what_has_no_source_is_refused(changes: dict[str, Any], words: str) -> None:
    dense = GPTModel(GPTConfig(**SIZES))
    with pytest.raises(ValueError, match=words):
        upcycle(dense, MoEConfig(num_experts=6, **changes))
    sparse = GPTModel(GPTConfig(**SIZES, moe=MoEConfig(num_experts=6)))
    with pytest.raises(ValueError, match="has 6 experts already"):
        upcycle(sparse, MoEConfig(num_experts=6))


def test_every_box_is_a_part_of_the_whole() -> None:
    """What a rank of any layout reads: its experts, its columns."""
    dense = dense_model()
    made = upcycle(dense, MoEConfig(num_experts=6))
    whole = made.built_network().state_dict()
    source = made.initial_values
    assert source is not None
    for name in ("experts.linear_fc1.weight", "experts.linear_fc2.weight", "router.weight"):
        name = f"decoder.layers.1.mlp.{name}"
        shape = whole[name].shape
        offsets = [size // 2 if dim != 1 else 0 for dim, size in enumerate(shape)]
        sizes = [size - offset for size, offset in zip(shape, offsets, strict=True)]
        box = torch.empty(sizes)
        source.fill(box, name, offsets, sizes)
        part = tuple(slice(o, o + s) for o, s in zip(offsets, sizes, strict=True))
        assert torch.equal(box, whole[name][part]), name
