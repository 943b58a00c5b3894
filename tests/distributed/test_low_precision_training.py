"""The benchmark of low precisions in its smallest form: losses on real text within its limits of
bfloat16's. The long form (300 steps, a larger model) is for a GPU: `benchmarks/low_precision.py`.
"""

import importlib.util
from pathlib import Path
from typing import Any

import pytest


def benchmark() -> Any:
    path = Path(__file__).parents[2] / "benchmarks" / "low_precision.py"
    spec = importlib.util.spec_from_file_location("low_precision", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.slow
def test_low_precisions_train_as_bfloat16() -> None:
    module = benchmark()
    size = {**module.SIZES["tiny"], "sequence": 32}
    kinds = ["fp16", "fp8_tensorwise", "fp8_delayed", "nvfp4"]
    rows = module.compare(kinds, size, 30, "cpu")
    for kind, row in rows.items():
        assert row["loss"] < 0.8 * row["first_loss"], kind
        assert row["ratio"] == pytest.approx(1.0, abs=module.limit_of(kind)), kind
