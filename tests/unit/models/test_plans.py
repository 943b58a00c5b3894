"""The split table of the GPT family."""

import itertools

import pytest

from megatron_lightning.config import GPTConfig, Gradient, Role
from megatron_lightning.models import GPTNetwork, check_tensor_parallel, gpt_plan
from megatron_lightning.parallel.tensor_checks import check_tensor_plan

SIZES = {
    "vocab_size": 61,
    "num_layers": 2,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "num_query_groups": 2,
    "ffn_hidden_size": 48,
}
CHOICES = {
    "norm": ["rmsnorm", "layernorm"],
    "add_bias_linear": [False, True],
    "add_qkv_bias": [False, True],
    "qk_layernorm": [False, True],
    "position_embedding": ["rope", "learned"],
    "gated_linear_unit": [False, True],
    "tie_word_embeddings": [False, True],
}
CONFIGS = [
    GPTConfig(**SIZES, **dict(zip(CHOICES, values, strict=True)))
    for values in itertools.product(*CHOICES.values())
]


def names_of(network):
    """Every name that a stage may hold; a tied head's too."""
    return [name for name, _ in network.named_parameters(remove_duplicate=False)]


def test_every_parameter_matches_one_row_and_every_row_a_parameter():
    for config in CONFIGS:
        plan, network = gpt_plan(config), GPTNetwork(config, device="meta")
        used = {id(plan.split_of(name)) for name in names_of(network)}
        assert used == {id(split) for split in plan.splits.values()}


def test_the_plan_fits_the_network_on_two_ranks():
    for config in CONFIGS:
        network = GPTNetwork(config, device="meta")
        assert check_tensor_plan(network, gpt_plan(config), 2, sequence_parallel=True) == []


def test_stage_names_exist():
    for config in CONFIGS:
        plan, network = gpt_plan(config), GPTNetwork(config, device="meta")
        assert plan.layers == network.layers_path
        assert list(network.get_submodule(plan.layers)._modules) == ["0", "1"]
        for path in (*plan.first, *plan.last):
            network.get_submodule(path)
        for owner, user in plan.tied:
            assert network.get_parameter(owner) is network.get_parameter(user)
        assert bool(plan.tied) == config.tie_word_embeddings


def test_a_shard_is_whole_groups_of_the_projection_and_half_of_each_gated_part():
    plan = gpt_plan(GPTConfig(**SIZES))
    layer = "decoder.layers.1."
    assert plan.split_of(layer + "self_attention.linear_qkv.weight").dim == 0
    assert plan.split_of(layer + "mlp.linear_fc1.weight").dim == 1
    assert plan.split_of(layer + "mlp.linear_fc2.weight").role is Role.ROW
    plain = gpt_plan(GPTConfig(**SIZES, gated_linear_unit=False))
    assert plain.split_of(layer + "mlp.linear_fc1.weight").dim == 0


def test_gradients_of_whole_parameters():
    full = {
        "norm": "layernorm",
        "add_bias_linear": True,
        "qk_layernorm": True,
        "position_embedding": "learned",
    }
    config = GPTConfig(**SIZES, **full)
    plan, network = gpt_plan(config), GPTNetwork(config, device="meta")
    found = {
        name.replace("decoder.layers.0.", ""): plan.split_of(name).gradient
        for name in names_of(network)
        if plan.split_of(name).role is Role.REPLICATED and "layers.1" not in name
    }
    partial = {name for name, gradient in found.items() if gradient is Gradient.PARTIAL}
    heads = ("self_attention.q_layernorm", "self_attention.k_layernorm")
    assert partial == {f"{norm}.{kind}" for norm in heads for kind in ("weight", "bias")}
    assert {found[name] for name in set(found) - partial} == {Gradient.SEQUENCE}
    assert "self_attention.linear_proj.bias" in found
    assert "mlp.linear_fc2.bias" in found
    assert "embedding.position_embeddings.weight" in found


@pytest.mark.parametrize(("size", "fields"), [(1, 0), (2, 0), (4, 1), (5, 2)])
def test_sizes_that_tensor_parallelism_must_divide(size, fields):
    problems = check_tensor_parallel(GPTConfig(**SIZES), size)
    assert len(problems) == fields
    for problem in problems:
        assert f"tensor_parallel_size={size} does not divide" in problem
