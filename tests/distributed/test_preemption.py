"""A signal at one rank: all ranks stop after the same step with one checkpoint, which continues bit
for bit.
"""

import os
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from lightning.fabric.plugins.environments import SLURMEnvironment
from lightning.pytorch.callbacks import ModelCheckpoint, OnExceptionCheckpoint

from megatron_lightning.checkpoint import load_metadata, verify
from megatron_lightning.config import CheckpointConfig, DataParallelConfig, RuntimeConfig
from tests.harness import run_ranks_fresh
from tests.layout_runs import Run, tiny_config
from tests.preemption_runs import STEPS, Signal, assert_continues, fit

CONFIG = tiny_config(num_layers=2, hidden_size=32, ffn_hidden_size=64, hidden_dropout=0.1)
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "tp2_pp2": (4, dict(tensor_parallel_size=2, pipeline_parallel_size=2, micro_batch_size=2)),
    "dp2": (2, dict(data_parallel=DataParallelConfig(sharding="optimizer"))),
    "fsdp2": (2, dict(data_parallel=DataParallelConfig(sharding="fsdp"))),
}
PLACES: dict[str, tuple[int, dict[str, Any]]] = {
    # place of the signal: step of the checkpoint, settings of the Trainer
    "window": (2, dict(accumulate_grad_batches=2)),
    "twice": (3, {}),
    "validation": (2, dict(limit_val_batches=2, val_check_interval=2)),
    "due": (4, dict(limit_val_batches=2, val_check_interval=2)),
    "epoch_end": (6, dict(max_steps=12)),
    "last_validation": (6, dict(limit_val_batches=2, max_steps=12)),
}
SLOW = pytest.mark.slow
TP2 = Run(config=CONFIG, layout=dict(tensor_parallel_size=2), steps=STEPS)


def saved(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.name.endswith(".ckpt"))


@pytest.mark.parametrize(
    "layout", ["tp2_pp2", *(pytest.param(name, marks=SLOW) for name in ("dp2", "fsdp2"))]
)
def test_in_the_middle_of_a_collective(layout: str, tmp_path: Path) -> None:
    size, options = LAYOUTS[layout]
    run = Run(config=CONFIG, layout=options, steps=STEPS)
    whole = run_ranks_fresh(fit, size, run, str(tmp_path / "whole"))
    part = run_ranks_fresh(fit, size, run, str(tmp_path), Signal("collective", 1))
    assert {rank["status"] for rank in part} == {143}
    assert {rank["step"] for rank in part} in ({3}, {4})  # 4: it came after this rank had voted
    assert saved(tmp_path) == ["hpc_ckpt_1.ckpt"]
    rest = run_ranks_fresh(fit, size, run, str(tmp_path), None, "hpc")
    assert_continues(whole, part, rest)


@pytest.mark.parametrize("place", [pytest.param(place, marks=SLOW) for place in PLACES])
def test_at_any_place(place: str, tmp_path: Path) -> None:
    step, settings = PLACES[place]
    run = Run(config=CONFIG, layout=dict(tensor_parallel_size=2), steps=STEPS, trainer=settings)
    whole = run_ranks_fresh(fit, 2, run, str(tmp_path / "whole"))
    part = run_ranks_fresh(fit, 2, run, str(tmp_path), Signal(place, 1))
    assert {rank["status"] for rank in part} == {143}
    assert saved(tmp_path) == ["hpc_ckpt_1.ckpt"]
    assert load_metadata(tmp_path / "hpc_ckpt_1.ckpt")["global_step"] == step
    rest = run_ranks_fresh(fit, 2, run, str(tmp_path), None, "last")
    assert_continues(whole, part, rest)


def test_before_the_first_step(tmp_path: Path) -> None:
    """Nothing is lost, so nothing is saved, and no rank is left waiting."""
    part = run_ranks_fresh(fit, 2, TP2, str(tmp_path), Signal("setup", 1))
    assert {(rank["status"], rank["step"]) for rank in part} == {(143, 0)}
    assert saved(tmp_path) == []


@pytest.mark.parametrize("background", [False, pytest.param(True, marks=SLOW)])
def test_during_a_save(background: bool, tmp_path: Path) -> None:
    """The save that is under way is finished, then comes a step, and its checkpoint."""
    config = CheckpointConfig(asynchronous=background)
    run = replace(TP2, layout=TP2.layout | dict(checkpoint=config))
    saver = ModelCheckpoint(tmp_path / "regular", filename="{step}", every_n_train_steps=2)
    part = run_ranks_fresh(fit, 2, run, str(tmp_path), Signal("save", 1), None, (saver,))
    assert {(rank["status"], rank["step"]) for rank in part} == {(143, 3)}
    assert saved(tmp_path / "regular") == ["step=2.ckpt"]
    assert saved(tmp_path) == ["hpc_ckpt_1.ckpt"]
    verify(tmp_path / "regular" / "step=2.ckpt")
    rest = run_ranks_fresh(fit, 2, run, str(tmp_path), None, "last", (saver,))
    whole = run_ranks_fresh(fit, 2, TP2, str(tmp_path / "whole"))
    assert_continues(whole, part, rest)


def test_one_process(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    run = replace(TP2, layout={})
    (part,) = run_ranks_fresh(fit, 1, run, str(tmp_path), Signal("step", 0))
    assert (part["status"], part["step"]) == (143, 3)
    said = capfd.readouterr().err
    assert "hpc_ckpt_1.ckpt" in said
    assert "weights_only" not in said  # Lightning's remark on a default, before what matters
    assert saved(tmp_path) == ["hpc_ckpt_1.ckpt"]


def test_saving_can_be_left_out(tmp_path: Path) -> None:
    run = replace(TP2, layout=dict(runtime=RuntimeConfig(save_on_preemption=False)))
    (part,) = run_ranks_fresh(fit, 1, run, str(tmp_path), Signal("step", 0))
    assert (part["status"], part["step"]) == (143, 3)
    assert saved(tmp_path) == []


@SLOW
@pytest.mark.parametrize("kind", [OnExceptionCheckpoint, ModelCheckpoint])
def test_callbacks_that_save_on_exceptions_are_enough(kind: type, tmp_path: Path) -> None:
    options: dict[str, Any] = (
        {} if kind is OnExceptionCheckpoint else dict(save_on_exception=True, save_last=True)
    )
    saver = kind(tmp_path / "regular", **options)
    usr1 = Signal("step", 1, signal.SIGUSR1)
    part = run_ranks_fresh(fit, 2, TP2, str(tmp_path), usr1, None, (saver,))
    assert {(rank["status"], rank["step"]) for rank in part} == {(138, 3)}
    assert saved(tmp_path) == []
    assert saved(tmp_path / "regular")
    rest = run_ranks_fresh(fit, 2, TP2, str(tmp_path), None, "last", (saver,))
    whole = run_ranks_fresh(fit, 2, TP2, str(tmp_path / "whole"))
    assert_continues(whole, part, rest)


def fit_with_handler(rank: int, world_size: int, folder: str) -> tuple[Any, int, int]:
    seen: list[int] = []
    signal.signal(signal.SIGUSR1, lambda signum, frame: seen.append(signum))
    result = fit(rank, world_size, TP2, folder, Signal("step", 1, signal.SIGUSR1))
    return result["status"], result["step"], len(seen)


def test_a_handler_of_the_user_keeps_its_meaning(tmp_path: Path) -> None:
    first, second = run_ranks_fresh(fit_with_handler, 2, str(tmp_path))
    assert first == (0, STEPS, 0)
    assert second == (0, STEPS, 1)


def fit_under_slurm(
    rank: int, world_size: int, run: Run, folder: str, sender: Signal | None
) -> dict[str, Any]:
    """As a task of a SLURM job, with a stand-in for `scontrol` in the folder."""
    variables = dict(JOB_ID=4711, ARRAY_JOB_ID=4700, ARRAY_TASK_ID=3, NTASKS=world_size)
    variables |= dict(NTASKS_PER_NODE=world_size, NNODES=1, PROCID=rank, LOCALID=rank, NODEID=0)
    os.environ.update({f"SLURM_{name}": str(value) for name, value in variables.items()})
    os.environ |= {"SLURM_JOB_NAME": "train", "PATH": f"{folder}:{os.environ['PATH']}"}
    del os.environ["RANK"], os.environ["LOCAL_RANK"]
    settings = run.trainer | dict(plugins=[SLURMEnvironment()])
    return fit(rank, world_size, replace(run, trainer=settings), folder, sender)


def test_slurm_requeues(tmp_path: Path) -> None:
    """The next turn of the job begins from there by itself."""
    command = tmp_path / "scontrol"
    command.write_text('#!/bin/sh\necho "$@" >> "$(dirname "$0")/requeued"\n')
    command.chmod(0o755)
    usr1 = Signal("step", 1, signal.SIGUSR1)
    part = run_ranks_fresh(fit_under_slurm, 2, TP2, str(tmp_path), usr1)
    assert {rank["status"] for rank in part} == {138}
    assert (tmp_path / "requeued").read_text() == "requeue 4700_3\n"
    assert saved(tmp_path) == ["hpc_ckpt_1.ckpt"]
    rest = run_ranks_fresh(fit_under_slurm, 2, TP2, str(tmp_path), None)
    whole = run_ranks_fresh(fit, 2, TP2, str(tmp_path / "whole"))
    assert_continues(whole, part, rest)
