"""What `tests/gpu/run_all.py` makes of tests that pass, fail, end, or want more GPUs."""

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.gpu import run_all

SETTINGS = """
[pytest]
addopts = --import-mode=importlib --strict-markers -ra
markers =
    gpu
    alone
"""
TESTS = """
import os
import pytest

pytestmark = [pytest.mark.gpu]
SEEN = os.environ.get("CUDA_VISIBLE_DEVICES", "")

def note(name):
    with open("order.txt", "a") as file:
        file.write(f"{name} {SEEN}\\n")

def test_passes():
    note("passes")

def test_fails():
    assert SEEN == "none", "first line"

def test_wants_two():
    if "," not in SEEN:
        pytest.skip("needs two CUDA devices")
    note("two")

@pytest.mark.parametrize("size", [0, 1])
def test_wants_eight(size):
    note("eight")
    pytest.skip("needs 8 CUDA devices")

@pytest.mark.alone
def test_time():
    note("time")
"""
ENDS = """
import os
import pytest

@pytest.mark.gpu
def test_ends():
    print("going")
    os._exit(3)
"""


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "tests").mkdir()
    (tmp_path / "pytest.ini").write_text(SETTINGS)
    (tmp_path / "tests" / "test_some.py").write_text(TESTS)
    (tmp_path / "tests" / "test_ends.py").write_text(ENDS)
    monkeypatch.setattr(run_all, "ROOT", tmp_path)
    monkeypatch.setattr(run_all, "head", lambda: {"commit": "abc1234", "gpus": ["one", "two"]})
    return tmp_path


def run(project: Path, monkeypatch: pytest.MonkeyPatch, *options: str) -> tuple[int, Any]:
    out = project / "results.json"
    monkeypatch.setattr(sys, "argv", ["run_all.py", "--out", str(out), "--lanes", "1", *options])
    with pytest.raises(SystemExit) as ended:
        run_all.main()
    if isinstance(ended.value.code, str):
        raise AssertionError(ended.value.code)
    return int(ended.value.code or 0), json.loads(out.read_text()) if out.exists() else None


def test_each_test_gives_something(
    project: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    code, record = run(project, monkeypatch)
    found = {
        name.split("::")[1]: (each["status"], each["message"])
        for name, each in record["tests"].items()
    }
    assert found["test_passes"] == found["test_wants_two"] == found["test_time"] == ("passed", "")
    assert found["test_fails"] == ("failed", "AssertionError: first line")
    status, message = found["test_wants_eight[1]"]
    assert (status, "needs 8 CUDA devices" in message) == ("skipped", True)
    assert found["test_ends"][0] == "nothing"
    assert record["counts"] == {"passed": 3, "failed": 1, "skipped": 2, "nothing": 1}
    assert code == 1
    assert "failed: tests/test_some.py::test_fails" in capsys.readouterr().out
    order = (project / "order.txt").read_text().split("\n")[:-1]
    assert len({line.split()[1] for line in order[:3]} & {"0", "1"}) == 1
    assert [line.split()[0] for line in order[:3]] == ["passes", "eight", "eight"]
    assert order[3:] == ["two 0,1", "time 0,1"]


def test_what_has_passed_is_left_out(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run(project, monkeypatch)
    earlier = project / "earlier.json"
    (project / "results.json").rename(earlier)
    (project / "order.txt").unlink()
    _, record = run(project, monkeypatch, "--earlier", str(earlier), "--", "-k", "not ends")
    assert not (project / "order.txt").exists()
    assert record["counts"] == {"passed": 3, "failed": 1, "skipped": 2}
    earlier.write_text(earlier.read_text().replace("abc1234", "def5678"))
    with pytest.raises(AssertionError, match="of commit def5678, and this is abc1234"):
        run(project, monkeypatch, "--earlier", str(earlier))


def test_nothing_begins_when_time_is_over(
    project: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    code, record = run(project, monkeypatch, "--seconds", "0")
    assert (code, record) == (1, None)
    assert "7 left out" in capsys.readouterr().out
    assert not (project / "order.txt").exists()


def test_the_longest_come_first() -> None:
    tests = ["a.py::one", "a.py::two", "a.py::three", "b.py::four"]
    before = {"a.py::one": 1.0, "a.py::two": 2.0, "a.py::three": 50.0, "b.py::four": 9.0}
    assert run_all.units(tests, 2, before) == [
        ["a.py::three"],
        ["b.py::four"],
        ["a.py::one", "a.py::two"],
    ]


def test_reasons_of_tests_that_want_more_gpus_are_known() -> None:
    """One of other words would never run on a machine with enough of them."""
    reason = re.compile(r"device_count\(\) <.*?(?:reason=|skip\()f?\"(.*?)\"", re.DOTALL)
    found = {
        said
        for path in sorted((run_all.ROOT / "tests").rglob("test_*.py"))
        if path != Path(__file__).resolve()
        for said in reason.findall(path.read_text())
    }
    assert len(found) > 1
    said_for = [re.sub(r"{\w+}", "8", each) for each in sorted(found)]
    assert [each for each in said_for if not run_all.WANTS_MORE.search(each)] == []
