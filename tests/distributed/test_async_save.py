"""Saves in the background of a fit: the same checkpoints, whatever `ModelCheckpoint` asks for."""

import os
import signal
import time
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

import megatron_lightning.checkpoint as store
from megatron_lightning.config import CheckpointConfig, DataParallelConfig
from megatron_lightning.models.gpt import GPTModel
from tests.distributed.test_distributed_optimizer_resume import assert_equal, stored
from tests.distributed.test_resume import SAVED_AT, STEPS, fit, run_of
from tests.harness import run_ranks_fresh
from tests.layout_runs import Batches, Recorder, Run, make_strategy, tiny_config

BACKGROUND = CheckpointConfig(asynchronous=True)


def left_in(folder: str) -> list[str]:
    """Names in a folder, when the first rank has deleted what was replaced."""
    deadline = time.monotonic() + 20
    while any(name.startswith(".") for name in os.listdir(folder)) and time.monotonic() < deadline:
        time.sleep(0.02)
    return sorted(os.listdir(folder))


def small_run(**changes: Any) -> Run:
    return Run(config=tiny_config(num_layers=1), keep_gradients=(), **changes)


def make_trainer(run: Run, world_size: int, callbacks: list[L.Callback], **options: Any) -> Any:
    defaults: dict[str, Any] = dict(
        accelerator="cpu",
        devices=world_size,
        max_steps=run.steps,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        limit_val_batches=0,
    )
    layout = {"checkpoint": BACKGROUND} | run.layout
    return L.Trainer(strategy=make_strategy(layout), callbacks=callbacks, **(defaults | options))


# ---- the same as a save in the foreground


@pytest.mark.parametrize(
    ("size", "layout"),
    [
        pytest.param(1, {}, marks=pytest.mark.slow),
        (2, dict(tensor_parallel_size=2)),
        pytest.param(
            4,
            dict(tensor_parallel_size=2, data_parallel=DataParallelConfig(sharding="optimizer")),
            marks=pytest.mark.slow,
        ),
        pytest.param(
            2, dict(data_parallel=DataParallelConfig(sharding="fsdp")), marks=pytest.mark.slow
        ),
    ],
)
def test_same_checkpoint_and_same_training(
    size: int, layout: dict[str, Any], tmp_path: Path
) -> None:
    """Every tensor, bitwise; the training that went on meanwhile, bitwise; and a resumed one."""
    run = run_of(
        config=tiny_config(num_layers=2, hidden_dropout=0.1), layout=layout, learning_rate=1e-3
    )
    behind = run_of(
        config=run.config, layout=layout | dict(checkpoint=BACKGROUND), learning_rate=1e-3
    )
    whole = run_ranks_fresh(fit, size, run, str(tmp_path / "a"), STEPS, None)
    other = run_ranks_fresh(fit, size, behind, str(tmp_path / "b"), STEPS, None)
    assert len(os.listdir(tmp_path / "a")) == 3
    assert sorted(os.listdir(tmp_path / "a")) == sorted(os.listdir(tmp_path / "b"))
    for name in os.listdir(tmp_path / "a"):
        wanted, found = stored(tmp_path / "a" / name), stored(tmp_path / "b" / name)
        assert wanted.keys() == found.keys()
        for key, value in wanted.items():
            assert torch.equal(found[key], value), (name, key)
        store.verify(tmp_path / "b" / name)
    middle = str(tmp_path / "b" / f"step={SAVED_AT}.ckpt")
    rest = run_ranks_fresh(fit, size, behind, str(tmp_path / "c"), STEPS, middle)
    for one, same, after in zip(whole, other, rest, strict=True):
        assert same["losses"] == one["losses"]
        assert after["losses"] == one["losses"][SAVED_AT:]
        assert_equal(after["final"], one["final"])


# ---- ModelCheckpoint unchanged


class Watch(L.Callback):
    """Notes what is visible after each step, and the names that the saver keeps."""

    def __init__(self, folder: str) -> None:
        self.folder = folder
        self.seen: list[list[str]] = []
        self.times: list[float] = []

    def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
        names = os.listdir(self.folder) if os.path.isdir(self.folder) else []
        self.seen.append(sorted(name for name in names if not name.startswith(".")))


class Scored(GPTModel):
    """Logs a score that goes down, up, down."""

    def on_validation_epoch_end(self) -> None:
        scores = (3.0, 5.0, 1.0, 4.0, 2.0, 6.0)
        self.log("score", scores[self.trainer.global_step - 1])


def fit_monitored(
    rank: int, world_size: int, folder: str, run: Run, options: dict[str, Any]
) -> dict[str, Any]:
    saver = ModelCheckpoint(folder, monitor="score", save_on_train_epoch_end=False, **options)
    trainer = make_trainer(
        run, world_size, [saver, Recorder(run)], limit_val_batches=1, val_check_interval=1
    )
    trainer.fit(Scored(run.config), Batches(run))
    times = trainer.strategy.save_times
    return {
        "best": saver.best_model_path,
        "last": saver.last_model_path,
        "kept": sorted(saver.best_k_models),
        "files": left_in(folder),
        "times": times and times.metrics(),
        "attributes": [n for n in ("file_exists", "_link_checkpoint") if n in vars(saver)],
    }


@pytest.mark.parametrize(
    "options",
    [
        dict(filename="{step}", save_top_k=2, save_last=True),
        pytest.param(
            dict(filename="best", save_top_k=2, save_last="link", save_weights_only=True),
            marks=pytest.mark.slow,
        ),
        pytest.param(dict(filename="x", save_top_k=-1), marks=pytest.mark.slow),
        pytest.param(dict(filename="{step}", save_top_k=1, save_last=True), marks=pytest.mark.slow),
    ],
)
def test_model_checkpoint_keeps_the_same(options: dict[str, Any], tmp_path: Path) -> None:
    """Monitor, top-k, names that are taken, last, links: as without the background."""
    results = {}
    for name, config in (("a", CheckpointConfig()), ("b", BACKGROUND)):
        folder = str(tmp_path / name)
        run = small_run(steps=6, layout=dict(checkpoint=config))
        results[name] = run_ranks_fresh(fit_monitored, 2, folder, run, options)
    for rank in (0, 1):
        for key in ("best", "last", "kept", "files"):
            wanted = str(results["a"][rank][key]).replace(str(tmp_path / "a"), str(tmp_path / "b"))
            assert str(results["b"][rank][key]) == wanted, key
        assert results["b"][rank]["attributes"] == []
        assert results["b"][rank]["times"] == results["b"][0]["times"]
    for path in (tmp_path / "b").iterdir():
        store.verify(path)
        assert store.load_metadata(path) == store.load_metadata(tmp_path / "a" / path.name)


def fit_top_and_last(
    rank: int, world_size: int, folder: str, config: CheckpointConfig
) -> list[list[str]]:
    run = small_run(steps=4, layout=dict(checkpoint=config))
    watch = Watch(folder)
    saver = ModelCheckpoint(
        folder, filename="{step}", every_n_train_steps=1, save_top_k=1, save_last=True
    )
    make_trainer(run, world_size, [watch, saver]).fit(GPTModel(run.config), Batches(run))
    return watch.seen


@pytest.mark.parametrize("config", [CheckpointConfig(), BACKGROUND])
def test_top_k_and_last_of_a_step_are_written_once(
    config: CheckpointConfig, tmp_path: Path
) -> None:
    """And an older one is there until the one that replaces it is."""
    seen = run_ranks_fresh(fit_top_and_last, 2, str(tmp_path), config)[0]
    assert sorted(os.listdir(tmp_path)) == ["last.ckpt", "step=4.ckpt"]
    for file in (tmp_path / "last.ckpt" / "data").iterdir():
        assert file.samefile(tmp_path / "step=4.ckpt" / "data" / file.name)
    store.remove(tmp_path / "step=4.ckpt")
    store.verify(tmp_path / "last.ckpt")
    assert all(names for names in seen[2:])  # from the first commit on there is always one


def fit_and_resume(rank: int, world_size: int, folder: str) -> tuple[int, int, int, float]:
    """Use "last" and "best" in the same process, right after a fit."""
    run = small_run(steps=3)
    saver = ModelCheckpoint(
        folder,
        filename="{step}",
        monitor="score",
        mode="max",
        save_last=True,
        save_on_train_epoch_end=False,
    )
    first = make_trainer(run, world_size, [saver], limit_val_batches=1, val_check_interval=1)
    first.fit(Scored(run.config), Batches(run))
    [best] = first.validate(datamodule=Batches(run), ckpt_path="best", verbose=False)
    first.validate(datamodule=Batches(run), ckpt_path="last", verbose=False)
    longer = small_run(steps=5)
    again = ModelCheckpoint(folder, filename="{step}", every_n_train_steps=1, save_last=True)
    second = make_trainer(longer, world_size, [again])
    second.fit(GPTModel(longer.config), Batches(longer), ckpt_path="last")
    module = GPTModel.load_from_checkpoint(again.last_model_path)
    weight = float(next(iter(module.parameters())).abs().sum())
    whole = store.load_metadata(saver.best_model_path)["global_step"]
    return whole, second.global_step, len(best), weight


def test_last_and_best_after_the_fit(tmp_path: Path) -> None:
    for best, steps, metrics, weight in run_ranks_fresh(fit_and_resume, 2, str(tmp_path)):
        assert (best, steps) == (2, 5)
        assert metrics
        assert weight > 0


# ---- what an earlier run left


def fit_in_a_folder_left_behind(rank: int, world_size: int, folder: str) -> tuple[int, list[str]]:
    run = small_run(steps=2)
    saver = ModelCheckpoint(folder, every_n_train_steps=1, save_last=True, save_top_k=0)
    make_trainer(run, world_size, [saver]).fit(GPTModel(run.config), Batches(run))
    if rank == 0:
        os.rename(f"{folder}/last.ckpt", f"{folder}/.staging-last.ckpt-00000000")
        os.makedirs(f"{folder}/.staging-step=9.ckpt-00000000/data")
        os.makedirs(f"{folder}/mine")
    longer = small_run(steps=4)
    saver = ModelCheckpoint(folder, every_n_train_steps=1, save_last=True, save_top_k=0)
    began = Began()
    trainer = make_trainer(longer, world_size, [began, saver])
    time.sleep(0.5 * rank)
    trainer.fit(GPTModel(longer.config), Batches(longer), ckpt_path="last")
    trainer.strategy.remove_checkpoint(f"{folder}/mine")
    return began.step, left_in(folder)


class Began(L.Callback):
    step = -1

    def on_train_start(self, trainer: Any, *_: Any) -> None:
        self.step = trainer.global_step


def test_a_fit_recovers_and_removes_nothing_of_others(tmp_path: Path) -> None:
    """A complete staged folder is "last"; an incomplete one goes; a folder of the user's stays."""
    for step, names in run_ranks_fresh(fit_in_a_folder_left_behind, 2, str(tmp_path)):
        assert step == 2
        assert names == ["last.ckpt", "mine"]
    assert store.load_metadata(tmp_path / "last.ckpt")["global_step"] == 4


# ---- errors and ends


class Disturb(L.Callback):
    """Kills the writer processes of some ranks while they write, at a step."""

    def __init__(self, step: int, ranks: tuple[int, ...]) -> None:
        self.step, self.ranks = step, ranks

    def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
        if trainer.global_step == self.step:
            trainer.strategy.saves.finish()
            if trainer.global_rank in self.ranks:
                os.kill(trainer.strategy.saves._saver._stager._process.pid, signal.SIGSTOP)

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        if trainer.global_step == self.step + 2 and trainer.global_rank in self.ranks:
            stager = trainer.strategy.saves._saver._stager
            os.kill(stager._process.pid, signal.SIGKILL)


def fit_with_failing_writer(rank: int, world_size: int, folder: str) -> tuple[str, int]:
    run = small_run(steps=8)
    saver = ModelCheckpoint(folder, filename="{step}", every_n_train_steps=2, save_top_k=-1)
    trainer = make_trainer(run, world_size, [Disturb(3, (1,)), saver])
    try:
        trainer.fit(GPTModel(run.config), Batches(run))
    except store.CheckpointError as error:
        return str(error), trainer.global_step
    return "", trainer.global_step


def test_an_error_of_the_background_ends_the_next_step_on_all_ranks(tmp_path: Path) -> None:
    """The writer of rank 1 dies while it saves step 4: named there, on all ranks; step 2 stays."""
    results = run_ranks_fresh(fit_with_failing_writer, 2, str(tmp_path))
    for said, step in results:
        assert "step=4.ckpt in the background failed" in said
        assert "rank 1: CheckpointError: the process that writes" in said
        assert "ended with status -9" in said
        assert step in (5, 6)
    assert os.listdir(tmp_path) == ["step=2.ckpt"]
    store.verify(tmp_path / "step=2.ckpt")


class Failing(L.Callback):
    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        if trainer.global_step == 3:
            raise ZeroDivisionError("all ranks")


def fit_that_fails(rank: int, world_size: int, folder: str) -> list[int]:
    run = small_run(steps=8)
    saver = ModelCheckpoint(folder, filename="{step}", every_n_train_steps=2, save_top_k=-1)
    trainer = make_trainer(run, world_size, [saver, Failing()])
    pids: list[int] = []

    class Note(L.Callback):
        def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
            if trainer.global_step == 2:
                pids.append(trainer.strategy.saves._saver._stager._process.pid)

    trainer.callbacks.append(Note())  # type: ignore[attr-defined]
    with pytest.raises(ZeroDivisionError):
        trainer.fit(GPTModel(run.config), Batches(run))
    return [pid for pid in pids if os.path.exists(f"/proc/{pid}")]


def test_a_failure_of_all_ranks_still_commits_and_leaves_no_process(tmp_path: Path) -> None:
    assert run_ranks_fresh(fit_that_fails, 2, str(tmp_path)) == [[], []]
    assert os.listdir(tmp_path) == ["step=2.ckpt"]
    store.verify(tmp_path / "step=2.ckpt")


# ---- what is asked for


def test_wrong_values_are_refused() -> None:
    with pytest.raises(ValueError, match=r"checkpoint.asynchronous='yes' must be True or False"):
        make_strategy(dict(checkpoint=CheckpointConfig(asynchronous="yes")))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="give a CheckpointConfig"):
        make_strategy(dict(checkpoint=True))
