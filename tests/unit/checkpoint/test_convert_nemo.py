"""NeMo 2 checkpoints: weights of Megatron-Core beside a description of the model, which is read as
data.
"""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from megatron_lightning.checkpoint import CheckpointError
from megatron_lightning.checkpoint.convert import Conversion, convert
from megatron_lightning.checkpoint.convert.convert import kind_of
from megatron_lightning.checkpoint.convert.nemo import nemo_config
from megatron_lightning.cli.convert import main
from megatron_lightning.cli.errors import UserError
from megatron_lightning.config import GPTConfig, MoEConfig, RotaryConfig
from megatron_lightning.models import GPTModel
from tests.unit.checkpoint.test_convert_megatron import (
    assert_state,
    common,
    fused,
    in_megatron,
    network_state,
    stacked,
    write,
)

DATA = Path(__file__).parents[2] / "data" / "nemo"
SIZES: dict[str, Any] = dict(
    vocab_size=37,
    num_layers=2,
    hidden_size=16,
    num_attention_heads=4,
    num_query_groups=2,
    ffn_hidden_size=24,
    max_position_embeddings=64,
)
CONFIGS = {
    "mixtral": GPTConfig(
        **SIZES,
        rotary=RotaryConfig(base=1e6),
        moe=MoEConfig(
            num_experts=4,
            ffn_hidden_size=24,
            router_topk=2,
            router_pre_softmax=True,
            router_normalize_topk=False,
            aux_loss_coeff=0.01,
        ),
    ),
    "llama31": GPTConfig(
        **SIZES,
        tie_word_embeddings=True,
        rotary=RotaryConfig(
            base=5e5,
            scaling="llama3",
            factor=8.0,
            low_freq_factor=1.0,
            high_freq_factor=4.0,
            original_max_position_embeddings=8192,
        ),
    ),
}


def folder_of(name: str, folder: Path, *, file: str = "model.yaml") -> Path:
    """A NeMo checkpoint; returns it."""
    config = CONFIGS[name]
    tensors = stacked(fused(in_megatron(config, network_state(config))), config.num_layers)
    write(folder / "weights", {f"module.{n}": t for n, t in tensors.items()}, common(5))
    (folder / "context").mkdir()
    shutil.copyfile(DATA / name / file, folder / "context" / file)
    return folder


def change(folder: Path, **fields: Any) -> None:
    """Other values in model.yaml; None removes a field."""
    path = folder / "context" / "model.yaml"
    model = yaml.safe_load(path.read_text())
    model["config"] |= fields
    model["config"] = {k: v for k, v in model["config"].items() if v != "gone"}
    path.write_text(yaml.safe_dump(model))


def add_tokenizer(folder: Path, tokens: int) -> None:
    """A tokenizer of so many tokens, two of them added."""
    vocabulary = {f"t{i}": i for i in range(tokens - 2)}
    added = [{"id": tokens - 2 + i, "content": f"<{i}>"} for i in range(2)]
    target = folder / "context" / "nemo_tokenizer"
    target.mkdir()
    content = {"model": {"vocab": vocabulary}, "added_tokens": [*added, {"content": "t0"}]}
    (target / "tokenizer.json").write_text(json.dumps(content))


@pytest.mark.parametrize("name", CONFIGS)
def test_the_model_is_found_and_filled(tmp_path: Path, name: str) -> None:
    source = folder_of(name, tmp_path / "theirs")
    add_tokenizer(source, 37)
    assert kind_of(source) == "nemo"
    convert(source, tmp_path / "ours", how=Conversion(allow_pickle=True))
    model = GPTModel.load_from_checkpoint(tmp_path / "ours")
    assert model.config == CONFIGS[name]
    assert_state(model.built_network().state_dict(), network_state(CONFIGS[name]))
    with torch.no_grad():
        assert torch.isfinite(model(torch.arange(12)[None])).all()


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, target = str(folder_of("mixtral", tmp_path / "theirs")), str(tmp_path / "ours")
    with pytest.raises(UserError, match="the size of the vocabulary is missing.*--vocab-size"):
        main([source, target, "--allow-pickle"])
    main([source, target, "--allow-pickle", "--vocab-size", "37"])
    assert "tensors of weights" in capsys.readouterr().out
    assert GPTModel.load_from_checkpoint(target).config == CONFIGS["mixtral"]
    with pytest.raises(UserError, match="made of pickles: give --allow-pickle"):
        main([source, f"{target}2", "--vocab-size", "37"])
    with pytest.raises(UserError, match="--vocab-size: only for a checkpoint of NeMo"):
        main([target, f"{target}2", "--vocab-size", "37"])
    with pytest.raises(UserError, match="the model is not the GPT that the config describes"):
        main([source, f"{target}2", "--allow-pickle", "--preset", "llama3-8b"])


def test_set_fields_alone(tmp_path: Path) -> None:
    """Fiddle's JSON lacks what classes have by default: each such field is named, none guessed."""
    source = folder_of("mixtral", tmp_path / "theirs", file="io.json")
    with pytest.raises(CheckpointError) as error:
        nemo_config(source, 37)
    for name in ("normalization", "activation_func", "gated_linear_unit", "moe_router_topk"):
        assert f"- {name} is missing" in str(error.value)
    assert "- hidden_size" not in str(error.value)
    path = source / "context" / "io.json"
    model = yaml.safe_load((DATA / "mixtral" / "model.yaml").read_text())["config"]
    content = json.loads(path.read_text())
    (config,) = (o for o in content["objects"].values() if "config" in str(o.get("paths")))
    there = {re.findall(r"'(.*)'", key)[0] for key, _ in config["items"]}
    for name, value in model.items():
        if name not in there and name != "_target_":
            leaf: dict[str, Any] = {"type": "leaf", "value": value}
            if isinstance(value, dict):
                module, _, last = value["_target_"].rpartition(".")
                leaf = {"type": "pyref", "module": module, "name": last}
            if not isinstance(value, list):
                config["items"].append([f"Attr(name='{name}')", leaf])
    path.write_text(json.dumps(content))
    assert nemo_config(source, 37) == CONFIGS["mixtral"]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"_target_": "nemo.collections.llm.gpt.model.gemma2.Gemma2Config"},
            "gemma2.*not supported",
        ),
        ({"_target_": "os.system"}, "os.system is not supported"),
        ({"rotary_base": "gone"}, "rotary_base is missing, and no value is guessed"),
        ({"new_switch": 3}, "new_switch=3 is not known"),
        ({"multi_latent_attention": True}, "multi_latent_attention=True is not supported"),
        ({"activation_func": {"_target_": "torch.tanh"}}, "activation_func=.*torch.tanh"),
        ({"normalization": "Other"}, "normalization='Other' is not supported"),
        ({"position_embedding_type": "mrope"}, "position_embedding_type='mrope'"),
        ({"mtp_num_layers": 1}, "mtp_num_layers=1 is not supported"),
        ({"moe_router_load_balancing_type": "x"}, "moe_router_load_balancing_type='x'"),
        ({"num_query_groups": 3}, "num_query_groups=3"),
        ({"softmax_type": "learnable"}, "softmax_type='learnable' is not supported"),
    ],
)
def test_refusals(tmp_path: Path, fields: dict[str, Any], message: str) -> None:
    source = folder_of("mixtral", tmp_path / "theirs")
    change(source, **fields)
    with pytest.raises(CheckpointError, match=f"(?s){message}"):
        nemo_config(source, 37)


def test_fields_that_change_the_network(tmp_path: Path) -> None:
    source = folder_of("mixtral", tmp_path / "theirs")
    change(
        source,
        window_size=[15, 0],
        moe_layer_freq=[0, 1],
        moe_router_score_function="sigmoid",
        moe_router_pre_softmax=False,
        moe_router_enable_expert_bias=True,
        moe_shared_expert_intermediate_size=8,
        moe_router_load_balancing_type="none",
        seq_len_interpolation_factor=2.0,
        layernorm_zero_centered_gamma=True,
        vocab_size=40,
    )
    config = nemo_config(source)
    assert config.vocab_size == 40
    assert config.window_size == 16
    assert config.stream.zero_centered_norm
    assert (config.rotary.scaling, config.rotary.factor) == ("linear", 2.0)
    moe = config.moe
    assert moe is not None
    assert (moe.first_dense_layers, moe.layer_pattern, moe.expert_bias) == (1, "E", True)
    assert (moe.router_normalize_topk, moe.aux_loss_coeff) == (True, 0.0)
    assert moe.shared_expert_ffn_hidden_size == 8


def test_nothing_is_run(tmp_path: Path) -> None:
    """Tags of YAML that would make objects are refused."""
    source = folder_of("mixtral", tmp_path / "theirs")
    evil = f"!!python/object/apply:os.mkdir ['{tmp_path / 'ran'}']"
    (source / "context" / "model.yaml").write_text(f"config: {evil}\n")
    with pytest.raises(CheckpointError, match="is no plain YAML"):
        nemo_config(source, 37)
    (source / "context" / "model.yaml").unlink()
    loop = {"root": {"type": "ref", "key": "a"}, "objects": {}}
    loop["objects"]["a"] = {"type": {"name": "Config"}, "items": [["Attr(name='x')", loop["root"]]]}
    for text in ("[]", "{", json.dumps(loop)):
        (source / "context" / "io.json").write_text(text)
        with pytest.raises(CheckpointError, match="is no JSON of fiddle"):
            nemo_config(source, 37)
    (source / "context" / "io.json").unlink()
    with pytest.raises(CheckpointError, match="neither model.yaml nor io.json"):
        nemo_config(source, 37)
    assert not (tmp_path / "ran").exists()
