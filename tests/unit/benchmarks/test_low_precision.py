"""Which precisions run on the device and which are simulated."""

import importlib
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_lightning.precision import fp8


@pytest.mark.parametrize(("capability", "simulated"), [((9, 0), False), ((10, 0), True)])
def test_what_a_device_lacks_is_simulated(
    capability: tuple[int, int], simulated: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[3] / "benchmarks"))
    run: Any = importlib.import_module("low_precision_run")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: "a GPU")
    monkeypatch.setattr(fp8, "blocks_problem", lambda: None)
    monkeypatch.setattr(torch, "set_float32_matmul_precision", lambda _: None)
    for kind, want in (("fp8_blockwise", simulated), ("fp8_rowwise", False), ("nvfp4", True)):
        _, quantization = run.precision_of(kind, "cuda")
        assert quantization is not None
        assert quantization.simulate is want, kind
