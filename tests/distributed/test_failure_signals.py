"""SIGTERM, Ctrl-C and SLURM's signal: all ranks act together, after the same step."""

import os
import re
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.harness import run_ranks_fresh
from tests.launch_runs import Outcome, run_forked, start_ranks

LONG = ["--mode", "slow", "--steps", "2000", "--save"]


def wait_for_step(folder: str, rank: int = 0) -> None:
    """Until a rank has done a step."""
    deadline = time.monotonic() + 60
    while not (Path(folder) / f"step-{rank}").exists():
        assert time.monotonic() < deadline, "no step within a minute"
        time.sleep(0.02)
    time.sleep(0.2)


def send(signum: int, rank: int, folder: str) -> Callable[[list[int]], None]:
    def during(pids: list[int]) -> None:
        wait_for_step(folder)
        os.kill(pids[rank], signum)

    return during


def from_outside(rank: int, world_size: int, signum: int, target: int, folder: str) -> Outcome:
    return start_ranks(2, LONG, folder, send(signum, target, folder))


def forked(rank: int, world_size: int, signum: int, folder: str) -> Outcome:
    def signal_this_process() -> None:
        wait_for_step(folder)
        os.kill(os.getpid(), signum)

    threading.Thread(target=signal_this_process, daemon=True).start()
    return run_forked(LONG, folder)


def to_a_forked_rank(rank: int, world_size: int, signum: int, folder: str) -> Outcome:
    def signal_second_rank() -> None:
        wait_for_step(folder, rank=1)
        os.kill(int((Path(folder) / "step-1").read_text()), signum)

    threading.Thread(target=signal_second_rank, daemon=True).start()
    return run_forked(LONG, folder)


def assert_stopped_together(outcome: Outcome, ranks: int, folder: Path) -> None:
    assert not outcome.left
    steps = re.findall(r"ended rank=(\d) step=(\d+)", outcome.output)
    assert len(steps) == ranks, outcome.output
    assert len({step for _, step in steps}) == 1
    assert int(steps[0][1]) < 2000
    assert (folder / "on_exception.ckpt").is_dir()
    assert "Traceback" not in outcome.output


@pytest.mark.parametrize("target", [0, 1])
def test_sigterm_to_one_rank(target: int, tmp_path: Path) -> None:
    (outcome,) = run_ranks_fresh(
        from_outside, 1, signal.SIGTERM, target, str(tmp_path), timeout=100
    )
    assert outcome.statuses == (143, 143)
    assert_stopped_together(outcome, 2, tmp_path)


def test_interrupt_of_one_rank(tmp_path: Path) -> None:
    (outcome,) = run_ranks_fresh(from_outside, 1, signal.SIGINT, 0, str(tmp_path), timeout=100)
    assert outcome.statuses == (1, 1)
    assert "Press Ctrl-C again to end it at once" in outcome.output
    assert_stopped_together(outcome, 2, tmp_path)


STATUSES = [(signal.SIGTERM, 143), (signal.SIGUSR1, 138), (signal.SIGINT, 1)]


@pytest.mark.parametrize(("signum", "status"), STATUSES)
def test_signal_to_the_process_that_forks(signum: int, status: int, tmp_path: Path) -> None:
    (outcome,) = run_ranks_fresh(forked, 1, signum, str(tmp_path), timeout=100)
    assert outcome.statuses == (status,)
    assert not outcome.left
    assert (tmp_path / "on_exception.ckpt").is_dir()


@pytest.mark.parametrize(("signum", "status"), STATUSES[:2])
def test_signal_to_a_forked_rank(signum: int, status: int, tmp_path: Path) -> None:
    (outcome,) = run_ranks_fresh(to_a_forked_rank, 1, signum, str(tmp_path), timeout=100)
    assert outcome.statuses == (status,)
    assert not outcome.left
    assert "Traceback" not in outcome.output
    assert (tmp_path / "on_exception.ckpt").is_dir()
