"""Rules about experts, counts, and the round trip of the config."""

from typing import Any

import pytest

from megatron_lightning.config import GPTConfig, MoEConfig
from megatron_lightning.models import GPTNetwork
from megatron_lightning.models.presets import preset_config

SIZES: dict[str, Any] = {
    "vocab_size": 40,
    "num_layers": 4,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "ffn_hidden_size": 48,
}

BAD: list[tuple[dict[str, Any], list[str]]] = [
    ({"num_experts": 0, "router_topk": 0}, ["num_experts=0", "router_topk=0", "at least 1"]),
    ({"router_topk": 9}, ["router_topk=9", "num_experts=8", "at most"]),
    ({"router_score_function": "tanh"}, ["router_score_function='tanh'", "sigmoid"]),
    ({"router_dtype": "bfloat16"}, ["router_dtype='bfloat16'", "float64"]),
    ({"load_balancing": "luck"}, ["load_balancing='luck'", "sinkhorn"]),
    ({"drop_policy": "last"}, ["drop_policy='last'", "position"]),
    ({"drop_policy": "position"}, ["drop_policy='position'", "capacity_factor"]),
    ({"router_normalize_topk": False}, ["router_normalize_topk=False", "router_pre_softmax=True"]),
    (
        {"load_balancing": "forced", "router_num_groups": 2, "router_group_topk": 1},
        ["load_balancing='forced' with router_num_groups=2"],
    ),
    ({"layer_pattern": "EX"}, ["layer_pattern='EX'", "E (experts)"]),
    ({"layer_pattern": ""}, ["layer_pattern=''"]),
    ({"router_group_topk": 2}, ["router_group_topk=2", "router_num_groups"]),
    ({"router_group_best": 2}, ["router_group_best=2", "router_num_groups, which is 0"]),
    (
        {"router_num_groups": 3, "router_group_topk": 1},
        ["router_num_groups=3", "does not divide num_experts=8", "[1, 2, 4, 8]"],
    ),
    ({"router_num_groups": 4, "router_group_topk": 5}, ["router_group_topk=5", "[1, "]),
    ({"router_num_groups": 4}, ["router_group_topk=0", "router_num_groups=4"]),
    (
        {"router_topk": 3, "router_num_groups": 4, "router_group_topk": 2},
        ["router_group_topk=2", "does not divide router_topk=3"],
    ),
    (
        {"router_topk": 4, "router_num_groups": 4, "router_group_topk": 1},
        ["router_topk=4", "1 groups of 2 experts", "raise router_group_topk"],
    ),
    ({"aux_loss_coeff": -0.1}, ["aux_loss_coeff=-0.1", "at least 0"]),
    ({"z_loss_coeff": float("nan")}, ["z_loss_coeff=nan"]),
    ({"router_topk_scaling_factor": 0.0}, ["router_topk_scaling_factor=0.0", "above 0"]),
    ({"input_jitter": 1.0}, ["input_jitter=1.0", "[0, 1)"]),
    ({"capacity_factor": 0.0}, ["capacity_factor=0.0", "None"]),
    ({"router_topk": 1}, ["router_topk=1", "would not learn", "router_pre_softmax=True"]),
    (
        {"router_topk": 1, "router_pre_softmax": True},
        ["router_normalize_topk=True", "would not learn"],
    ),
    ({"aux_loss_coeff": 0.1, "load_balancing": "none"}, ["aux_loss_coeff=0.1", "'none'"]),
    (
        {"router_pre_softmax": True, "router_score_function": "sigmoid"},
        ["router_pre_softmax=True", "'sigmoid'"],
    ),
    ({"expert_bias": True}, ["expert_bias=True", "router_score_function='sigmoid'"]),
    (
        {
            "expert_bias": True,
            "router_score_function": "sigmoid",
            "load_balancing": "sinkhorn",
        },
        ["expert_bias=True", "load_balancing='sinkhorn'"],
    ),
    (
        {"load_balancing": "sinkhorn", "router_num_groups": 4, "router_group_topk": 2},
        ["load_balancing='sinkhorn'", "router_num_groups=4"],
    ),
    ({"shared_expert_gate": True}, ["shared_expert_gate=True", "shared_expert_ffn_hidden_size"]),
    ({"pad_to_capacity": True}, ["pad_to_capacity=True", "capacity_factor"]),
    ({"first_dense_layers": 4}, ["first_dense_layers=4", "none of the num_layers=4", "moe=None"]),
]


@pytest.mark.parametrize(("changes", "words"), BAD)
def test_what_does_not_fit_is_explained(changes: dict[str, Any], words: list[str]) -> None:
    moe = MoEConfig(**{"num_experts": 8, **changes})
    errors = GPTConfig(**SIZES, moe=moe).check()
    assert errors
    assert all(error.startswith("moe.") for error in errors)
    assert all(any(word in error for error in errors) for word in words), errors


MODELS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "plain": ({}, {}),
    "widths": ({"ffn_hidden_size": 20, "router_bias": True}, {"add_bias_linear": True}),
    "ungated": ({"ffn_hidden_size": 20}, {"gated_linear_unit": False, "add_bias_linear": True}),
    "shared": (
        {"shared_expert_ffn_hidden_size": 24, "shared_expert_gate": True},
        {"add_bias_linear": True},
    ),
    "latent": ({"latent_size": 16, "first_dense_layers": 1}, {"add_bias_linear": True}),
    "some": ({"layer_pattern": "DDE"}, {"norm": "layernorm"}),
    "buffers": (
        {"expert_bias": True, "router_score_function": "sigmoid", "load_balancing": "none"},
        {},
    ),
}


@pytest.mark.parametrize("name", MODELS)
def test_counted_parameters_are_those_of_the_network(name: str) -> None:
    moe, model = MODELS[name]
    config = GPTConfig(**SIZES, **model, moe=MoEConfig(num_experts=8, **moe))
    network = GPTNetwork(config, device="meta")
    assert sum(p.numel() for p in network.parameters()) == config.num_parameters()


def test_flops_count_the_experts_that_a_token_meets() -> None:
    """By hand: 4 layers of attention, one dense MLP, three layers with 2 of 8 experts."""
    moe = MoEConfig(
        num_experts=8,
        ffn_hidden_size=20,
        shared_expert_ffn_hidden_size=24,
        shared_expert_gate=True,
        first_dense_layers=1,
    )
    config = GPTConfig(**SIZES, moe=moe)
    attention = 32 * (3 * 32 + 32)
    dense = 3 * 32 * 48
    experts = 2 * 3 * 32 * 20 + 8 * 32 + 3 * 32 * 24 + 32
    scores = 12 * 32 * 10
    want = 6 * (4 * attention + dense + 3 * experts + 40 * 32) + 4 * scores
    assert config.flops_per_token(10) == want


def test_round_trip() -> None:
    config = GPTConfig(**SIZES, moe=MoEConfig(num_experts=8, layer_pattern="ED"))
    assert GPTConfig.from_dict(config.to_dict()) == config
    dense = GPTConfig(**SIZES)
    assert GPTConfig.from_dict(dense.to_dict()) == dense
    old = {key: value for key, value in dense.to_dict().items() if key != "moe"}
    assert GPTConfig.from_dict(old) == dense  # written before there were experts


def test_capacity_is_a_share_of_the_places() -> None:
    moe = MoEConfig(num_experts=8, router_topk=2, capacity_factor=1.25)
    assert moe.capacity(100) == 32  # ceil(100 * 2 / 8 * 1.25)
    assert moe.capacity(1) == 1
    assert MoEConfig(num_experts=8).capacity(100) is None
    assert MoEConfig(num_experts=4, router_topk=4, capacity_factor=9.0).capacity(10) == 10


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"num_layers": "2"}, "num_layers='2' must be a whole number"),
        ({"hidden_size": 64.5}, "hidden_size=64.5 must be a whole number"),
        ({"moe": {"num_experts": 4}}, "moe={'num_experts': 4}: give a MoEConfig"),
        ({"moe": MoEConfig(num_experts=4, router_topk=True)}, "moe.router_topk=True must be a"),
        (
            {"moe": MoEConfig(num_experts=4, capacity_factor="1")},  # type: ignore[arg-type]
            "moe.capacity_factor='1' must be a number or None",
        ),
        (
            {"moe": MoEConfig(num_experts=4, router_bias="no")},  # type: ignore[arg-type]
            "moe.router_bias='no' must be True or False",
        ),
        ({"latent_attention": {}}, "latent_attention={}: give a LatentAttentionConfig"),
    ],
)
def test_values_of_another_type(changes: dict[str, Any], said: str) -> None:
    """They are named, where the rules about values would stumble over them."""
    sizes = dict(vocab_size=10, num_layers=2, hidden_size=64, num_attention_heads=4)
    found = GPTConfig(**{**sizes, **changes}).check()
    assert len(found) == 1
    assert found[0].startswith(said)


def test_fields_of_inner_configs_are_changed_by_a_dot() -> None:
    config = preset_config("mixtral-8x7b").with_changes(**{"moe.router_topk": 3, "num_layers": 2})
    assert config.moe is not None
    assert (config.moe.router_topk, config.moe.num_experts, config.num_layers) == (3, 8, 2)
    with pytest.raises(ValueError, match=r"moe.topk is no field: it has num_experts, "):
        config.with_changes(**{"moe.topk": 3})
    with pytest.raises(ValueError, match=r"moe.router_topk=3: moe is None here"):
        preset_config("llama3-8b").with_changes(**{"moe.router_topk": 3})
