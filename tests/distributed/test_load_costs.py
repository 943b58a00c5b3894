"""What a load costs a rank: its own bytes from the disk, and its own state plus a constant of
memory.
"""

from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_lightning.checkpoint import BoxedTensor, CheckpointError, load, save
from megatron_lightning.checkpoint.files import DataFileReader
from tests.harness import run_ranks, run_ranks_fresh

MIB = 2**20
ROWS, COLUMNS = 4096, 2048  # 32 MiB of float32 a tensor
NAMES = ("a", "b", "c", "d")


def rows(rank: int, world: int, name: str, *, filled: bool) -> BoxedTensor:
    """This rank's rows of a tensor that names itself."""
    size = -(-ROWS // world)
    first, last = rank * size, min(ROWS, (rank + 1) * size)
    local = torch.zeros(last - first, COLUMNS)
    if filled:
        local += torch.arange(first, last).unsqueeze(1) + 10_000 * NAMES.index(name)
    return BoxedTensor.from_local(local, (ROWS, COLUMNS), (first, 0))


def save_rows(rank: int, world: int, path: Path) -> None:
    save(path, {name: rows(rank, world, name, filled=True) for name in NAMES}, {})


def peak_memory() -> int:
    """Largest resident size of this process since `forget_peak`, in bytes."""
    status = Path("/proc/self/status").read_text()
    line = next(line for line in status.splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) * 1024


def forget_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")


def load_rows(rank: int, world: int, path: Path) -> dict[str, int]:
    state = {name: rows(rank, world, name, filled=False) for name in NAMES}
    for boxed in state.values():
        for view in boxed.views:
            view.fill_(1.0)  # so that all of it is resident
    read: list[int] = []
    original = DataFileReader._fill

    def counted(self: DataFileReader, data: memoryview, position: int) -> None:
        read.append(len(data))
        original(self, data, position)

    DataFileReader._fill = counted  # type: ignore[method-assign]
    try:
        forget_peak()
        before = peak_memory()
        load(path, state)
        grown = peak_memory() - before
    finally:
        DataFileReader._fill = original  # type: ignore[method-assign]
    for name in NAMES:
        want = rows(rank, world, name, filled=True)
        for view, wanted in zip(state[name].views, want.views, strict=True):
            assert torch.equal(view, wanted)
    own = sum(view.nbytes for boxed in state.values() for view in boxed.views)
    return {"read": sum(read), "own": own, "grown": grown}


def test_a_rank_reads_its_own_bytes_into_its_own_memory(tmp_path: Path) -> None:
    """128 MiB written by 2 ranks: 3 ranks read a third each, in place, with a block beside."""
    run_ranks(save_rows, 2, tmp_path / "a")
    found = run_ranks_fresh(load_rows, 3, tmp_path / "a")
    assert sum(rank["read"] for rank in found) == len(NAMES) * ROWS * COLUMNS * 4
    for rank in found:
        assert rank["read"] == rank["own"]
        assert rank["grown"] < 24 * MIB


def load_columns(rank: int, world: int, path: Path) -> dict[str, int]:
    """Columns of rows that lie one after the other: read in pieces, converted on the way."""
    size = COLUMNS // world
    local = torch.zeros(ROWS, size, dtype=torch.bfloat16)
    local.fill_(1.0)
    boxed = BoxedTensor.from_local(local, (ROWS, COLUMNS), (0, rank * size))
    forget_peak()
    before = peak_memory()
    load(path, {"a": boxed}, strict="unexpected_ok")
    grown = peak_memory() - before
    assert torch.equal(local[:, -1], torch.arange(ROWS).bfloat16())
    return {"grown": grown}


def test_columns_and_other_dtypes_need_a_constant(tmp_path: Path) -> None:
    run_ranks(save_rows, 2, tmp_path / "a")
    for rank in run_ranks_fresh(load_columns, 2, tmp_path / "a"):
        assert rank["grown"] < 40 * MIB  # a block of 16 MiB, and its conversion


def mixed_names(rank: int, _: int, path: Path) -> list[str]:
    """Names that are missing, unexpected and of another shape, in each mode."""
    messages = []

    def state() -> dict[str, Any]:
        return {"a": torch.zeros(2, 2), "new": torch.zeros(3), "same": torch.full((2,), -1.0)}

    for strict in ("all", "missing_ok", "unexpected_ok"):
        tensors = state()
        with pytest.raises(CheckpointError) as raised:
            load(path, tensors, strict=strict)
        messages.append(str(raised.value))
        assert torch.equal(tensors["same"], torch.full((2,), -1.0)), "nothing may change"
    tensors = state()
    report = load(path, tensors, strict="none")
    assert report.missing == ("new",)
    assert report.unexpected == ("old",)
    assert list(report.mismatched) == ["a"]
    assert torch.equal(tensors["same"], torch.ones(2))
    assert torch.equal(tensors["new"], torch.zeros(3))
    del tensors["a"]
    assert load(path, tensors, strict="none").unexpected == ("a", "old")
    return messages


def save_mixed(rank: int, world: int, path: Path) -> None:
    save(path, {"a": torch.zeros(4), "old": torch.zeros(1), "same": torch.ones(2)}, {})


def test_the_report_says_every_difference_by_name(tmp_path: Path) -> None:
    run_ranks(save_mixed, 2, tmp_path / "a")
    for messages in run_ranks(mixed_names, 2, tmp_path / "a"):
        for mode, message in zip(("all", "missing_ok", "unexpected_ok"), messages, strict=True):
            assert f"does not fit (strict='{mode}')" in message
            assert "missing in the checkpoint (1): new" in message
            assert "unexpected in the checkpoint (1): old" in message
            assert "a (saved with shape [4], here [2, 2])" in message
            assert "nothing was loaded" in message
