"""Byte ranges of safetensors files, against the safetensors library."""

import os
import pickle
import random
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from megatron_lightning.bridge import safetensors_files
from megatron_lightning.bridge.placing import plan_files
from megatron_lightning.bridge.safetensors_files import (
    FileReader,
    byte_runs,
    read_header,
    write_box,
)
from megatron_lightning.checkpoint import Box

TENSORS = {
    "wide": torch.randn(7, 40),
    "cube": torch.randn(3, 5, 6).bfloat16(),
    "one": torch.randn(1).half(),
    "none": torch.tensor(2.0, dtype=torch.float64),
    "empty": torch.empty(0, 4),
}


def random_boxes(shape: tuple[int, ...], count: int) -> list[Box]:
    draw = random.Random(3)
    if 0 in shape:
        return [Box.whole(shape)]
    found = [Box.whole(shape)]
    for _ in range(count):
        offsets = tuple(draw.randrange(size) for size in shape)
        sizes = tuple(draw.randint(1, s - o) for s, o in zip(shape, offsets, strict=True))
        found.append(Box(offsets, sizes))
    return found


@pytest.fixture(params=["large blocks", "small blocks", "runs"])
def limits(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Limits at which small tensors are read as large ones are."""
    if request.param != "large blocks":
        monkeypatch.setattr(safetensors_files, "BLOCK", 64)
    if request.param == "runs":
        monkeypatch.setattr(safetensors_files, "_LONG_RUN", 8)


@pytest.mark.usefixtures("limits")
def test_boxes_are_read(tmp_path: Path) -> None:
    save_file(TENSORS, tmp_path / "x.safetensors")
    header, reader = read_header(tmp_path / "x.safetensors"), FileReader()
    assert header.keys() == TENSORS.keys()
    for name, tensor in TENSORS.items():
        for box in random_boxes(tuple(tensor.shape), 25):
            out = torch.zeros(box.sizes, dtype=tensor.dtype)
            for part, values in reader.blocks(header[name], box):
                assert values.numel() * values.element_size() <= safetensors_files.BLOCK
                out[part.shift(box.offsets, sign=-1).slices()] = values
            assert torch.equal(out, tensor[box.slices()])
            for like in (
                out,
                out.double(),
                out.new_zeros(box.sizes[::-1]).permute(tuple(reversed(range(out.dim())))),
            ):
                target = torch.full_like(like, 7)
                reader.read(header[name], box, target)
                assert torch.equal(target, tensor[box.slices()].to(target.dtype))
    reader.close()


@pytest.mark.usefixtures("limits")
def test_boxes_are_written(tmp_path: Path) -> None:
    entries = {name: (t.dtype, tuple(t.shape)) for name, t in TENSORS.items()}
    files = plan_files(tmp_path, entries, 500)
    assert len(files.headers) > 1
    files.create()
    files.write_index()
    with files.opened() as descriptor_of:
        for name, tensor in TENSORS.items():
            for box in Box.whole(tuple(tensor.shape)).cut(6):
                stored = files.tensors[name]
                values = tensor[box.slices()].double()  # cast to what the file holds
                write_box(descriptor_of(stored.file), stored, box, values)
    loaded = {}
    for file in files.headers:
        loaded |= load_file(tmp_path / file)
    assert loaded.keys() == TENSORS.keys()
    assert all(torch.equal(loaded[n], t) and loaded[n].dtype == t.dtype for n, t in TENSORS.items())


def test_only_the_bytes_of_a_box_are_read(tmp_path: Path) -> None:
    save_file({"w": torch.randn(64, 4096)}, tmp_path / "x.safetensors")
    stored = read_header(tmp_path / "x.safetensors")["w"]
    for box in (Box((32, 0), (32, 4096)), Box((0, 2048), (64, 2048))):
        reader = FileReader()
        list(reader.blocks(stored, box))
        assert reader.bytes_read == box.numel * 4
    assert list(byte_runs((4, 3), Box((1, 0), (2, 3)), 2)) == [(6, 12)]
    assert list(byte_runs((4, 3), Box((1, 1), (2, 2)), 1)) == [(4, 2), (7, 2)]


def test_few_files_stay_open(tmp_path: Path) -> None:
    reader = FileReader()
    before = len(os.listdir("/proc/self/fd"))
    for number in range(12):
        path = tmp_path / f"{number}.safetensors"
        save_file({"w": torch.full((2,), number)}, path)
        ((_, values),) = reader.blocks(read_header(path)["w"], Box((0,), (2,)))
        assert values.tolist() == [number] * 2
    assert len(os.listdir("/proc/self/fd")) <= before + 4
    assert pickle.loads(pickle.dumps(reader)).bytes_read == 0
    reader.close()


def test_damage_is_named(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    save_file({"w": torch.randn(4)}, path)
    whole = path.read_bytes()
    for damaged, message in (
        (whole[:-1], r"has \d+ bytes, its header speaks of \d+"),
        (whole + b"x", r"has \d+ bytes, its header speaks of \d+"),
        (whole.replace(b'"F32"', b'"F33"'), "damaged.*F33"),
        (whole.replace(b"[4]", b"[5]"), "damaged"),
        (whole[:5], "no safetensors file"),
        (b"", "no safetensors file"),
        (b"\x80\x02}q\x00." + whole, "no safetensors file.*pickle"),
        (b"PK\x03\x04" + whole, "no safetensors file"),
    ):
        path.write_bytes(damaged)
        with pytest.raises(ValueError, match=message):
            read_header(path)


def test_a_file_that_becomes_shorter(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    save_file({"w": torch.randn(4)}, path)
    stored = read_header(path)["w"]
    os.truncate(path, path.stat().st_size - 4)
    with pytest.raises(ValueError, match="has become shorter"):
        list(FileReader().blocks(stored, Box((0,), (4,))))
