"""Which checkpoint "last" and "hpc" name: complete folders of this package, the newest of them."""

import warnings
from pathlib import Path
from typing import Any

import lightning as L
import pytest
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.plugins.environments import SLURMEnvironment
from lightning.pytorch.trainer.connectors.checkpoint_connector import _CheckpointConnector
from lightning.pytorch.trainer.states import TrainerFn

from megatron_lightning.checkpoint import save
from megatron_lightning.config import CheckpointConfig, LocalCheckpointConfig
from megatron_lightning.strategies import MegatronStrategy, preemption
from megatron_lightning.strategies.resume import (
    FolderConnector,
    newest_preempted,
    next_preempted,
    starting_point,
    use_folders,
)


def make_trainer(folder: Path, *parts: Any, logger: Any = False) -> L.Trainer:
    trainer = L.Trainer(
        accelerator="cpu",
        devices=1,
        logger=logger,
        strategy=next((part for part in parts if isinstance(part, MegatronStrategy)), "auto"),
        callbacks=[part for part in parts if isinstance(part, L.Callback)],
        default_root_dir=folder,
        enable_progress_bar=False,
    )
    use_folders(trainer)
    return trainer


def chosen(trainer: L.Trainer, path: str | None) -> Any:
    return trainer._checkpoint_connector._select_ckpt_path(
        TrainerFn.FITTING, path, model_provided=True, model_connected=True
    )


def test_only_complete_folders_count(tmp_path: Path) -> None:
    assert newest_preempted(tmp_path / "none") is None
    assert newest_preempted(tmp_path) is None
    assert next_preempted(tmp_path).endswith("hpc_ckpt_1.ckpt")
    save(tmp_path / "hpc_ckpt_2.ckpt", {}, {})
    (tmp_path / ".staging-hpc_ckpt_3.ckpt-0a1b2c3d").mkdir()  # of a save that a crash interrupted
    (tmp_path / "hpc_ckpt_9.ckpt").write_bytes(b"\x80\x02")  # a pickle
    (tmp_path / "my_ckpt_12").mkdir()
    assert newest_preempted(tmp_path) == str(tmp_path / "hpc_ckpt_2.ckpt")
    assert next_preempted(tmp_path) == str(tmp_path / "hpc_ckpt_10.ckpt")


def test_names_that_the_trainer_asks_for(tmp_path: Path) -> None:
    saver = ModelCheckpoint(tmp_path / "regular", save_last=True)
    trainer = make_trainer(tmp_path, saver)
    assert type(trainer._checkpoint_connector) is FolderConnector
    assert chosen(trainer, None) is None
    with pytest.raises(ValueError, match="no HPC checkpoint"):
        chosen(trainer, "hpc")
    with pytest.warns(UserWarning, match="no last checkpoint"):
        assert chosen(trainer, "last") is None
    save(tmp_path / "regular" / "last.ckpt", {}, {})
    assert chosen(trainer, "last") == str(tmp_path / "regular" / "last.ckpt")
    save(tmp_path / "hpc_ckpt_1.ckpt", {}, {})
    assert chosen(trainer, "hpc") == str(tmp_path / "hpc_ckpt_1.ckpt")
    assert chosen(trainer, "last") == str(tmp_path / "hpc_ckpt_1.ckpt")
    save(tmp_path / "regular" / "last.ckpt", {}, {})
    assert chosen(trainer, "last") == str(tmp_path / "regular" / "last.ckpt")


def test_a_slurm_job_begins_from_what_a_signal_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path / "hpc_ckpt_4.ckpt", {}, {})
    trainer = make_trainer(tmp_path)
    monkeypatch.setattr(
        "lightning.pytorch.trainer.connectors.checkpoint_connector.SLURMEnvironment.detect",
        lambda: True,
    )
    assert chosen(trainer, None) == str(tmp_path / "hpc_ckpt_4.ckpt")


def test_what_a_run_begins_from_is_known_before_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a word, and without a logger's version, which may begin its run."""
    regular, preempted = tmp_path / "regular" / "last.ckpt", tmp_path / "hpc_ckpt_1.ckpt"
    trainer = make_trainer(tmp_path, ModelCheckpoint(tmp_path / "regular"), MegatronStrategy())
    trainer.state.fn = TrainerFn.FITTING

    def known(name: Any) -> Any:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            return starting_point(trainer, name, model_given=True)

    assert known(None) is known("last") is None
    for name, told in (("hpc", "no HPC checkpoint"), ("best", "not configured to save the best")):
        with pytest.raises(ValueError, match=told):
            known(name)
    save(regular, {}, {})
    assert (known("last"), known("x/y.ckpt")) == (str(regular), "x/y.ckpt")
    save(preempted, {}, {})
    assert known("hpc") == known("last") == str(preempted)
    trainer = make_trainer(tmp_path, ModelCheckpoint(), MegatronStrategy(), logger=NewRun())
    trainer.state.fn = TrainerFn.FITTING
    assert (known("last"), known(None)) == (None, None)  # its folder may hold a newer one
    with monkeypatch.context() as requeued:
        requeued.setattr(SLURMEnvironment, "detect", lambda: True)
        assert known(None) == str(preempted)
    local = LocalCheckpointConfig(folder=str(tmp_path / "copies"), every_n_steps=1)
    trainer = make_trainer(tmp_path, MegatronStrategy(checkpoint=CheckpointConfig(local=local)))
    trainer.state.fn = TrainerFn.FITTING
    assert known("last") is None  # the ranks choose among copies, and this one


class NewRun(CSVLogger):
    """Whose version nobody may ask for yet."""

    def __init__(self) -> None:
        super().__init__("no/such/folder")

    @property
    def version(self) -> str:
        raise AssertionError("the logger was asked for its version")


def test_what_is_overridden_is_there() -> None:
    for name in ("_hpc_resume_path", "hpc_save_path", "_parse_ckpt_path"):
        assert name in vars(_CheckpointConnector)


def test_requeueing_says_what_became_of_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    assert preemption.requeue_job() == "not requeued: SLURM_JOB_ID is not set"
    monkeypatch.setenv("SLURM_JOB_ID", "4711")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "not requeued: scontrol requeue 4711: " in preemption.requeue_job()
    command = tmp_path / "scontrol"
    command.write_text("#!/bin/sh\nexit 3\n")
    command.chmod(0o755)
    assert preemption.requeue_job().endswith("ended with status 3")
