"""The table of who holds memory at the peak, from a written trace."""

import importlib
from pathlib import Path
from typing import Any

import pytest

FOLDER = Path(__file__).parents[3] / "benchmarks"
MIB = 1 << 20


@pytest.fixture
def memory_table(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(FOLDER))
    return importlib.import_module("memory_table")


def event(action: str, address: int, size: int, *frames: tuple[str, int, str]) -> dict[str, Any]:
    named = [{"filename": name, "line": line, "name": function} for name, line, function in frames]
    return {"action": action, "addr": address, "size": size, "frames": named}


TRACE = [
    event("alloc", 1, 4 * MIB, ("/x/megatron_lightning/parallel/flat.py", 7, "make")),
    event("alloc", 2, 2 * MIB, ("/t/ab/cab.py", 3, "call"), ("/x/megatron_lightning/a.py", 9, "f")),
    event("alloc", 3, 2 * MIB, ("/t/ab/cab.py", 3, "call"), ("/x/megatron_lightning/a.py", 9, "f")),
    event("free_requested", 2, 2 * MIB),
    event("free_completed", 2, 2 * MIB),
    event("alloc", 2, 1 * MIB),
    event("free_requested", 3, 2 * MIB),
    event("free_requested", 2, 1 * MIB),
]


def test_what_was_alive_at_the_peak_is_found_whatever_came_later(memory_table: Any) -> None:
    peak, alive = memory_table.alive_at_peak(TRACE)
    assert peak == 8 * MIB
    assert sorted(one["addr"] for one in alive) == [1, 2, 3]
    assert sum(one["size"] for one in alive) == peak


def test_lines_are_by_place_and_size(memory_table: Any) -> None:
    first, *lines = memory_table.table(TRACE).splitlines()
    assert first == "peak 0.01 GiB in 3 pieces"
    assert "1 x      4.00 MiB  parallel/flat.py:7 make" in lines[0]
    assert "2 x      2.00 MiB  megatron_lightning/a.py:9 f < ab/cab.py:3 call" in lines[1]
    assert lines[2].endswith("0.000 GiB in smaller sums")


def test_a_later_higher_peak_replaces_an_earlier_one(memory_table: Any) -> None:
    trace = [*TRACE, event("alloc", 9, 16 * MIB)]
    peak, alive = memory_table.alive_at_peak(trace)
    assert peak == 20 * MIB
    assert sorted(one["addr"] for one in alive) == [1, 9]
    assert "(no Python" in memory_table.table(trace)
