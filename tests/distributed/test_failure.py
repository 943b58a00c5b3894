"""A rank that fails ends the job within seconds, with its own traceback and its rank."""

from pathlib import Path

import pytest

from tests.harness import run_ranks_fresh
from tests.launch_runs import Outcome, run_forked, start_ranks

LIMIT_SECONDS = 15.0
"""What is promised is 60; the ranks of a test share few cores."""

FAILURES = {
    "step": "ValueError: boom in training_step",
    "setup": "KeyError: 'no such thing in setup'",
    "worker": "OSError: cannot read this sample",
    "callback": "ValueError: boom in a callback",
    "memory": "MemoryError: no room for 3 GiB",
    "exit": "SystemExit: 0",
}
PIPELINE = ("--devices", "4", "--tp", "2", "--pp", "2")


def from_outside(
    rank: int, world_size: int, size: int, arguments: list[str], folder: str
) -> Outcome:
    return start_ranks(size, arguments, folder)


def forked(rank: int, world_size: int, arguments: list[str], folder: str) -> Outcome:
    return run_forked(arguments, folder)


def assert_job_failed(outcome: Outcome, rank: int, message: str) -> None:
    assert not outcome.left
    assert all(status != 0 for status in outcome.statuses), outcome
    assert 0 < outcome.seconds < LIMIT_SECONDS
    lines = outcome.output.splitlines()
    assert f"[rank {rank}] {message}" in lines, outcome.output
    shown = [line for line in lines if "Traceback (most recent call last)" in line]
    of_others = [
        line for line in shown if line.startswith("[rank") and f"[rank {rank}]" not in line
    ]
    assert not of_others, outcome.output


@pytest.mark.parametrize("mode", FAILURES)
def test_ranks_started_from_outside(mode: str, tmp_path: Path) -> None:
    arguments = [*PIPELINE, "--mode", mode, "--rank", "2"]
    (outcome,) = run_ranks_fresh(from_outside, 1, 4, arguments, str(tmp_path), timeout=100)
    assert_job_failed(outcome, 2, FAILURES[mode])
    for survivor in (0, 1, 3):
        assert f"[rank {survivor}] ends because rank 2 failed: " in outcome.output


@pytest.mark.parametrize("mode", ["step", "exit"])
def test_first_rank_fails(mode: str, tmp_path: Path) -> None:
    arguments = ["--mode", mode, "--rank", "0"]
    (outcome,) = run_ranks_fresh(from_outside, 1, 2, arguments, str(tmp_path), timeout=100)
    assert_job_failed(outcome, 0, FAILURES[mode])


@pytest.mark.parametrize("rank", [0, 1])
def test_killed_rank(rank: int, tmp_path: Path) -> None:
    arguments = ["--mode", "kill", "--rank", str(rank)]
    (outcome,) = run_ranks_fresh(from_outside, 1, 2, arguments, str(tmp_path), timeout=100)
    assert outcome.statuses[rank] == -9
    assert outcome.statuses[1 - rank] == 1
    assert 0 < outcome.seconds < LIMIT_SECONDS
    assert f"[rank {1 - rank}] ends because rank {rank} failed: the process ended" in outcome.output
    assert "Traceback" not in outcome.output


def test_survivors_that_wait_for_something_else(tmp_path: Path) -> None:
    """As in a collective of NCCL, which does not notice that a peer is gone."""
    arguments = ["--mode", "stuck", "--rank", "1"]
    (outcome,) = run_ranks_fresh(from_outside, 1, 2, arguments, str(tmp_path), timeout=100)
    assert_job_failed(outcome, 1, "ValueError: boom while others wait")


def test_survivors_that_cannot_free_their_memory(tmp_path: Path) -> None:
    arguments = ["--mode", "stuck_teardown", "--rank", "1"]
    (outcome,) = run_ranks_fresh(from_outside, 1, 2, arguments, str(tmp_path), timeout=100)
    assert_job_failed(outcome, 1, FAILURES["callback"])


def test_all_ranks_fail_alike(tmp_path: Path) -> None:
    """One traceback, and the checkpoint on exceptions is saved by all of them."""
    arguments = ["--mode", "fail_all", "--save"]
    (outcome,) = run_ranks_fresh(from_outside, 1, 2, arguments, str(tmp_path), timeout=100)
    assert outcome.statuses == (1, 1)
    assert outcome.output.count("Traceback") == 1
    assert (tmp_path / "on_exception.ckpt").is_dir()


def test_a_rank_that_fails_alone_saves_nothing(tmp_path: Path) -> None:
    arguments = ["--mode", "callback", "--save", "--rank", "1"]
    (outcome,) = run_ranks_fresh(from_outside, 1, 2, arguments, str(tmp_path), timeout=100)
    assert_job_failed(outcome, 1, FAILURES["callback"])
    assert not (tmp_path / "on_exception.ckpt").exists()
    assert "on_exception.ckpt is not saved" in outcome.output


def test_all_ranks_leave_in_peace(tmp_path: Path) -> None:
    arguments = ["--mode", "exit_all"]
    (outcome,) = run_ranks_fresh(from_outside, 1, 2, arguments, str(tmp_path), timeout=100)
    assert outcome.statuses == (0, 0)
    assert "[rank" not in outcome.output


@pytest.mark.parametrize(("mode", "rank"), [(mode, 1) for mode in FAILURES] + [("step", 0)])
def test_forked_ranks(mode: str, rank: int, tmp_path: Path) -> None:
    arguments = ["--mode", mode, "--rank", str(rank)]
    (outcome,) = run_ranks_fresh(forked, 1, arguments, str(tmp_path), timeout=100)
    assert_job_failed(outcome, rank, FAILURES[mode])


def test_killed_forked_rank(tmp_path: Path) -> None:
    arguments = ["--mode", "kill", "--rank", "1"]
    (outcome,) = run_ranks_fresh(forked, 1, arguments, str(tmp_path), timeout=100)
    assert not outcome.left
    assert outcome.statuses == (1,)
    assert 0 < outcome.seconds < LIMIT_SECONDS
    last = outcome.output.splitlines()[-1]
    assert last.endswith("[rank 1] ended without a traceback: SIGKILL (out of memory?)")
