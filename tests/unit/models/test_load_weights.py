"""Strictness of `load_weights`, by name: what is missing, unexpected or of another shape."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from megatron_lightning.checkpoint import CheckpointError, save
from megatron_lightning.config import GPTConfig
from megatron_lightning.models import GPTModel

CONFIG = GPTConfig(vocab_size=37, num_layers=2, hidden_size=16, num_attention_heads=2)
LAST = "model.network.decoder.layers.1."


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    shapes = GPTModel(CONFIG).global_shapes()
    save(tmp_path / "a", {f"model.{name}": torch.ones(shape) for name, shape in shapes.items()}, {})
    return tmp_path / "a"


def model(**changes: int) -> GPTModel:
    return GPTModel(replace(CONFIG, **changes))


def test_missing_names(checkpoint: Path) -> None:
    deeper = model(num_layers=3)
    with pytest.raises(CheckpointError, match=r"missing in the checkpoint \(6\)"):
        deeper.load_weights(checkpoint)
    report = deeper.load_weights(checkpoint, strict="missing_ok")
    assert len(report.missing) == 6
    layers = deeper.built_network().decoder.layers
    assert (layers["1"].mlp.linear_fc2.weight == 1).all()
    assert not (layers["2"].mlp.linear_fc2.weight == 1).any()


def test_unexpected_names(checkpoint: Path) -> None:
    shallower = model(num_layers=1)
    with pytest.raises(CheckpointError, match=rf"unexpected in the checkpoint \(6\): {LAST}"):
        shallower.load_weights(checkpoint, strict="missing_ok")
    report = shallower.load_weights(checkpoint, strict="unexpected_ok")
    assert all(name.startswith(LAST) for name in report.unexpected)


def test_other_shapes(checkpoint: Path) -> None:
    larger = model(vocab_size=50)
    with pytest.raises(CheckpointError, match=r"saved with shape \[37, 16\], here \[50, 16\]"):
        larger.load_weights(checkpoint, strict="unexpected_ok")
    report = larger.load_weights(checkpoint, strict=False)
    assert len(report.mismatched) == 2  # embedding and head
    assert (larger.built_network().decoder.final_layernorm.weight == 1).all()
