"""Copies on the nodes: made every few steps, kept by two ranks, taken up after a failure."""

import os
import shutil
import signal
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning as L
import pytest
from lightning.pytorch.callbacks import ModelCheckpoint

from megatron_lightning.checkpoint import verify
from megatron_lightning.checkpoint.local import copies_in
from megatron_lightning.config import DataParallelConfig
from megatron_lightning.config.checkpoint import CheckpointConfig
from megatron_lightning.config.local_checkpoint import LocalCheckpointConfig
from tests.harness import RankError, run_ranks_fresh
from tests.layout_runs import Run, tiny_config
from tests.preemption_runs import STEPS, assert_continues, fit

CONFIG = tiny_config(num_layers=2, hidden_size=32, ffn_hidden_size=64, hidden_dropout=0.1)
ZERO1 = DataParallelConfig(sharding="optimizer")
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "dp2": (2, dict(data_parallel=ZERO1)),
    "tp2_pp2": (4, dict(tensor_parallel_size=2, pipeline_parallel_size=2, micro_batch_size=2)),
    "fsdp2": (2, dict(data_parallel=DataParallelConfig(sharding="fsdp"))),
}


SLOW = pytest.mark.slow
RUN = Run(config=CONFIG, layout=LAYOUTS["dp2"][1], steps=STEPS)


class Die(L.Callback):
    """Kills one rank at step 5, when all ranks have the copies of step 4."""

    reads_parameters = False

    def __init__(self, rank: int, folder: str, copies: int) -> None:
        self.rank, self.folder, self.copies = rank, folder, copies

    def on_train_batch_start(self, trainer: L.Trainer, *args: Any) -> None:
        if (trainer.global_rank, trainer.global_step) != (self.rank, 5):
            return
        deadline = time.monotonic() + 30
        while time.monotonic() < deadline:
            found = [each for rank in range(8) for each in steps_of(node(self.folder, rank))]
            if sum(step == 4 for _, step in found) == self.copies:
                break
            time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGKILL)


def node(folder: str, rank: int) -> Path:
    """A folder for each rank, as if each were a node of its own."""
    return Path(folder) / f"node{rank}"


def fit_on_nodes(
    rank: int,
    world_size: int,
    run: Run,
    folder: str,
    resume: str | None = None,
    callbacks: tuple[L.Callback, ...] = (),
    options: dict[str, Any] | None = None,
) -> dict[str, Any]:
    local = LocalCheckpointConfig(
        folder=str(node(folder, rank)), **{"every_n_steps": 2, **(options or {})}
    )
    layout = dict(run.layout)
    background = layout.pop("asynchronous", False)
    layout["checkpoint"] = CheckpointConfig(local=local, asynchronous=background)
    return fit(rank, world_size, replace(run, layout=layout), folder, None, resume, callbacks)


def saver(folder: Path) -> ModelCheckpoint:
    return ModelCheckpoint(folder / "regular", every_n_train_steps=3, save_last=True)


def kill_rank(folder: Path, run: Run, size: int, **options: Any) -> None:
    """Train until rank 1 is killed in step 5; saved are step 3, and copies of steps 2 and 4."""
    copies = size if options.get("peer_copies") is False else 2 * size
    callbacks = (Die(1, str(folder), copies), saver(folder))
    with pytest.raises(RankError):
        run_ranks_fresh(fit_on_nodes, size, run, str(folder), None, callbacks, options)


def steps_of(path: Path) -> list[tuple[int, int]]:
    return sorted((copy.rank, copy.step) for copy in copies_in(path))


@pytest.mark.parametrize(
    "layout", ["dp2", *(pytest.param(name, marks=SLOW) for name in ("tp2_pp2", "fsdp2"))]
)
def test_a_lost_rank_gets_its_part_from_its_partner(layout: str, tmp_path: Path) -> None:
    size, options = LAYOUTS[layout]
    run = Run(config=CONFIG, layout=options, steps=STEPS)
    whole = run_ranks_fresh(fit, size, run, str(tmp_path / "whole"))
    kill_rank(tmp_path, run, size)
    assert steps_of(node(str(tmp_path), 0)) == [(r, s) for r in (0, size - 1) for s in (2, 4)]
    shutil.rmtree(node(str(tmp_path), 1))
    rest = run_ranks_fresh(fit_on_nodes, size, run, str(tmp_path), "last", (saver(tmp_path),))
    part = [dict(losses=one["losses"][:4], validations=[]) for one in whole]
    assert_continues(whole, part, rest)


# ---------------------------------------------------------------------- what is chosen at a start


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two nodes after rank 1 was killed: a checkpoint of step 3, copies of steps 2 and 4."""
    folder = tmp_path_factory.mktemp("killed")
    kill_rank(folder, RUN, 2)
    return folder


def data_of(folder: Path, keeper: int, rank: int) -> Path:
    """The tensors of the copy of step 4 of `rank` that `keeper` keeps."""
    found = copies_in(node(str(folder), keeper))
    (copy,) = [each for each in found if (each.rank, each.step) == (rank, 4)]
    return copy.path / "data" / "part.bin"


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def one_flipped_byte(folder: Path) -> None:
    flip(data_of(folder, 0, 0))


def both_damaged(folder: Path) -> None:
    os.truncate(data_of(folder, 0, 1), 100)
    flip(data_of(folder, 1, 1))


def no_manifest(folder: Path) -> None:
    for keeper in (0, 1):
        (data_of(folder, keeper, 0).parents[1] / "manifest.json").unlink()


def nodes_in_another_order(folder: Path) -> None:
    node(str(folder), 0).rename(folder / "spare")
    node(str(folder), 1).rename(node(str(folder), 0))
    (folder / "spare").rename(node(str(folder), 1))


def no_checkpoint(folder: Path) -> None:
    shutil.rmtree(folder / "regular")


def nothing(folder: Path) -> None:
    pass


@pytest.mark.parametrize(
    ("change", "layout", "step"),
    [
        pytest.param(one_flipped_byte, RUN.layout, 4, marks=SLOW),
        pytest.param(nothing, RUN.layout, 4, marks=SLOW),
        pytest.param(both_damaged, RUN.layout, 3, marks=SLOW),
        pytest.param(no_manifest, RUN.layout, 3, marks=SLOW),
        pytest.param(nodes_in_another_order, RUN.layout, 4, marks=SLOW),
        pytest.param(no_checkpoint, RUN.layout, 4, marks=SLOW),
        pytest.param(nothing, dict(tensor_parallel_size=2), 3, marks=SLOW),
    ],
)
def test_the_newest_that_is_whole(
    change: Callable[[Path], None],
    layout: dict[str, Any],
    step: int,
    killed: Path,
    tmp_path: Path,
) -> None:
    shutil.copytree(killed, tmp_path, dirs_exist_ok=True)
    change(tmp_path)
    run = replace(RUN, layout=layout)
    rest = run_ranks_fresh(fit_on_nodes, 2, run, str(tmp_path), "last", (saver(tmp_path),))
    assert {len(rank["losses"]) for rank in rest} == {STEPS - step}
    assert {rank["step"] for rank in rest} == {STEPS}


@SLOW
def test_a_certain_checkpoint_is_that_one_and_old_copies_go(killed: Path, tmp_path: Path) -> None:
    shutil.copytree(killed, tmp_path, dirs_exist_ok=True)
    (regular,) = (path for path in (tmp_path / "regular").iterdir() if "step=3" in path.name)
    options = dict(every_n_steps=1, keep=2)
    rest = run_ranks_fresh(fit_on_nodes, 2, RUN, str(tmp_path), str(regular), (), options)
    assert {len(rank["losses"]) for rank in rest} == {STEPS - 3}
    assert {step for _, step in steps_of(node(str(tmp_path), 0))} <= {4, 5}


@SLOW
def test_few_are_kept(tmp_path: Path) -> None:
    """Copies are whole, each rank has its own and its partner's, and old ones go; beside background
    saves.
    """
    layout = RUN.layout | dict(asynchronous=True)
    run = replace(
        RUN, layout=layout, trainer=dict(max_steps=12, limit_val_batches=1, val_check_interval=5)
    )
    run_ranks_fresh(
        fit_on_nodes,
        2,
        replace(run, steps=12),
        str(tmp_path),
        None,
        (saver(tmp_path),),
        dict(every_n_steps=1),
    )
    for rank in (0, 1):
        found = copies_in(node(str(tmp_path), rank))
        assert {copy.rank for copy in found} == {0, 1}
        assert 2 <= len(found) <= 6
        assert max(copy.step for copy in found) == 11  # the epoch ends with the twelfth
        for copy in found:
            verify(copy.path)


def fill_disk(rank: int, world_size: int, folder: str) -> str:
    usage = shutil.disk_usage(folder)._replace(free=1000)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shutil, "disk_usage", lambda _: usage)
        with pytest.raises(ValueError, match="checkpoint.local.folder") as raised:
            fit_on_nodes(rank, world_size, RUN, folder)
    return str(raised.value)


def test_a_folder_that_is_too_small_is_refused_after_the_first_step(tmp_path: Path) -> None:
    (said,) = run_ranks_fresh(fill_disk, 1, str(tmp_path))
    assert "give a larger folder, a smaller keep, or peer_copies=False" in said
