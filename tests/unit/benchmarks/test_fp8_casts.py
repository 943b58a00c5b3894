"""What the benchmark of casts makes of its times."""

import importlib
import runpy
from dataclasses import replace
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
        "weights": True,
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


def test_what_is_wrong_is_turned_off(settings: Any) -> None:
    results = found(settings, settings.CASTS[2])
    results |= {"weights": False, "gates": {"wrong": True}}
    lines = [line.split("  #")[0] for line in settings.advice("a", results)]
    assert f"CAST = {settings.PLAIN}" in lines
    assert "GATE_CASTS = False" in lines
    assert not [line for line in lines if line.startswith(("GATE_CAST ", "GATE_LARGEST "))]


def test_a_wrong_present_choice_is_replaced(settings: Any) -> None:
    times = {settings.name_of(each): 1.0 for each in settings.CASTS[1:]}
    best, _ = settings.best_over({"1 x 2": {"times": times, "count": 1}}, settings.CASTS, 32)
    assert best == settings.CASTS[1]
    with pytest.raises(ValueError, match="more --seconds"):
        settings.best_over({"1 x 2": {"times": {}, "count": 1}}, settings.CASTS, 32)


def test_searches_are_advised_only_by_whole_rows(settings: Any) -> None:
    results = found(settings, settings.SPANS[2])
    rows = results["searches"]
    rows["3 x 4"] = {"times": dict(rows["1 x 2"]["times"]), "count": 1}
    lines = list(settings.advice("a", results))
    assert any(line.startswith("SEARCHES_FOREIGN = True") for line in lines)
    del rows["3 x 4"]["times"][settings.COMPILED]
    lines = list(settings.advice("a", results))
    assert not [line for line in lines if line.startswith("SEARCHES_FOREIGN")]


def test_first_choices_stay_among_the_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    first = {"CASTS": "CAST", "GATE_CASTS": "GATE_CAST"}
    first |= {"GATE_SPANS": "GATE_LARGEST", "SPANS": "LARGEST"}
    for name in first.values():
        monkeypatch.setattr(choices, name, replace(getattr(choices, name), warps=16))
    made = runpy.run_path(str(FOLDER / "fp8_cast_settings.py"))
    tiles = {"CASTS": (64, 128, 4, False), "GATE_CASTS": (64, 64, 4, False)}
    for kind, want in tiles.items():
        assert made[kind][0] == getattr(choices, first[kind])
        assert want in [(t.height, t.width, t.warps, t.words) for t in made[kind]]
    assert choices.Spans(block=1024, warps=4, programs=2112) in made["GATE_SPANS"]
    assert choices.Spans(block=8192, warps=8, programs=1024) in made["SPANS"]
