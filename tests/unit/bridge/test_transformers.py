"""Exports in transformers itself, where it is installed."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_lightning.bridge import from_hf
from megatron_lightning.config import GPTConfig
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


@pytest.mark.parametrize("name", LOCAL_NAMES)
def test_imported_models(tmp_path: Path, name: str) -> None:
    compare(from_hf(LOCAL / name), tmp_path / "x")


@pytest.mark.parametrize("case", OWN)
def test_own_models(tmp_path: Path, case: str) -> None:
    model = GPTModel(GPTConfig(**{**SMALL, **OWN[case][1], "init_method_std": 0.2}))
    compare(model, tmp_path / "x")
    config = json.loads((tmp_path / "x" / "config.json").read_text())
    assert config["model_type"] == OWN[case][0]
