"""Reported cases on conversion."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_lightning.bridge import from_hf
from megatron_lightning.layers.rotary import inverse_frequencies
from tests.hf_models import LOCAL


def llama31(folder: Path, factor: float, *, legacy: bool) -> Path:
    """A Llama whose heads have 128 elements, rotated as Llama 3.1's."""
    shutil.copytree(LOCAL / "llama", folder)
    config = json.loads((folder / "config.json").read_text())
    scaling: dict[str, Any] = {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    del config["rope_parameters"]
    if legacy:
        config |= {"rope_theta": 500000.0, "rope_scaling": scaling}
    else:
        config["rope_parameters"] = {"rope_theta": 500000.0, **scaling}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize("legacy", [False, True])
@pytest.mark.parametrize(
    ("factor", "middle", "last"), [(8, 0.371122, 0.125), (32, 0.303743, 1 / 32)]
)
def test_c38_scaled_frequencies(
    tmp_path: Path, legacy: bool, factor: float, middle: float, last: float
) -> None:
    rotary = from_hf(llama31(tmp_path / "x", factor, legacy=legacy)).config.rotary
    plain = 1.0 / 500000.0 ** (torch.arange(0, 128, 2, dtype=torch.float64) / 128)
    ratio = inverse_frequencies(128, rotary).double() / plain
    torch.testing.assert_close(ratio[:29], torch.ones(29, dtype=torch.float64))
    assert ratio[32].item() == pytest.approx(middle, abs=1e-6)
    assert ratio[35:].tolist() == pytest.approx([last] * 29, rel=1e-5)
