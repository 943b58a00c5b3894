"""Presets build, and count the published numbers of parameters."""

import pytest

from megatron_lightning.models import PRESETS, GPTNetwork, preset_config

PUBLISHED = {
    "gpt2": 124_439_808,
    "llama3-8b": 8_030_261_248,
    "llama3.1-8b": 8_030_261_248,
    "llama3-70b": 70_553_706_496,
    "llama3.1-70b": 70_553_706_496,
    "mistral-7b": 7_241_732_096,
    "qwen2.5-7b": 7_615_616_512,
    "qwen3-8b": 8_190_735_360,
    "mixtral-8x7b": 46_702_792_704,
    "mixtral-8x22b": 140_620_634_112,
    "qwen3-30b-a3b": 30_532_122_624,
    "qwen3-235b-a22b": 235_093_634_560,
    "gemma2-2b": 2_614_341_888,
    "gemma2-9b": 9_241_705_984,
    "gemma2-27b": 27_227_128_320,
    "gemma3-270m": 268_098_176,
    "gemma3-1b": 999_885_952,
    # the larger ones without their vision tower and the projection behind it
    "gemma3-4b": 4_300_079_472 - 416_866_032 - 1152 * (2560 + 1),
    "gemma3-12b": 12_187_325_040 - 416_866_032 - 1152 * (3840 + 1),
    "gemma3-27b": 27_432_406_640 - 416_866_032 - 1152 * (5376 + 1),
    "gpt-oss-20b": 20_914_757_184,
    "gpt-oss-120b": 116_829_156_672,
}


@pytest.mark.parametrize("name", sorted(PUBLISHED))
def test_published_numbers_of_parameters(name):
    assert preset_config(name).num_parameters() == PUBLISHED[name]


def test_published_number_of_parameters_of_deepseek_v3():
    """671 billion without the layer of multi-token prediction; 685 with it and with the copies of
    embedding and head that its files hold.
    """
    config = preset_config("deepseek-v3")
    without = config.with_changes(multi_token_prediction=None)
    assert without.num_parameters() == 671_026_404_352
    copies = 2 * config.vocab_size * config.hidden_size
    assert config.num_parameters() + copies == 684_489_830_400


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_every_preset_is_valid_and_its_network_holds_what_it_counts(name):
    config = preset_config(name)
    assert config.check() == []
    network = GPTNetwork(config, device="meta")
    assert sum(p.numel() for p in network.parameters()) == config.num_parameters()


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_presets_state_differences_only(name):
    required = {"vocab_size", "num_layers", "hidden_size", "num_attention_heads"}
    sizes = {field: PRESETS[name][field] for field in required}
    defaults = type(preset_config(name))(**sizes)
    for field, value in PRESETS[name].items():
        if field not in required and not name.startswith("tiny"):
            assert value != getattr(defaults, field), field


def test_changes_and_unknown_names():
    config = preset_config("llama3-8b", num_layers=2)
    assert (config.num_layers, config.hidden_size) == (2, 4096)
    with pytest.raises(ValueError, match="preset='llama9' is unknown"):
        preset_config("llama9")
    with pytest.raises(ValueError, match="n_layer"):
        preset_config("gpt2", n_layer=2)
