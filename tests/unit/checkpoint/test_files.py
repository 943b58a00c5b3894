"""Data files: positions, checksums, and reads of every part of a stored box."""

import itertools
import zlib
from pathlib import Path

import pytest
import torch

from megatron_lightning.checkpoint import Box, CheckpointError, files
from megatron_lightning.checkpoint.files import DataFileReader, DataFileWriter, file_crc32


def all_parts(shape: tuple[int, ...]) -> list[Box]:
    spans = [[(a, b - a) for a in range(n) for b in range(a + 1, n + 1)] for n in shape]
    return [Box(*zip(*c, strict=True)) for c in itertools.product(*spans)]  # type: ignore[arg-type]


@pytest.mark.parametrize("block", [8, 40, 2**20])
def test_every_part_of_a_box_can_be_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, block: int
) -> None:
    monkeypatch.setattr(files, "_BLOCK", block)
    whole = torch.randn(3, 4, 5)
    with DataFileWriter(tmp_path / "f") as writer:
        writer.write(torch.ones(7, dtype=torch.uint8))
        start, length, crc = writer.write(whole.transpose(0, 1).contiguous().transpose(0, 1))
    assert (start % 64, length) == (0, 240)
    assert crc == zlib.crc32(whole.numpy().tobytes())
    assert writer.crc32 == file_crc32(tmp_path / "f")
    assert writer.size == (tmp_path / "f").stat().st_size
    reader = DataFileReader(tmp_path / "f")
    for part in all_parts((3, 4, 5)):
        plain = torch.zeros(part.sizes)
        strided = torch.zeros(*part.sizes, 2)[..., 0]
        converted = torch.zeros(part.sizes, dtype=torch.float64)
        for target in (plain, strided, converted):
            reader.read(target, start, torch.float32, (3, 4, 5), part)
            assert torch.equal(target.float(), whole[part.slices()])
    reader.close()


def test_a_file_that_ends_early_is_named(tmp_path: Path) -> None:
    with DataFileWriter(tmp_path / "f") as writer:
        start, _, _ = writer.write(torch.ones(100))
    with open(tmp_path / "f", "r+b") as file:
        file.truncate(start + 300)
    reader = DataFileReader(tmp_path / "f")
    with pytest.raises(CheckpointError, match="/f ends at byte 364, 100 bytes too early"):
        reader.read(torch.zeros(100), start, torch.float32, (100,), Box((0,), (100,)))
    reader.close()


def test_a_file_of_another_kind_is_named(tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(b"\x80\x04 something else")
    with pytest.raises(CheckpointError, match="/f is not a data file of a checkpoint"):
        DataFileReader(tmp_path / "f")


def test_an_existing_file_is_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(b"precious")
    with pytest.raises(FileExistsError):
        DataFileWriter(tmp_path / "f")
