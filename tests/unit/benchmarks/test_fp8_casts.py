"""What the benchmark of casts makes of its times."""

import importlib
import runpy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megatron_lightning.precision.kernels import choices
from tests.interpreter import run_interpreted

FOLDER = Path(__file__).parents[3] / "benchmarks"
NAMES = ("CAST", "LARGEST", "GATE_CAST", "GATE_LARGEST")


@pytest.fixture
def settings(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The benchmark's module."""
    monkeypatch.syspath_prepend(str(FOLDER))
    return importlib.import_module("fp8_cast_settings")


def found(settings: Any, kind: str, fast: Any) -> dict[str, Any]:
    """Times of every setting, of which one of a kind takes half."""

    def times(name: str) -> dict[str, float]:
        every = settings.SETTINGS[name]
        best = fast if name == kind else None
        return {settings.name_of(each): 0.5 if each == best else 1.0 for each in every}

    return {name: {"1 x 2": {"times": times(name), "count": 5}} for name in NAMES}


@pytest.mark.parametrize("kind", NAMES)
def test_what_is_best_is_told_as_lines_of_the_file(settings: Any, kind: str) -> None:
    fast = settings.SETTINGS[kind][2]
    lines = list(settings.advice("a", found(settings, kind, fast)))
    made: dict[str, Any] = dict(vars(choices))
    exec("\n".join(lines), made)
    for name in NAMES:
        assert made[name] == (fast if name == kind else getattr(choices, name))
    (line,) = [line for line in lines if line.startswith(f"{kind} = ")]
    assert line.endswith("  # +80.00 ms a step less")  # 5 calls in 32 passes


def test_settings_that_were_not_timed_everywhere_are_not_taken(settings: Any) -> None:
    casts = settings.SETTINGS["CAST"]
    rows = found(settings, "CAST", casts[2])["CAST"]
    slow = {name: 1.0 for name in rows["1 x 2"]["times"] if name != settings.name_of(casts[2])}
    rows["3 x 4"] = {"times": slow, "count": 1}
    best, saved = settings.best_over(rows, casts, 32)
    assert best == choices.CAST
    assert saved == 0


def test_a_wrong_present_choice_is_replaced(settings: Any) -> None:
    casts = settings.SETTINGS["CAST"]
    times = {settings.name_of(each): 1.0 for each in casts[1:]}
    best, _ = settings.best_over({"1 x 2": {"times": times, "count": 1}}, casts, 32)
    assert best == casts[1]
    with pytest.raises(ValueError, match="more --seconds"):
        settings.best_over({"1 x 2": {"times": {}, "count": 1}}, casts, 32)


def test_what_was_chosen_stays_among_the_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = {name: getattr(choices, name) for name in NAMES}
    for name, each in chosen.items():
        monkeypatch.setattr(choices, name, replace(each, warps=32))
    made = runpy.run_path(str(FOLDER / "fp8_cast_settings.py"))["SETTINGS"]
    assert set(made) == set(NAMES)
    for name, each in chosen.items():
        assert made[name][0] == replace(each, warps=32)
        assert each in made[name][1:]


DRY_RUN = """
import itertools, sys
sys.path.insert(0, FOLDER)
import fp8_cast_settings, fp8_casts, torch
shape, device = "tiny", torch.device("cpu")
clock = fp8_casts.Clock(device, 1, float("inf"))
small = dict.fromkeys(("LARGEST", "GATE_LARGEST"), fp8_cast_settings.spans((256, 8, 4)))
for name, cases in fp8_casts.CASES.items():
    settings = small.get(name, fp8_cast_settings.SETTINGS[name][1:2])
    for case in itertools.islice(cases(shape, device), 1):
        assert len(fp8_casts.compared(clock, case, settings)["times"]) == 1
        case.wanted[-1] = case.wanted[-1].flatten().view(torch.uint8) + 1
        assert not fp8_casts.compared(clock, case, settings)["times"]
"""


@pytest.mark.slow
def test_settings_are_compared_and_wrong_ones_left_out() -> None:
    run_interpreted(f"FOLDER = {str(FOLDER)!r}\n{DRY_RUN}")
