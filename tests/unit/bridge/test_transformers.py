"""Exports in transformers itself, where it is installed."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_lightning.bridge import from_hf
from megatron_lightning.config import GPTConfig, RotaryConfig
from megatron_lightning.models import GPTModel
from tests.hf_models import LOCAL, LOCAL_NAMES, LOGITS
from tests.unit.bridge.test_export import OWN, SMALL

transformers: Any = pytest.importorskip("transformers")


def compare(model: GPTModel, folder: Path) -> None:
    model.save_hf(folder, max_shard_bytes=30_000)
    theirs, report = transformers.AutoModelForCausalLM.from_pretrained(
        folder, output_loading_info=True, attn_implementation="eager"
    )
    assert not any(report.values()), report
    tokens = torch.arange(40).reshape(2, 20) % model.config.vocab_size
    with torch.no_grad():
        logits = theirs.float().eval()(tokens).logits
        torch.testing.assert_close(model(tokens), logits, rtol=LOGITS, atol=LOGITS)


def randomise(model: GPTModel) -> None:
    """Biases and norms too, so that none may be left out or changed for another."""
    torch.manual_seed(11)
    with torch.no_grad():
        for name, parameter in model.built_network().named_parameters():
            parameter.normal_(std=0.2).add_(float("norm" in name and name.endswith("weight")))


@pytest.mark.parametrize("name", LOCAL_NAMES)
def test_imported_models(tmp_path: Path, name: str) -> None:
    compare(from_hf(LOCAL / name), tmp_path / "x")


@pytest.mark.parametrize("case", OWN)
def test_own_models(tmp_path: Path, case: str) -> None:
    model = GPTModel(GPTConfig(**{**SMALL, **OWN[case][1]}))
    randomise(model)
    compare(model, tmp_path / "x")
    config = json.loads((tmp_path / "x" / "config.json").read_text())
    assert config["model_type"] == OWN[case][0]


def test_c38_beyond_the_original_length(tmp_path: Path) -> None:
    """Logits after 8192 tokens, with the scaling of Llama 3.1."""
    rotary = RotaryConfig(
        base=500000.0, scaling="llama3", factor=8.0, original_max_position_embeddings=8192
    )
    sizes = {**SMALL, "num_layers": 1, "num_attention_heads": 1, "num_query_groups": 1}
    config = GPTConfig(
        **{**sizes, "head_dim": 128, "max_position_embeddings": 131072}, rotary=rotary
    )
    model = GPTModel(config)
    randomise(model)
    model.save_hf(tmp_path / "x")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "x", attn_implementation="sdpa"
    )
    tokens = torch.randint(0, 33, (1, 8400))
    with torch.no_grad():
        ours, logits = model(tokens)[:, 8192:], theirs.eval()(tokens).logits[:, 8192:]
    torch.testing.assert_close(ours, logits, rtol=LOGITS, atol=LOGITS)
