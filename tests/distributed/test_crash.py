"""All ranks killed at random instants of saving: the last committed checkpoint is found and loads,
nothing half-written is chosen, and no writer process survives.
"""

import itertools
import os
import random
import shutil
import signal
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import ModelCheckpoint

import megatron_lightning.checkpoint as store
from megatron_lightning.checkpoint import Saver
from megatron_lightning.config import CheckpointConfig
from megatron_lightning.models.gpt import GPTModel
from tests.harness import free_port, run_ranks_fresh
from tests.layout_runs import Batches, Run, make_strategy, tiny_config

SIZE = 300_000  # elements of each rank's own tensor: about as long in writing as in committing
RANKS = 2


def state(step: int, rank: int) -> dict[str, torch.Tensor]:
    own = torch.full((SIZE,), float(step))
    return {
        "split": store.BoxedTensor.from_local(own, (RANKS * SIZE,), (rank * SIZE,)),
        "whole": torch.full((1000,), float(step)),
    }


def save_forever(rank: int, folder: Path, background: bool, say: Callable[[int], None]) -> None:
    """Save a step after the other as `ModelCheckpoint` does: the newest and "last", of which each
    replaces the one before.
    """
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(f"{folder}.store", RANKS),
        rank=rank,
        world_size=RANKS,
    )
    saver = Saver()
    for step in itertools.count(1):
        for name in (f"step={step}.ckpt", "last.ckpt"):
            saver.save(
                folder / name,
                state(step, rank),
                {"step": step},
                metadata={"step": step},
                state=step,
                background=background,
            )
        if rank == 0:
            saver.after_commit(lambda step=step: clean_up(folder, step, say))  # type: ignore[misc]
        for _ in range(random.Random(step).randrange(15)):  # other steps, meanwhile
            time.sleep(0.002)
            saver.poll()


def clean_up(folder: Path, step: int, say: Callable[[int], None]) -> None:
    say(step)
    if step > 1:
        store.remove(folder / f"step={step - 1}.ckpt")


def fork(work: Callable[[], object]) -> int:
    pid = os.fork()
    if pid == 0:
        try:
            work()
        except BaseException:
            traceback.print_exc()
        os._exit(1)
    return pid


def kill_at_random(rank: int, world: int, folder: Path, background: bool, seed: int) -> list[str]:
    """Start ranks, kill them at a random instant after their first checkpoint, and look."""
    chance = random.Random(seed)
    (folder / "run").mkdir(parents=True)
    reading, writing = os.pipe()
    pids = [
        fork(
            lambda number=number: save_forever(  # type: ignore[misc]
                number, folder / "run", background, lambda step: os.write(writing, b"%d\n" % step)
            )
        )
        for number in range(RANKS)
    ]
    os.close(writing)
    reported = os.read(reading, 100)
    time.sleep(chance.uniform(0.0, 0.3))
    writers = writers_of(pids)
    for pid in chance.sample(pids, len(pids)):
        os.kill(pid, signal.SIGKILL)
    for pid in pids:
        os.waitpid(pid, 0)
    while more := os.read(reading, 4096):
        reported += more
    committed = int(reported.split()[-1])
    return [*left_running(writers), *wrong(folder / "run", committed)]


def writers_of(pids: list[int]) -> list[int]:
    """Writer processes of these ranks."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            words = (entry / "cmdline").read_bytes().split(b"\0")
        except OSError:
            continue
        if any(word.endswith(b"data_file.py") for word in words):
            found += [int(entry.name) for pid in pids if b"%d" % pid in words]
    return found


def left_running(writers: list[int]) -> list[str]:
    """Those that still run shortly after their rank has ended."""
    deadline = time.monotonic() + 2.0
    while alive := [pid for pid in writers if is_alive(pid)]:
        if time.monotonic() > deadline:
            return [f"writers {alive} survive"]
        time.sleep(0.01)
    return []


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def wrong(folder: Path, committed: int) -> list[str]:
    """What is not as it has to be, after the crash and after recovery."""
    problems = []
    for when in ("crashed", "recovered"):
        visible = sorted(name for name in os.listdir(folder) if not name.startswith("."))
        for name in visible:
            try:
                store.verify(folder / name)
            except store.CheckpointError as error:
                problems.append(f"{when}: {error}")
        if "last.ckpt" not in visible and when == "recovered":
            problems.append(f"{when}: no last.ckpt among {visible}")
        if when == "crashed":
            store.recover(folder)
    if any(name.startswith(".") for name in os.listdir(folder)):
        problems.append(f"left behind: {os.listdir(folder)}")
    steps = [store.load_metadata(path)["step"] for path in folder.iterdir()]
    if max(steps) < committed:
        problems.append(f"step {committed} was committed, the newest is {max(steps)}")
    if not problems:
        [step] = {store.load_metadata(folder / "last.ckpt")["step"]}
        found = {"split": torch.zeros(RANKS * SIZE), "whole": torch.zeros(1000)}
        store.load(folder / "last.ckpt", found)
        if any((tensor != step).any() for tensor in found.values()):
            problems.append(f"last.ckpt mixes steps: {[t.unique() for t in found.values()]}")
        if step < committed - 1 or store.load_objects(folder / "last.ckpt") != {"step": step}:
            problems.append(f"last.ckpt holds step {step}, {committed} was committed")
    return problems


@pytest.mark.parametrize("background", [False, True])
@pytest.mark.parametrize("kills", [4, pytest.param(26, marks=pytest.mark.slow)])
def test_kill_at_random_instants(kills: int, background: bool, tmp_path: Path) -> None:
    """30 of 30 in the foreground and in the background, the first 4 in every run of the tests."""
    for seed in range(kills) if kills == 4 else range(4, 4 + kills):
        folder = tmp_path / str(seed)
        problems = run_ranks_fresh(kill_at_random, 1, folder, background, seed, timeout=60)[0]
        assert problems == [], f"kill {seed}"
        shutil.rmtree(folder)


# ---- whole runs of Lightning


def train(rank: int, folder: str, port: int, config: CheckpointConfig, steps: int) -> Any:
    variables = dict(RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=RANKS, LOCAL_WORLD_SIZE=RANKS)
    os.environ.update(
        {name: str(value) for name, value in variables.items()}, MASTER_PORT=str(port)
    )
    run = Run(config=tiny_config(num_layers=1), steps=10_000, layout=dict(checkpoint=config))
    saver = ModelCheckpoint(
        folder, filename="{step}", every_n_train_steps=1, save_top_k=1, save_last=True
    )
    trainer = L.Trainer(
        strategy=make_strategy(run.layout | dict(tensor_parallel_size=2)),
        accelerator="cpu",
        devices=RANKS,
        max_steps=steps,
        callbacks=[saver],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        limit_val_batches=0,
    )
    trainer.fit(GPTModel(run.config), Batches(run), ckpt_path="last")
    return trainer


def train_kill_resume(
    rank: int, world: int, folder: str, config: CheckpointConfig, seed: int
) -> tuple[int, int, list[str]]:
    """The step that is there after a kill, the step to which a resumed run comes from it, and what
    is wrong.
    """
    port = free_port()
    pids = [fork(lambda n=n: train(n, folder, port, config, 10_000)) for n in range(RANKS)]  # type: ignore[misc]
    last = Path(folder) / "last.ckpt"
    deadline = time.monotonic() + 60
    while not last.exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    time.sleep(random.Random(seed).uniform(0.0, 0.6))
    writers = writers_of(pids)
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    for pid in pids:
        os.waitpid(pid, 0)
    wrong = left_running(writers)
    if config.asynchronous and not writers:
        wrong.append("there were no writers")
    before = int(store.load_metadata(last)["global_step"])
    port = free_port()
    pids = [fork(lambda n=n: train(n, folder, port, config, before + 3)) for n in range(RANKS)]  # type: ignore[misc]
    for pid in pids:
        os.waitpid(pid, 0)
    for name in os.listdir(folder):
        store.verify(Path(folder) / name)
    return before, int(store.load_metadata(last)["global_step"]), wrong


@pytest.mark.parametrize(
    ("asynchronous", "seed"),
    [
        (True, 0),
        pytest.param(False, 1, marks=pytest.mark.slow),
        pytest.param(True, 2, marks=pytest.mark.slow),
    ],
)
def test_a_killed_run_resumes_from_last(asynchronous: bool, seed: int, tmp_path: Path) -> None:
    config = CheckpointConfig(asynchronous=asynchronous)
    [(before, after, problems)] = run_ranks_fresh(
        train_kill_resume, 1, str(tmp_path), config, seed, timeout=120
    )
    assert problems == []
    assert before >= 1
    assert after == before + 3
