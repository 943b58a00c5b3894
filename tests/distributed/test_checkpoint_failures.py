"""Failures on any rank and crashes at any instant: no hang, and always a valid checkpoint."""

import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from megatron_lightning.checkpoint import (
    CheckpointError,
    files,
    is_checkpoint,
    load,
    load_metadata,
    recover,
    remove,
    save,
    verify,
)
from tests.harness import run_ranks, run_ranks_fresh

CRASHED = 77
_EVENTS = ("open", "os.mkdir", "os.rename", "os.remove", "os.rmdir")


def write(path: Path, step: int) -> None:
    tensors = {"w": torch.full((300,), float(step)), "b": torch.full((4,), float(step))}
    save(path, tensors, {"step": step}, metadata={"step": step})


# ---- crashes: a child is ended before each change of the file system in turn


def crash_at(count: int, folder: Path) -> None:
    """From now on, end this process at change number `count` of something in `folder`."""
    left = count

    def step() -> None:
        nonlocal left
        left -= 1
        if left < 0:
            os._exit(CRASHED)

    def hook(event: str, arguments: tuple[object, ...]) -> None:
        inside = bool(arguments) and str(arguments[0]).startswith((str(folder), "rank_", "data"))
        relative = event in ("os.remove", "os.rmdir")  # rmtree names files relative to a descriptor
        if event in _EVENTS and (inside or relative):
            step()

    append = files.DataFileWriter._append

    def append_half(self: files.DataFileWriter, data: bytes | memoryview) -> None:
        append(self, data[: len(data) // 2])
        self._file.flush()
        step()
        append(self, data[len(data) // 2 :])

    files.DataFileWriter._append = append_half  # type: ignore[method-assign]
    sys.addaudithook(hook)


def in_child(work: Callable[[], object], folder: Path, count: int) -> bool:
    """Run `work` in a forked process that crashes at change `count`; whether it crashed."""
    pid = os.fork()
    if pid == 0:
        try:
            crash_at(count, folder)
            work()
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    assert code in (0, CRASHED), code
    return code == CRASHED


def check(folder: Path, allowed: set[int | None]) -> None:
    """The visible checkpoint, if any, is whole and one of those allowed."""
    path = folder / "last.ckpt"
    visible = [name for name in os.listdir(folder) if not name.startswith(".")]
    assert visible in ([], ["last.ckpt"])
    assert (load_metadata(path)["step"] if visible else None) in allowed
    if visible:
        verify(path)


def crash_everywhere(rank: int, world: int, folder: Path, replace: bool) -> tuple[int, int]:
    """Crash a save everywhere, and then recovery everywhere; returns how many crashes of each."""
    saves = recoveries = 0
    crashed = True
    while crashed:
        case = folder / str(saves)
        case.mkdir()
        if replace:
            write(case / "last.ckpt", 1)
        old = 1 if replace else None
        crashed = in_child(lambda: write(case / "last.ckpt", 2), case, saves)  # noqa: B023
        # Between the two renames nothing is visible; recovery puts that right.
        check(case, {old, 2, None} if crashed else {2})
        interrupted, count = True, 0
        while interrupted:
            interrupted = in_child(lambda: recover(case), case, count)  # noqa: B023
            check(case, {old, 2, None} if interrupted else {old, 2})
            count += 1
        recoveries += count - 1
        assert all(not name.startswith(".") for name in os.listdir(case)), "nothing hidden is left"
        saves += 1
    return saves - 1, recoveries


@pytest.mark.parametrize("replace", [False, True], ids=["new", "replace"])
def test_a_crash_at_any_instant_leaves_a_valid_checkpoint(tmp_path: Path, replace: bool) -> None:
    ((saves, recoveries),) = run_ranks_fresh(crash_everywhere, 1, tmp_path, replace)
    assert saves >= (20 if replace else 14)
    assert recoveries >= 10


def crash_removal(rank: int, world: int, folder: Path) -> int:
    count, crashed = 0, True
    while crashed:
        case = folder / str(count)
        write(case / "last.ckpt", 1)
        crashed = in_child(lambda: remove(case / "last.ckpt"), case, count)  # noqa: B023
        check(case, {1, None} if crashed else {None})
        recover(case)
        assert os.listdir(case) == [] or is_checkpoint(case / "last.ckpt")
        count += 1
    return count - 1


def test_a_crash_during_removal_leaves_all_or_nothing(tmp_path: Path) -> None:
    (crashes,) = run_ranks_fresh(crash_removal, 1, tmp_path)
    assert crashes >= 6


# ---- errors on one rank


def state(world: int) -> dict[str, torch.Tensor]:
    return {f"w{i}": torch.arange(200.0) + i for i in range(2 * world)}


def failing_save(rank: int, world: int, path: Path, bad_rank: int, step: str) -> str:
    def fail(*_: object, **__: object) -> None:
        raise OSError("no space left on device")

    tensors, objects = state(world), {"step": 2}
    write_one, write_small = files.DataFileWriter.write, save.__globals__["write_file"]
    if rank == bad_rank:
        if step == "write":
            files.DataFileWriter.write = fail  # type: ignore[method-assign,assignment]
        elif step == "commit":
            save.__globals__["write_file"] = fail
        elif step == "plan":
            tensors["w0"] = torch.empty(200, device="meta")
        elif step == "objects":
            objects["f"] = fail  # type: ignore[assignment]
        elif step == "shape":
            tensors["w1"] = torch.zeros(3)
    try:
        save(path, tensors, objects)
    except CheckpointError as error:
        return str(error)
    finally:
        files.DataFileWriter.write = write_one  # type: ignore[method-assign]
        save.__globals__["write_file"] = write_small
    raise AssertionError("no error")


@pytest.mark.parametrize(
    ("step", "bad_rank", "said"),
    [
        ("write", 2, "writing the tensors failed:\n  rank 2: OSError: no space left on device"),
        ("commit", 0, "committing the checkpoint failed:\n  rank 0: OSError: no space left"),
        (
            "plan",
            3,
            "planning the save failed:\n  rank 3: ValueError: tensors['w0'] is on the meta",
        ),
        ("objects", 0, "preparing the save failed:\n  rank 0: ValueError: cannot be stored"),
        ("shape", 1, "rank 1 has 'w1' with shape [3]"),
    ],
)
def test_an_error_on_one_rank_is_raised_on_all_and_nothing_changes(
    tmp_path: Path, step: str, bad_rank: int, said: str
) -> None:
    write(tmp_path / "a.ckpt", 1)
    for message in run_ranks(failing_save, 4, tmp_path / "a.ckpt", bad_rank, step):
        assert said in message
    assert os.listdir(tmp_path) == ["a.ckpt"]
    assert load_metadata(tmp_path / "a.ckpt") == {"step": 1}


def load_badly(rank: int, world: int, path: Path, fault: str) -> str:
    tensors = {"w": torch.zeros(300), "b": torch.zeros(4)}
    if rank == 1 and fault == "missing":
        tensors["extra"] = torch.zeros(1)
    if rank == 1 and fault == "shape":
        tensors["w"] = torch.zeros(299)
    try:
        load(path, tensors)
    except CheckpointError as error:
        assert not any(tensor.any() for tensor in tensors.values())
        return str(error)
    raise AssertionError("no error")


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("missing", "missing in the checkpoint (1): extra"),
        ("shape", "w (saved with shape [300], here [299])"),
        ("no checkpoint", "rank 0: CheckpointError:"),
    ],
)
def test_what_does_not_fit_on_one_rank_is_reported_on_all(
    tmp_path: Path, fault: str, said: str
) -> None:
    if fault != "no checkpoint":
        write(tmp_path / "a.ckpt", 1)
    messages = run_ranks(load_badly, 2, tmp_path / "a.ckpt", fault)
    assert messages[0] == messages[1]
    assert said in messages[0]


def ask_in_parts(rank: int, world: int, path: Path) -> tuple[str, ...]:
    return load(path, {"wb"[rank]: torch.zeros((300, 4)[rank])}).unexpected


def test_a_name_is_unexpected_only_if_no_rank_asks_for_it(tmp_path: Path) -> None:
    write(tmp_path / "a.ckpt", 1)
    assert run_ranks(ask_in_parts, 2, tmp_path / "a.ckpt") == [(), ()]


# ---- a rank that dies


def die_while_writing(rank: int, world: int, path: Path) -> str:
    """Rank 1 is a process that ends in the middle of its file; rank 0 must get an error."""
    pid = os.fork()
    if pid == 0:
        try:
            store = dist.FileStore(str(path.parent / "store"), world)
            dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
            if rank == 1:
                files.DataFileWriter.write = lambda *_: os._exit(CRASHED)  # type: ignore[assignment,method-assign]
            save(path, state(world), {})
        except RuntimeError:
            os._exit(3)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    return str(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))


def test_the_death_of_a_rank_is_an_error_on_the_others(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    write(tmp_path / "run" / "a.ckpt", 1)
    codes = run_ranks_fresh(die_while_writing, 2, tmp_path / "run" / "a.ckpt", timeout=60)
    assert codes == ["3", str(CRASHED)]
    recover(tmp_path / "run")
    assert load_metadata(tmp_path / "run" / "a.ckpt") == {"step": 1}
    verify(tmp_path / "run" / "a.ckpt")
