"""The benchmark of low precisions in its smallest form: losses on real text within its limits of
bfloat16's. The long form (300 steps, a larger model) is for a GPU: `benchmarks/low_precision.py`.
"""

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Load = Callable[[str], Any]


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch) -> Load:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
    return importlib.import_module


@pytest.mark.slow
def test_low_precisions_train_as_bfloat16(load: Load) -> None:
    script, verdicts = load("low_precision"), load("low_precision_verdicts")
    size = {**script.SIZES["tiny"], "sequence": 32}
    kinds = ["fp16", "fp8_tensorwise", "fp8_delayed", "nvfp4"]
    runs = list(script.run_all(kinds, [1], size, 30, "cpu"))
    for run in runs:
        assert run["loss"] < 0.8 * run["first_loss"], run["kind"]
        assert len(run["held_out"]) == 3, run["kind"]
    rows = verdicts.judge(runs)
    assert list(rows) == ["bf16", *kinds]
    for kind, row in rows.items():
        assert row["ratio"] == pytest.approx(1.0, abs=verdicts.limit_of(kind)), kind
        assert row["verdict"] == "can't be told by one seed"


def test_verdicts_need_the_whole_interval(load: Load) -> None:
    """Student's interval of four ratios with deviation s is mean +- 3.182 * s / 2."""
    verdict = load("low_precision_verdicts").verdict
    near = verdict([1.0, 1.001, 0.999, 1.0], 0.005)
    assert near["verdict"] == "within"
    assert near["interval"] == pytest.approx([1 - 0.0012990, 1 + 0.0012990], abs=1e-6)
    assert verdict([1.02, 1.021, 1.019, 1.02], 0.005)["verdict"] == "beyond"
    assert verdict([0.98, 0.979, 0.981, 0.98], 0.005)["verdict"] == "beyond"
    assert verdict([0.99, 1.01, 1.0, 1.0], 0.005)["verdict"] == "can't be told"


def test_held_out_text_is_not_trained_on(load: Load) -> None:
    trained, held = load("low_precision_run").corpus()
    pieces = [held[i : i + 200].numpy().tobytes() for i in range(0, len(held) - 200, 50_000)]
    found = sum(piece in trained.numpy().tobytes() for piece in pieces)
    assert len(held) > 100_000
    assert found <= len(pieces) // 4  # passages that the sources repeat
