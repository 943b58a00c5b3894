"""A failing rank on GPUs: the others wait in collectives of NCCL, which notice nothing."""

import sys
from pathlib import Path

import pytest
import torch

from tests.launch_runs import SCRIPT, run_command, since_failure

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.slow,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs 2 CUDA devices"),
]
LIMIT_SECONDS = 20.0


def run(folder: Path, *arguments: str, before: str = "") -> tuple[int, str]:
    """The script on two GPUs, after some code in the same process."""
    code = f"import runpy, sys\n{before}\nrunpy.run_path({SCRIPT!r}, run_name='__main__')"
    options = ["--accelerator", "gpu", "--folder", str(folder), *arguments]
    command = [sys.executable, "-c", code, *options] if before else [sys.executable, SCRIPT]
    return run_command(command if before else [*command, *options], timeout=120)


@pytest.mark.parametrize("launcher", ["script", "fork"])
@pytest.mark.parametrize(
    ("mode", "rank", "layout", "message"),
    [
        ("step", 1, ("--pp", "2"), "[rank 1] ValueError: boom in training_step"),
        ("callback", 0, ("--tp", "2"), "[rank 0] ValueError: boom in a callback"),
        ("stuck", 1, (), "[rank 1] ValueError: boom while others wait"),
    ],
)
def test_a_rank_raises(
    launcher: str, mode: str, rank: int, layout: tuple[str, ...], message: str, tmp_path: Path
) -> None:
    trouble = ("--mode", mode, "--rank", str(rank), "--launcher", launcher)
    status, output = run(tmp_path, *layout, *trouble)
    assert status == 1, output
    assert 0 < since_failure(str(tmp_path)) < LIMIT_SECONDS
    assert message in output.splitlines(), output


@pytest.mark.parametrize(("launcher", "rank"), [("script", 0), ("fork", 1)])
def test_a_rank_is_killed(launcher: str, rank: int, tmp_path: Path) -> None:
    trouble = ("--mode", "kill", "--rank", str(rank), "--launcher", launcher)
    status, output = run(tmp_path, "--tp", "2", *trouble)
    assert status == (-9 if launcher == "script" else 1), output
    assert 0 < since_failure(str(tmp_path)) < LIMIT_SECONDS


@pytest.mark.parametrize("launcher", ["script", "fork"])
def test_all_ranks_train_and_leave_in_order(launcher: str, tmp_path: Path) -> None:
    status, output = run(tmp_path, "--tp", "2", "--launcher", launcher)
    assert status == 0, output
    assert "destroy_process_group() was not called" not in output


@pytest.mark.parametrize(
    "before",
    [
        "import torch; torch.ones(1, device='cuda')",
        "import torch; torch.ones((), requires_grad=True).backward()",
    ],
)
def test_forks_of_a_process_that_has_used_cuda(before: str, tmp_path: Path) -> None:
    """Gradients on the CPU count too: they start a thread for each GPU."""
    status, output = run(tmp_path, "--launcher", "fork", before=before)
    assert status == 1
    assert "restart the kernel" in output, output
