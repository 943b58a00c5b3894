"""Ctrl-C, SIGTERM, and a parent that is killed: nothing half-written, no worker left."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

SLOW = """
import sys, time
from megatron_lightning.data.preprocessing import encode
from megatron_lightning.data.preprocessing import files
files.BLOCK_BYTES = 1000
original = encode.BlockEncoder.__call__
def slow(self, job):
    time.sleep(0.02)
    return original(self, job)
encode.BlockEncoder.__call__ = slow
from megatron_lightning.cli.main import main
main(sys.argv[1:])
"""


def start(tmp_path: Path, *options: str) -> subprocess.Popen:
    source = tmp_path / "in.jsonl"
    source.write_text("".join(json.dumps({"text": f"{n} " * 20}) + "\n" for n in range(20_000)))
    command = ["preprocess", str(source), "--output-prefix", f"{tmp_path}/out"]
    return subprocess.Popen(
        [sys.executable, "-c", SLOW, *command, "--tokenizer", "bytes", *options],
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def wait_for(condition: object, seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():  # type: ignore[operator]
        assert time.monotonic() < deadline
        time.sleep(0.02)


def working(tmp_path: Path) -> bool:
    return any(path.stat().st_size > 0 for path in tmp_path.rglob("*.bin.*partial"))


@pytest.mark.parametrize(
    ("number", "kill", "status"),
    [
        pytest.param(signal.SIGINT, os.killpg, 130, marks=pytest.mark.slow),
        (signal.SIGTERM, os.kill, 143),
    ],
    ids=["SIGINT to all", "SIGTERM to one"],
)
def test_one_part(tmp_path: Path, number: int, kill: Callable, status: int) -> None:
    process = start(tmp_path, "--workers", "2")
    wait_for(lambda: working(tmp_path))
    children = psutil.Process(process.pid).children()
    assert len(children) == 2
    kill(process.pid, number)
    _, said = process.communicate(timeout=60)
    assert process.returncode == status, said
    assert "Traceback" not in said
    assert psutil.wait_procs(children, timeout=10)[1] == []
    assert [path.name for path in tmp_path.iterdir()] == ["in.jsonl"]


@pytest.mark.slow
def test_several_parts_leave_the_finished_ones(tmp_path: Path) -> None:
    process = start(tmp_path, "--workers", "2", "--partitions", "300")
    wait_for(lambda: (tmp_path / "out.parts" / "00001-of-00300.json").is_file())
    os.killpg(process.pid, signal.SIGINT)
    assert process.wait(timeout=60) == 130
    assert not list(tmp_path.rglob("*.partial"))
    names = sorted(path.name for path in (tmp_path / "out.parts").iterdir())
    parts = {name.split(".")[0] for name in names}
    finished = {name for name in parts if f"{name}.json" in names}
    assert len(finished) >= 2
    for name in finished:
        assert {f"{name}.bin", f"{name}.idx"} <= set(names)
    assert not (tmp_path / "out.idx").exists()


@pytest.mark.slow
def test_workers_notice_that_the_parent_was_killed(tmp_path: Path) -> None:
    process = start(tmp_path, "--workers", "3")
    wait_for(lambda: working(tmp_path))
    children = psutil.Process(process.pid).children()
    process.kill()
    process.wait(timeout=60)
    assert psutil.wait_procs(children, timeout=10)[1] == []
    assert not (tmp_path / "out.idx").exists()
