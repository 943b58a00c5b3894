"""Triton's kernels on the CPU: code for triton's interpreter, which another process runs."""

import os
import subprocess
import sys

import pytest

_CANNOT_LOOP = "only 0-dimensional arrays can be converted to Python scalars"


def run_interpreted(code: str) -> None:
    """Run `code`, or skip the test: triton isn't there, or is too old for the numpy beside it."""
    pytest.importorskip("triton", reason="triton runs kernels on the CPU in its interpreter")
    environment = os.environ | {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-W", "ignore", "-c", code]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if _CANNOT_LOOP in done.stderr:
        pytest.skip("this triton's interpreter makes no loops with this numpy")
    assert done.returncode == 0, done.stderr
