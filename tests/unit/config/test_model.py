"""GPTConfig: derived sizes, explained errors, counts of parameters and operations."""

import dataclasses

import pytest

from megatron_lightning.config import GPTConfig, RotaryConfig

CASE = {
    "vocab_size": 256,
    "num_layers": 2,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_query_groups": 2,
}


def test_c50_operations_per_token_as_calculated_by_hand():
    config = GPTConfig(**CASE, ffn_hidden_size=176)
    assert config.flops_per_token(128) == 847872
    assert config.flops_per_token(128, causal=True) == 749568


def test_operations_per_token_count_a_sliding_window():
    full = GPTConfig(**CASE, ffn_hidden_size=176)
    window = full.with_changes(window_size=32, window_pattern="SF")
    scores = 12 * 64 * 128
    assert full.flops_per_token(128) - window.flops_per_token(128) == scores * 3 // 4
    assert window.with_changes(window_size=4096).flops_per_token(128, causal=True) == 749568


def test_sizes_are_derived_when_left_out():
    config = GPTConfig(vocab_size=10, num_layers=1, hidden_size=96, num_attention_heads=6)
    assert (config.num_query_groups, config.head_dim, config.ffn_hidden_size) == (6, 16, 256)
    plain = config.with_changes(gated_linear_unit=False)
    assert plain.ffn_hidden_size == 384
    assert config.qkv_size == 18 * 16
    assert config.check() == []


@pytest.mark.parametrize(
    ("hidden", "width"), [(2048, 5440), (4096, 10880), (5120, 13632), (6144, 16384), (16, 64)]
)
def test_a_gated_unit_is_as_wide_as_in_megatron_lm(hidden: int, width: int):
    """Which rounds down: int((4 * H * 2 / 3) / 64) * 64. That of H=16 would be 0."""
    config = GPTConfig(vocab_size=10, num_layers=1, hidden_size=hidden, num_attention_heads=8)
    assert config.ffn_hidden_size == width


def test_changes_let_derived_sizes_follow_and_keep_given_ones():
    config = GPTConfig(**CASE)
    changed = config.with_changes(hidden_size=128, num_attention_heads=8)
    assert (changed.head_dim, changed.num_query_groups, changed.ffn_hidden_size) == (16, 2, 320)
    with pytest.raises(ValueError, match="hiden_size"):
        config.with_changes(hiden_size=3)


def test_dict_round_trip():
    config = GPTConfig(**CASE, rotary=RotaryConfig(base=5e5, percent=0.5), norm="layernorm")
    assert GPTConfig.from_dict(config.to_dict()) == config


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"num_attention_heads": 5, "num_query_groups": 5},
            ["num_attention_heads=5", "hidden_size=64", "[1, 2, 4, 8]"],
        ),
        ({"num_query_groups": 3}, ["num_query_groups=3", "num_attention_heads=4", "[1, 2, 4]"]),
        ({"vocab_size": 0}, ["vocab_size=0"]),
        ({"norm": "batchnorm"}, ["norm='batchnorm'", "rmsnorm"]),
        ({"activation": "selu"}, ["activation='selu'", "squared_relu"]),
        ({"hidden_dropout": 1.0}, ["hidden_dropout=1.0", "[0, 1)"]),
        ({"norm_epsilon": 0.0}, ["norm_epsilon=0.0"]),
        ({"window_size": -1}, ["window_size=-1"]),
        ({"window_pattern": "SX"}, ["window_pattern='SX'", "F (full)"]),
        ({"rotary": RotaryConfig(percent=0.35)}, ["rotary.percent=0.35", "head_dim=16", "even"]),
        (
            {"rotary": RotaryConfig(scaling="yarn", factor=4.0)},
            ["original_max_position_embeddings=0", "yarn"],
        ),
        ({"rotary": RotaryConfig(factor=4.0)}, ["rotary.factor=4.0", "plain"]),
        ({"rotary": RotaryConfig(scaling="linear", factor=0.5)}, ["rotary.factor=0.5", "linear"]),
        ({"rotary": RotaryConfig(base=0.0)}, ["rotary.base=0.0"]),
    ],
)
def test_errors_name_field_value_and_remedy(changes, words):
    errors = GPTConfig(**{**CASE, **changes}).check()
    assert len(errors) == 1, errors
    assert all(word in errors[0] for word in words), errors


def test_all_errors_come_at_once():
    wrong = {"vocab_size": 0, "num_layers": 0, "num_attention_heads": 5, "norm": "x"}
    config = GPTConfig(hidden_size=64, label_smoothing=2.0, **wrong)
    assert len(config.check()) == 5


def test_every_field_has_a_sentence_and_there_are_at_most_25():
    nested = {"attention", "clamp", "latent_attention", "moe", "multi_token_prediction", "stream"}
    assert len({f.name for f in dataclasses.fields(GPTConfig)} - nested) <= 25
    assert len(dataclasses.fields(RotaryConfig)) <= 25


def test_window_pattern_repeats_over_layers():
    config = GPTConfig(**{**CASE, "num_layers": 8}, window_size=16, window_pattern="SSF")
    assert [config.window_of(i) for i in range(8)] == [16, 16, 0, 16, 16, 0, 16, 16]
    assert GPTConfig(**CASE).window_of(0) == 0


def test_vocabulary_padding_of_two_ranks():
    config = GPTConfig(**{**CASE, "vocab_size": 50257})
    assert config.padded_vocab_size() == 50304
    assert config.padded_vocab_size(2) == 50432
