"""What the benchmark of casts makes of its times."""

import importlib
from pathlib import Path
from typing import Any

import pytest

from megatron_lightning.precision.kernels import choices

FOLDER = Path(__file__).parents[3] / "benchmarks"


@pytest.fixture
def settings(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The benchmark's module."""
    monkeypatch.syspath_prepend(str(FOLDER))
    return importlib.import_module("fp8_cast_settings")


def found(settings: Any, fast: Any) -> dict[str, Any]:
    """Times of every setting, of which one takes half."""

    def rows(kinds: list[Any]) -> dict[str, float]:
        return {settings.name_of(each): 0.5 if each == fast else 1.0 for each in kinds}

    searched = rows(settings.SPANS) | {settings.COMPILED: 0.75}
    return {
        "casts": {"1 x 2": {"times": rows(settings.CASTS), "count": 5}},
        "searches": {"1 x 2": {"times": searched, "count": 2}},
        "gates": {
            "largest": rows(settings.GATE_SPANS),
            "cast": rows(settings.GATE_CASTS),
            "whole": {"written": 3.0, "cast as it is computed": 2.5},
        },
    }


@pytest.mark.parametrize("kind", ["CASTS", "SPANS", "GATE_CASTS", "GATE_SPANS"])
def test_what_is_best_is_written_into_the_file(settings: Any, kind: str, tmp_path: Path) -> None:
    fast = getattr(settings, kind)[2]
    path = tmp_path / "choices.py"
    path.write_text(Path(choices.__file__).read_text())
    settings.write(settings.advice("a", found(settings, fast)), path)
    made: dict[str, Any] = {"__name__": choices.__name__}
    exec(path.read_text(), made)
    names = {"CAST": "CASTS", "LARGEST": "SPANS", "GATE_CAST": "GATE_CASTS"}
    names |= {"GATE_LARGEST": "GATE_SPANS"}
    for name, of in names.items():
        assert repr(made[name]) == repr(fast if of == kind else getattr(choices, name))
    assert made["GATE_CASTS"] is True
    assert made["SEARCHES_FOREIGN"] is (kind == "SPANS")


def test_settings_that_were_not_timed_everywhere_are_not_taken(settings: Any) -> None:
    fast = settings.CASTS[2]
    rows = found(settings, fast)["casts"]
    slow = {name: 1.0 for name in rows["1 x 2"]["times"] if name != settings.name_of(fast)}
    rows["3 x 4"] = {"times": slow, "count": 1}
    best, saved = settings.best_over(rows, settings.CASTS, 32)
    assert best == choices.CAST
    assert saved == 0
