"""Fresh processes: a script that starts its own ranks, torchrun, and SLURM's srun.

SLURM is played by stand-ins for `srun` and `scontrol` with the variables that the real ones set.
"""

import os
import re
import signal
import sys
import textwrap
import threading
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from tests.launch_runs import SCRIPT, processes_with, run_command, since_failure

pytestmark = pytest.mark.slow
Start = Callable[..., list[str]]

SRUN = f"""\
#!{sys.executable}
import os, subprocess, sys
tasks = int(sys.argv[1].removeprefix("--ntasks-per-node="))
ranks = []
for task in range(tasks):
    environment = dict(os.environ) | {{
        "SLURM_JOB_ID": "4711", "SLURM_JOB_NAME": "train", "SLURM_NTASKS": str(tasks),
        "SLURM_NTASKS_PER_NODE": str(tasks), "SLURM_NNODES": "1", "SLURM_NODELIST": "localhost",
        "SLURM_PROCID": str(task), "SLURM_LOCALID": str(task), "SLURM_NODEID": "0",
        "MASTER_ADDR": "127.0.0.1",
    }}
    ranks.append(subprocess.Popen(sys.argv[2:], env=environment))
sys.exit(max(abs(rank.wait()) for rank in ranks))
"""
SCONTROL = """\
#!/bin/sh
echo "$@" >> "$(dirname "$0")/requeued"
"""


@pytest.fixture
def slurm(tmp_path: Path) -> Path:
    """Folder with stand-ins for SLURM's commands."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name, text in (("srun", SRUN), ("scontrol", SCONTROL)):
        (folder / name).write_text(textwrap.dedent(text))
        (folder / name).chmod(0o755)
    return folder


def assert_nothing_left(folder: Path) -> None:
    """No process of the script, at the latest when data loader workers have noticed."""
    deadline = time.monotonic() + 10
    while (left := processes_with(str(folder))) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not left


def done(output: str) -> list[str]:
    return sorted(line for line in output.splitlines() if line.startswith("done "))


def script(folder: Path, *arguments: str) -> list[str]:
    return [sys.executable, SCRIPT, "--folder", str(folder), *arguments]


def torchrun(folder: Path, *arguments: str) -> list[str]:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    return [*command, "--nproc-per-node", "2", SCRIPT, "--folder", str(folder), *arguments]


@pytest.mark.parametrize("start", [script, torchrun])
def test_all_ranks_train(start: Start, tmp_path: Path) -> None:
    status, output = run_command(start(tmp_path, "--tp", "2"))
    assert status == 0, output
    first, second = done(output)
    assert first.replace("rank=0", "rank=1") == second
    assert_nothing_left(tmp_path)


@pytest.mark.parametrize(("start", "rank"), [(script, 1), (torchrun, 0)])
def test_a_rank_raises(start: Start, rank: int, tmp_path: Path) -> None:
    status, output = run_command(start(tmp_path, "--mode", "step", "--rank", str(rank)))
    assert status == 1, output
    assert since_failure(str(tmp_path)) < 20
    assert f"[rank {rank}] ValueError: boom in training_step" in output.splitlines()
    assert f"[rank {1 - rank}] ends because rank {rank} failed" in output
    assert "Connection closed" not in output
    assert_nothing_left(tmp_path)


def test_first_rank_of_a_script_is_killed(tmp_path: Path) -> None:
    status, output = run_command(script(tmp_path, "--mode", "kill", "--rank", "0"))
    assert status == -signal.SIGKILL
    assert since_failure(str(tmp_path)) < 20
    assert "[rank 1] ends because rank 0 failed" in output
    assert_nothing_left(tmp_path)


def test_a_rank_that_ends_before_the_ranks_meet(tmp_path: Path) -> None:
    """Rank 0 would wait for it until the timeout of the process group."""
    status, output = run_command(script(tmp_path, "--mode", "import"))
    assert status == 1
    assert "[rank 1] ended: exit status 3; the job ends" in output
    assert_nothing_left(tmp_path)


def test_sigterm_to_the_script(tmp_path: Path) -> None:
    def send() -> None:
        _rank(tmp_path, 0).send_signal(signal.SIGTERM)

    threading.Thread(target=send, daemon=True).start()
    command = script(tmp_path, "--mode", "slow", "--steps", "2000", "--save")
    status, output = run_command(command)
    assert status == 143, output
    assert (tmp_path / "on_exception.ckpt").is_dir()
    assert_nothing_left(tmp_path)


def test_slurm_requeues_and_resumes(slurm: Path, tmp_path: Path) -> None:
    """After SIGUSR1 at one rank all save, rank 0 requeues, and the next job goes on from there."""
    run = tmp_path / "run"

    def send() -> None:
        _rank(run, 1).send_signal(signal.SIGUSR1)

    environment = {"PATH": f"{slurm}:{os.environ['PATH']}"}
    command = ["srun", "--ntasks-per-node=2", *script(run, "--mode", "slow", "--steps", "60")]
    threading.Thread(target=send, daemon=True).start()
    status, output = run_command(command, environment)
    assert status == 138, output
    assert (slurm / "requeued").read_text() == "requeue 4711\n"
    assert (run / "hpc_ckpt_1.ckpt").is_dir()
    stopped = re.search(r"Step (\d+): stopped by SIGUSR1; saved as .*; requeued", output)
    assert stopped, output
    status, again = run_command(command, environment)
    assert status == 0, again
    assert f"first step of rank 0: {stopped[1]}" in again
    assert len(done(again)) == 2
    assert_nothing_left(tmp_path)


def _rank(folder: Path, rank: int) -> psutil.Process:
    """Process of a rank that has done a step."""
    deadline = time.monotonic() + 100
    file = folder / f"step-{rank}"
    while not file.exists() or not file.read_text():
        assert time.monotonic() < deadline
        time.sleep(0.05)
    return psutil.Process(int(file.read_text()))
