"""`verify` over two GPUs: layouts against one GPU, from the command line."""

import json
from pathlib import Path

import pytest
import torch

from megatron_lightning.cli import verify as command
from megatron_lightning.cli.errors import run_command
from tests.harness import run_ranks_fresh

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices"),
]

LAYOUTS = "tp2 tp2+sp pp2 cp2 dp2 dp2+zero1 dp2+fsdp recompute"


def status(rank: int, world_size: int, arguments: str) -> int:
    try:
        return run_command(command.main, arguments.split(), "verify")
    except SystemExit as error:
        return int(error.code or 0)


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_layouts_of_two_gpus(precision: str, tmp_path: Path) -> None:
    values = tmp_path / "report.json"
    arguments = (
        f"--preset tiny --layouts {LAYOUTS} --accelerator gpu --precision {precision}"
        f" --json {values}"
    )
    code = run_ranks_fresh(status, 1, arguments, timeout=500)[0]
    for candidate in json.loads(values.read_text())["candidates"]:
        print(candidate["name"], candidate["passed"], candidate["findings"][:1])
    assert code == 0
