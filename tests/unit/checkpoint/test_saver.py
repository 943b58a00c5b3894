"""Background saves in one process: what is written, when it is seen, and what goes wrong."""

import logging
import os
import resource
import signal
import time
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_lightning.checkpoint import (
    BoxedTensor,
    CheckpointError,
    Saver,
    buffers,
    is_checkpoint,
    load,
    load_metadata,
    load_objects,
    remove,
    verify,
)
from megatron_lightning.checkpoint.data_file import combined_crc32


@pytest.fixture
def saver() -> Iterator[Saver]:
    made = Saver()
    yield made
    made.close()


def tensors(value: float, size: int = 300) -> dict[str, torch.Tensor]:
    """Every kind of memory: strided boxes, 0-dim, empty, bool and half precision."""
    whole = torch.arange(24.0).reshape(4, 6) + value
    flat = torch.arange(20.0) + value
    return {
        "w": torch.full((size,), value),
        "columns": BoxedTensor.from_local(whole.t(), (6, 4), (0, 0)),
        "flat": BoxedTensor.from_flat(flat, (4, 5), (0, 0), (4, 5), 0),
        "step": torch.tensor(value),
        "empty": torch.empty(0, 3),
        "mask": torch.tensor([True, False, True]),
        "half": torch.full((3, 5), value, dtype=torch.bfloat16)[:, 1:3],
    }


def begin(saver: Saver, path: Path, value: float, **options: Any) -> dict[str, torch.Tensor]:
    held = tensors(value)
    objects = {"value": value}
    saver.save(path, held, objects, metadata={"value": value}, background=True, **options)
    return held


def check(path: Path, value: float) -> None:
    verify(path)
    wanted = tensors(value)
    found = {name: torch.zeros(t.shape, dtype=t.dtype) for name, t in BoxedLook(wanted).items()}
    load(path, found)
    for name, whole in BoxedLook(wanted).items():
        assert torch.equal(found[name], whole), name
    assert load_objects(path) == {"value": value}


class BoxedLook(dict[str, torch.Tensor]):
    """The whole values behind `tensors`."""

    def __init__(self, held: dict[str, torch.Tensor]) -> None:
        super().__init__()
        for name, tensor in held.items():
            boxed = BoxedTensor.of(tensor)
            whole = torch.zeros(tuple(boxed.shape), dtype=boxed.dtype)
            for box, view in zip(boxed.boxes, boxed.views, strict=True):
                whole[box.slices()] = view
            self[name] = whole


def wait_until(condition: Callable[[], bool], seconds: float = 20.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_it_is_seen_when_it_is_committed_and_holds_what_was_there(
    saver: Saver, tmp_path: Path
) -> None:
    path = tmp_path / "a.ckpt"
    held = begin(saver, path, 1.0)
    for tensor in (held["w"], held["step"]):
        tensor.fill_(7.0)  # training goes on
    assert saver.is_pending(path)
    assert not path.exists()
    wait_until(lambda: (saver.poll(), path.exists())[1])
    assert not saver.is_pending(path)
    check(path, 1.0)
    assert os.listdir(tmp_path) == ["a.ckpt"]


def test_the_next_save_waits_for_the_one_before_and_reuses_memory_and_process(
    saver: Saver, tmp_path: Path
) -> None:
    begin(saver, tmp_path / "a.ckpt", 1.0)
    process = saver._stager._process
    assert process is not None
    pid, memory = process.pid, saver._stager._buffers
    begin(saver, tmp_path / "b.ckpt", 2.0)
    check(tmp_path / "a.ckpt", 1.0)
    saver.finish()
    check(tmp_path / "b.ckpt", 2.0)
    assert (process.pid, saver._stager._buffers) == (pid, memory)
    assert memory is not None
    assert len(memory._chunks) == 1


def test_larger_tensors_get_more_memory(
    saver: Saver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(buffers, "CHUNK_BYTES", 8192)
    for size in (300, 5000, 40, 9000):
        held = tensors(3.0, size) | {"more": torch.ones(size // 2)}
        saver.save(tmp_path / "a.ckpt", held, {}, metadata={}, background=True)
        saver.finish()
        found = {"w": torch.zeros(size), "more": torch.zeros(size // 2)}
        load(tmp_path / "a.ckpt", found, strict="unexpected_ok")
        assert torch.equal(found["w"], torch.full((size,), 3.0))
        assert torch.equal(found["more"], torch.ones(size // 2))
        verify(tmp_path / "a.ckpt")


def test_files_are_as_those_of_a_foreground_save(saver: Saver, tmp_path: Path) -> None:
    begin(saver, tmp_path / "a.ckpt", 1.0)
    saver.finish()
    saver.save(tmp_path / "b.ckpt", tensors(1.0), {"value": 1.0}, metadata={"value": 1.0})
    for file in ("data/rank_00000.bin", "metadata.json", "objects.json"):
        one, other = (tmp_path / name / file for name in ("a.ckpt", "b.ckpt"))
        assert one.read_bytes() == other.read_bytes(), file


@pytest.mark.parametrize("background", [False, True])
def test_equal_states_are_written_once(saver: Saver, tmp_path: Path, background: bool) -> None:
    """Two names, one file; either may go."""
    for name, value in (("best.ckpt", 1.0), ("last.ckpt", 2.0)):
        saver.save(
            tmp_path / name,
            tensors(1.0),
            {"value": value},
            metadata={},
            state="s",
            background=background,
        )
        assert saver.is_pending(tmp_path / name) == background
    saver.finish()
    one, other = (
        tmp_path / name / "data" / "rank_00000.bin" for name in ("best.ckpt", "last.ckpt")
    )
    assert one.samefile(other)
    assert load_objects(tmp_path / "last.ckpt") == {"value": 2.0}
    assert sorted(os.listdir(tmp_path)) == ["best.ckpt", "last.ckpt"]
    remove(tmp_path / "best.ckpt")
    verify(tmp_path / "last.ckpt")
    saver.save(tmp_path / "c.ckpt", tensors(2.0), {}, metadata={}, state="t")
    assert not (tmp_path / "c.ckpt/data/rank_00000.bin").samefile(other)


def test_a_state_whose_checkpoint_is_gone_or_another_is_written_again(
    saver: Saver, tmp_path: Path
) -> None:
    path = tmp_path / "a.ckpt"
    saver.save(path, tensors(1.0), {"value": 1.0}, metadata={}, state="s")
    remove(path)
    saver.save(tmp_path / "b.ckpt", tensors(1.0), {"value": 1.0}, metadata={}, state="s")
    check(tmp_path / "b.ckpt", 1.0)
    Saver().save(tmp_path / "b.ckpt", tensors(5.0), {"value": 5.0}, metadata={})
    saver.save(tmp_path / "c.ckpt", tensors(1.0), {"value": 1.0}, metadata={}, state="s")
    check(tmp_path / "c.ckpt", 1.0)
    large = {"large": torch.ones(2000)}
    saver.save(tmp_path / "d.ckpt", tensors(1.0), large, metadata={}, state="s")
    assert torch.equal(load_objects(tmp_path / "d.ckpt")["large"], large["large"])


def test_file_systems_without_links(
    saver: Saver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_link(*_: object) -> None:
        raise OSError("no links here")

    monkeypatch.setattr(os, "link", no_link)
    for name in ("a.ckpt", "b.ckpt"):
        begin(saver, tmp_path / name, 1.0, state="s")
    saver.finish()
    for name in ("a.ckpt", "b.ckpt"):
        check(tmp_path / name, 1.0)


def test_what_replaces_waits(saver: Saver, tmp_path: Path) -> None:
    begin(saver, tmp_path / "a.ckpt", 1.0)
    saver.finish()
    begin(saver, tmp_path / "b.ckpt", 2.0)
    saver.after_commit(lambda: remove(tmp_path / "a.ckpt"))
    assert is_checkpoint(tmp_path / "a.ckpt")
    saver.finish()
    assert os.listdir(tmp_path) == ["b.ckpt"]


def test_times_are_known_and_said(
    saver: Saver, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "megatron_lightning")
    begin(saver, tmp_path / "a.ckpt", 1.0)
    saver.finish()
    assert saver.times is not None
    assert saver.times.path == str(tmp_path / "a.ckpt")
    assert saver.times.num_bytes == (tmp_path / "a.ckpt/data/rank_00000.bin").stat().st_size
    assert saver.times.write_seconds > 0
    assert set(saver.times.metrics()) >= {"checkpoint/stall_seconds", "checkpoint/write_seconds"}
    assert "a.ckpt: 0.000 GB; training stood still" in caplog.text


# ---- what goes wrong


def fails(saver: Saver, path: Path, said: str, mend: Callable[[], object] = bool) -> None:
    """The save under way fails with a named error at the next polls; what was there stays."""
    before = load_metadata(path)
    saver.after_commit(lambda: pytest.fail("nothing replaced it"))
    with pytest.raises(CheckpointError, match=said):
        wait_until(lambda: (saver.poll(), False)[1])
    assert not saver.is_pending(path)
    assert os.listdir(path.parent) == [path.name]
    assert load_metadata(path) == before
    verify(path)
    mend()
    begin(saver, path, 9.0)  # and the next one works
    saver.finish()
    check(path, 9.0)


def test_a_full_disk(saver: Saver, tmp_path: Path) -> None:
    """A limit of the process stands for the disk: the write ends in the middle with an OSError."""
    begin(saver, tmp_path / "a.ckpt", 1.0)
    saver.finish()
    assert saver._stager._process is not None
    pid = saver._stager._process.pid
    assert pid is not None
    limits = resource.prlimit(pid, resource.RLIMIT_FSIZE, (1000, resource.RLIM_INFINITY))
    begin(saver, tmp_path / "a.ckpt", 2.0)
    said = r"rank_00000.bin: OSError: \[Errno 27\]"
    fails(
        saver,
        tmp_path / "a.ckpt",
        said,
        mend=lambda: resource.prlimit(pid, resource.RLIMIT_FSIZE, limits),
    )


def test_a_folder_that_is_gone(saver: Saver, tmp_path: Path) -> None:
    begin(saver, tmp_path / "a.ckpt", 1.0)
    saver.finish()
    assert saver._stager._process is not None
    os.kill(saver._stager._process.pid, signal.SIGSTOP)  # type: ignore[arg-type]
    begin(saver, tmp_path / "a.ckpt", 2.0)
    [staging] = [name for name in os.listdir(tmp_path) if name.startswith(".staging")]
    os.rmdir(tmp_path / staging / "data")
    os.kill(saver._stager._process.pid, signal.SIGCONT)  # type: ignore[arg-type]
    fails(saver, tmp_path / "a.ckpt", "FileNotFoundError")


def test_a_writer_that_is_killed(saver: Saver, tmp_path: Path) -> None:
    begin(saver, tmp_path / "a.ckpt", 1.0)
    saver.finish()
    assert saver._stager._process is not None
    pid = saver._stager._process.pid
    os.kill(pid, signal.SIGSTOP)  # type: ignore[arg-type]
    begin(saver, tmp_path / "a.ckpt", 2.0)
    os.kill(pid, signal.SIGKILL)  # type: ignore[arg-type]
    fails(saver, tmp_path / "a.ckpt", "ended with status -9")


def test_no_memory(saver: Saver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begin(saver, tmp_path / "a.ckpt", 1.0)
    saver.finish()

    def none(*_: object) -> None:
        raise OSError(12, "Cannot allocate memory")

    with monkeypatch.context() as patch:
        patch.setattr(os, "posix_fallocate", none)
        held = {"w": torch.ones(buffers.CHUNK_BYTES // 1024)}
        saver.save(tmp_path / "a.ckpt", held, {}, metadata={}, background=True)
        with pytest.raises(CheckpointError, match=r"Cannot allocate.*asynchronous=False"):
            saver.finish()
    check(tmp_path / "a.ckpt", 1.0)


def test_nothing_is_left_running(tmp_path: Path) -> None:
    saver = Saver()
    begin(saver, tmp_path / "a.ckpt", 1.0)
    assert saver._stager._process is not None
    pid = saver._stager._process.pid
    saver.close()  # with a save under way: given up
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)  # type: ignore[arg-type]
    assert not (tmp_path / "a.ckpt").exists()
    saver.close()


def test_checksums_of_pieces() -> None:

    generator = torch.Generator().manual_seed(0)
    data = (
        torch.randint(0, 256, (70_000,), dtype=torch.uint8, generator=generator).numpy().tobytes()
    )
    for cut in (0, 1, 7, 64, 1000, 69_999, 70_000):
        one, other = data[:cut], data[cut:]
        assert combined_crc32(zlib.crc32(one), zlib.crc32(other), len(other)) == zlib.crc32(data)
