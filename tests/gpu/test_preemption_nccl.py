"""A signal at one of two GPUs while collectives of NCCL run: both stop after the same step, and the
run continues bit for bit from what was saved. The same from local copies, when a rank is killed.
"""

import os
import shutil
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from megatron_lightning.config import (
    CheckpointConfig,
    DataParallelConfig,
    LocalCheckpointConfig,
)
from tests.harness import RankError, run_ranks_fresh
from tests.launch_runs import SCRIPT, run_command
from tests.layout_runs import Run, tiny_config
from tests.preemption_runs import STEPS, Signal, assert_continues, fit

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.slow,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices"),
]

LAYOUTS: dict[str, dict[str, Any]] = {
    "pp2": dict(pipeline_parallel_size=2, micro_batch_size=2),
    "tp2": dict(tensor_parallel_size=2),
    "dp2": dict(data_parallel=DataParallelConfig(sharding="optimizer")),
    "fsdp2": dict(data_parallel=DataParallelConfig(sharding="fsdp")),
}


def run_of(layout: dict[str, Any], **settings: Any) -> Run:
    trainer = dict(accelerator="gpu", precision="bf16-mixed", deterministic=True)
    config = tiny_config(num_layers=2, hidden_dropout=0.1)
    return Run(config=config, layout=layout, steps=STEPS, trainer=trainer | settings)


def deterministic(rank: int, world_size: int, *args: Any) -> dict[str, Any]:
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
    return fit(rank, world_size, *args)


def both(*args: Any) -> list[dict[str, Any]]:
    return run_ranks_fresh(deterministic, 2, *args, timeout=200)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_in_the_middle_of_collectives(layout: str, tmp_path: Path) -> None:
    run = run_of(LAYOUTS[layout])
    whole = both(run, str(tmp_path / "whole"))
    part = both(run, str(tmp_path), Signal("collective", 1))
    assert {rank["status"] for rank in part} == {143}
    assert {rank["step"] for rank in part} in ({3}, {4})
    assert (tmp_path / "hpc_ckpt_1.ckpt").is_dir()
    rest = both(run, str(tmp_path), None, "last")
    assert_continues(whole, part, rest)


def test_in_a_validation(tmp_path: Path) -> None:
    run = run_of(LAYOUTS["pp2"], limit_val_batches=2, val_check_interval=2)
    whole = both(run, str(tmp_path / "whole"))
    part = both(run, str(tmp_path), Signal("validation", 1, signal.SIGUSR1))
    assert {(rank["status"], rank["step"]) for rank in part} == {(138, 2)}
    rest = both(run, str(tmp_path), None, "hpc")
    assert_continues(whole, part, rest)


def test_a_checkpoint_that_is_being_written_in_the_background(tmp_path: Path) -> None:
    layout = LAYOUTS["dp2"] | dict(checkpoint=CheckpointConfig(asynchronous=True))
    saver = ModelCheckpoint(tmp_path / "regular", filename="{step}", every_n_train_steps=2)
    part = both(run_of(layout), str(tmp_path), Signal("save", 1), None, (saver,))
    assert {(rank["status"], rank["step"]) for rank in part} == {(143, 3)}
    assert (tmp_path / "regular" / "step=2.ckpt").is_dir()
    assert (tmp_path / "hpc_ckpt_1.ckpt").is_dir()


@pytest.mark.parametrize("launcher", ["script", "fork"])
def test_a_script(launcher: str, tmp_path: Path) -> None:
    def send() -> None:
        file, deadline = tmp_path / "step-1", time.monotonic() + 120
        while not (file.exists() and file.read_text()) and time.monotonic() < deadline:
            time.sleep(0.05)
        time.sleep(0.5)
        os.kill(int(file.read_text()), signal.SIGTERM)

    threading.Thread(target=send, daemon=True).start()
    options = ["--accelerator", "gpu", "--pp", "2", "--mode", "slow", "--steps", "2000"]
    options += ["--launcher", launcher, "--folder", str(tmp_path)]
    status, output = run_command([sys.executable, SCRIPT, *options], timeout=180)
    assert status == 143, output
    assert (tmp_path / "hpc_ckpt_1.ckpt").is_dir()
    assert "Traceback" not in output, output


# ---------------------------------------------------------------------- local copies


class Die(L.Callback):
    """Kills rank 1 in step 5, when both ranks have the copies of step 4."""

    reads_parameters = False

    def __init__(self, folder: str) -> None:
        self.folder = folder

    def on_train_batch_start(self, trainer: L.Trainer, *args: Any) -> None:
        if (trainer.global_rank, trainer.global_step) != (1, 5):
            return
        deadline = time.monotonic() + 60
        while len(list(Path(self.folder).rglob("step_0000000004"))) < 4:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGKILL)


def on_nodes(rank: int, world_size: int, run: Run, folder: str, *args: Any) -> dict[str, Any]:
    local = LocalCheckpointConfig(folder=f"{folder}/node{rank}", every_n_steps=2)
    run.layout["checkpoint"] = CheckpointConfig(local=local)
    return deterministic(rank, world_size, run, folder, *args)


@pytest.mark.parametrize("layout", ["pp2", "dp2"])
def test_a_lost_rank_gets_its_part_from_its_partner(layout: str, tmp_path: Path) -> None:
    run = run_of(dict(LAYOUTS[layout]))
    whole = both(run, str(tmp_path / "whole"))
    with pytest.raises(RankError):
        run_ranks_fresh(
            on_nodes, 2, run, str(tmp_path), None, None, (Die(str(tmp_path)),), timeout=200
        )
    shutil.rmtree(tmp_path / "node1")
    saver = ModelCheckpoint(tmp_path / "regular")
    rest = run_ranks_fresh(on_nodes, 2, run, str(tmp_path), None, "last", (saver,), timeout=200)
    part = [dict(losses=one["losses"][:4], validations=[]) for one in whole]
    assert_continues(whole, part, rest)
