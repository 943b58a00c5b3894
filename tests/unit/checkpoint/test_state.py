"""Saving and loading in one process: strictness, dtypes, damage, pickles in place of files."""

import json
import os
import pickle
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_lightning.checkpoint import (
    BoxedTensor,
    CheckpointError,
    Codec,
    TensorInfo,
    is_checkpoint,
    list_tensors,
    load,
    load_metadata,
    load_objects,
    read_manifest,
    save,
    verify,
)
from megatron_lightning.checkpoint.index import DTYPES

OBJECTS = {"loops": {"fit": (1, 2)}, "rng": torch.arange(5000, dtype=torch.uint8), "lr": 0.1}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    tensors = {
        "model.w": torch.arange(12.0).view(3, 4),
        "model.b": torch.arange(3, dtype=torch.bfloat16),
        "optim.step": torch.tensor(7),
        "optim.m": torch.randn(40, 50, generator=torch.Generator().manual_seed(0)),
    }
    save(tmp_path / "a.ckpt", tensors, OBJECTS, metadata={"step": 7, "layout": (2, 1)})
    return tmp_path / "a.ckpt"


def targets() -> dict[str, torch.Tensor]:
    return {
        "model.w": torch.zeros(3, 4),
        "model.b": torch.zeros(3, dtype=torch.bfloat16),
        "optim.step": torch.tensor(0),
        "optim.m": torch.zeros(40, 50),
    }


def files_of(path: Path) -> list[str]:
    return sorted(file.relative_to(path).as_posix() for file in path.rglob("*") if file.is_file())


def test_the_files_are_those_documented(path: Path) -> None:
    expected = ["data/rank_00000.bin", "manifest.json", "metadata.json", "objects.json"]
    assert files_of(path) == expected
    assert sorted(read_manifest(path).files) == [
        name for name in expected if name != "manifest.json"
    ]
    assert is_checkpoint(path)
    verify(path)


def test_everything_comes_back(path: Path) -> None:
    wanted = targets()
    report = load(path, wanted)
    assert report.describe() == ""
    assert torch.equal(wanted["model.w"], torch.arange(12.0).view(3, 4))
    assert wanted["optim.step"] == 7
    objects = load_objects(path)
    assert objects["loops"] == {"fit": (1, 2)}
    assert torch.equal(objects["rng"], OBJECTS["rng"])
    assert load_metadata(path) == {"step": 7, "layout": (2, 1)}
    assert list_tensors(path)["model.b"] == TensorInfo((3,), torch.bfloat16)
    assert set(list_tensors(path)) == set(wanted)


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
@pytest.mark.parametrize("name", sorted(DTYPES))
def test_every_dtype_is_stored_bit_by_bit(tmp_path: Path, name: str) -> None:
    dtype = DTYPES[name]
    raw = torch.arange(6 * dtype.itemsize, dtype=torch.uint8) % 2
    tensor = raw.view(dtype).view(2, 3)
    save(tmp_path / "a", {"x": tensor, "scalar": tensor[0, 0]}, {"small": tensor})
    loaded = {
        "x": torch.zeros_like(raw).view(dtype).view(2, 3),
        "scalar": torch.zeros_like(raw)[: dtype.itemsize].view(dtype)[0],
    }
    load(tmp_path / "a", loaded)
    assert torch.equal(loaded["x"].view(torch.uint8), tensor.view(torch.uint8))
    assert torch.equal(loaded["scalar"].view(1).view(torch.uint8), raw[: dtype.itemsize])
    small = load_objects(tmp_path / "a")["small"]
    assert torch.equal(small.view(torch.uint8), tensor.view(torch.uint8))


def test_floating_dtypes_are_converted_and_reported(path: Path) -> None:
    wanted = targets() | {
        "model.w": torch.zeros(3, 4, dtype=torch.float64),
        "model.b": torch.zeros(3),
    }
    report = load(path, wanted)
    assert list(report.converted) == ["model.b", "model.w"]
    assert report.converted["model.b"] == "saved as torch.bfloat16, here torch.float32"
    assert wanted["model.b"].tolist() == [0, 1, 2]
    narrow = targets() | {"optim.m": torch.zeros(40, 50, dtype=torch.bfloat16)}
    load(path, narrow)
    load(path, wanted)
    assert torch.equal(narrow["optim.m"], wanted["optim.m"].bfloat16())


def test_whole_numbers_are_not_converted(path: Path) -> None:
    with pytest.raises(
        CheckpointError, match=r"optim.step \(saved as torch.int64, here torch.int32"
    ):
        load(path, targets() | {"optim.step": torch.tensor(0, dtype=torch.int32)})


def change(**changes: torch.Tensor | None) -> dict[str, torch.Tensor]:
    renamed = {name.replace("_", "."): tensor for name, tensor in changes.items()}
    return {name: tensor for name, tensor in (targets() | renamed).items() if tensor is not None}


@pytest.mark.parametrize(
    ("kind", "wanted", "allowed"),
    [
        ("missing", change(model_extra=torch.zeros(1)), {"missing_ok", "none"}),
        ("unexpected", change(model_b=None), {"unexpected_ok", "none"}),
        ("of another shape", change(model_w=torch.zeros(4, 3)), {"none"}),
    ],
)
def test_strictness(
    path: Path, kind: str, wanted: dict[str, torch.Tensor], allowed: set[str]
) -> None:
    for strict in ("all", "missing_ok", "unexpected_ok", "none"):
        for tensor in wanted.values():
            tensor.zero_()
        if strict in allowed:
            report = load(path, wanted, strict=strict)  # type: ignore[arg-type]
            assert kind in report.describe()
            assert wanted["optim.step"] == 7
        else:
            with pytest.raises(CheckpointError, match=kind):
                load(path, wanted, strict=strict)  # type: ignore[arg-type]
            assert wanted["optim.step"] == 0, "nothing may change before an error"


def test_an_unknown_strictness_is_refused(path: Path) -> None:
    with pytest.raises(ValueError, match="strict='some'"):
        load(path, targets(), strict="some")  # type: ignore[arg-type]


def test_only_names_in_scope_are_unexpected(path: Path) -> None:
    weights = {name: tensor for name, tensor in targets().items() if name.startswith("model.")}
    assert load(path, weights, scope="model.").unexpected == ()
    assert torch.equal(weights["model.w"], torch.arange(12.0).view(3, 4))
    with pytest.raises(CheckpointError, match="optim.m, optim.step"):
        load(path, weights)


def test_what_cannot_be_saved_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    for tensors, objects, said in (
        ({"x": torch.empty(2, device="meta")}, {}, "materialise"),
        ({"x": torch.eye(2).to_sparse()}, {}, "not a dense tensor"),
        ({"x": 3}, {}, "save it as an object"),
        ({"objects/x": torch.ones(1)}, {}, "reserved"),
        ({}, {"callbacks": {"a": object()}}, r"callbacks\['a'\]"),
    ):
        with pytest.raises(ValueError, match=said):
            save(tmp_path / "a.ckpt", tensors, objects)  # type: ignore[arg-type]
        assert os.listdir(tmp_path) == []
    half = BoxedTensor.from_local(torch.ones(2), (4,), (0,))
    with pytest.raises(CheckpointError, match="'x' of shape"):
        save(tmp_path / "a.ckpt", {"x": half}, {})
    assert os.listdir(tmp_path) == []


def test_metadata_is_for_small_things(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="put them among the objects"):
        save(tmp_path / "a", {}, {}, metadata={"x": torch.zeros(5000)})


def test_reading_a_checkpoint_needs_no_torch_load(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def forbidden(*_: Any, **__: Any) -> None:
        raise AssertionError("pickle was used")

    for owner, name in (
        (pickle, "load"),
        (pickle, "loads"),
        (pickle, "Unpickler"),
        (torch, "load"),
    ):
        monkeypatch.setattr(owner, name, forbidden)
    load(path, targets())
    load_objects(path)
    verify(path)


class Trap:
    """A pickle that makes a file when it is loaded."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Any, ...]:
        return (open, (str(self.marker), "w"))


def use_everything(path: Path) -> None:
    load_metadata(path)
    load(path, targets())
    load_objects(path)


@pytest.mark.parametrize("kind", ["pickle", "pickle of the same size", "torch.save"])
@pytest.mark.parametrize(
    "name", ["data/rank_00000.bin", "manifest.json", "metadata.json", "objects.json"]
)
def test_a_pickle_in_place_of_a_file_is_named_and_not_loaded(
    path: Path, name: str, kind: str
) -> None:
    marker, file = path.parent / "marker", path / name
    size = file.stat().st_size
    if kind == "torch.save":
        torch.save(Trap(marker), file)
    else:
        data = pickle.dumps(Trap(marker))
        file.write_bytes(data.ljust(size, b".") if "size" in kind else data)
    with pytest.raises(CheckpointError, match=name):
        use_everything(path)
    with pytest.raises(CheckpointError, match=name):
        verify(path)
    assert not marker.exists()


@pytest.mark.parametrize("name", ["extra.pt", "data/optimizer.bin", ".metadata"])
def test_a_pickle_beside_the_files_is_named_and_not_loaded(path: Path, name: str) -> None:
    marker = path.parent / "marker"
    (path / name).write_bytes(pickle.dumps(Trap(marker)))
    with pytest.raises(
        CheckpointError, match=f"{name} does not belong here .it looks like a pickle"
    ):
        use_everything(path)
    assert not marker.exists()


def test_other_files_in_the_folder_do_no_harm(path: Path) -> None:
    (path / "README.txt").write_text("my best run")
    use_everything(path)


def test_old_checkpoints_are_recognised_and_not_loaded(tmp_path: Path) -> None:
    marker = tmp_path / "marker"
    torch.save({"state_dict": Trap(marker)}, tmp_path / "epoch=0.ckpt")
    with pytest.raises(CheckpointError, match="is a file, not a checkpoint folder .*torch.save"):
        load(tmp_path / "epoch=0.ckpt", {})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.distributed.checkpoint.save({"x": torch.ones(1)}, checkpoint_id=tmp_path / "dcp")
    with pytest.raises(CheckpointError, match="distributed format of torch"):
        load(tmp_path / "dcp", {})
    with pytest.raises(CheckpointError, match="does not exist"):
        load(tmp_path / "none", {})
    (tmp_path / "empty").mkdir()
    with pytest.raises(CheckpointError, match="it has no manifest"):
        load_objects(tmp_path / "empty")
    assert not marker.exists()


@pytest.mark.parametrize("name", ["data/rank_00000.bin", "metadata.json", "objects.json"])
def test_files_that_are_missing_or_of_another_size_are_named(path: Path, name: str) -> None:
    file, size = path / name, (path / name).stat().st_size
    with open(file, "ab") as opened:
        opened.write(b"\0")
    with pytest.raises(CheckpointError, match=f"{name} has {size + 1} bytes, not {size}"):
        use_everything(path)
    os.truncate(file, size - 1)
    with pytest.raises(CheckpointError, match=f"{name} has {size - 1} bytes, not {size}"):
        use_everything(path)
    assert not is_checkpoint(path)
    file.unlink()
    with pytest.raises(CheckpointError, match=f"{name} is missing"):
        use_everything(path)


@pytest.mark.parametrize(
    "name", ["data/rank_00000.bin", "manifest.json", "metadata.json", "objects.json"]
)
def test_any_flipped_bit_is_found_by_verify(path: Path, name: str) -> None:
    data = (path / name).read_bytes()
    for position in range(0, len(data), max(1, len(data) // 60)):
        wrong = bytearray(data)
        wrong[position] ^= 1 << (position % 8)
        (path / name).write_bytes(wrong)
        with pytest.raises(CheckpointError, match=name):
            verify(path)
    (path / name).write_bytes(data)
    verify(path)


def test_verify_names_the_damaged_tensor(path: Path) -> None:
    index = json.loads((path / "metadata.json").read_bytes())
    box = index["tensors"]["optim.m"]["boxes"][0]
    data = bytearray((path / box["file"]).read_bytes())
    data[box["start"] + 1000] ^= 4
    (path / box["file"]).write_bytes(data)
    with pytest.raises(
        CheckpointError, match=r"rank_00000.bin is damaged.*in tensors optim.m at \[0, 0\]\)"
    ):
        verify(path)
    verify(path, digests=False)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"format_version": 2}, "format version 2; this program reads 1: use a newer one"),
        ({"format": "other"}, "describes 'other'"),
        ({"files": {}}, "checksum differs"),
    ],
)
def test_manifests_of_other_formats_are_refused(
    path: Path, change: dict[str, Any], said: str
) -> None:
    body = json.loads((path / "manifest.json").read_bytes()) | change
    (path / "manifest.json").write_text(json.dumps(body))
    with pytest.raises(CheckpointError, match=said):
        use_everything(path)


def test_the_codec_reads_what_it_wrote(tmp_path: Path) -> None:
    codec = Codec(classes=(TensorInfo,))
    save(tmp_path / "a", {}, {"info": TensorInfo((1,), torch.int8)}, codec=codec)
    assert load_objects(tmp_path / "a", codec=codec) == {"info": TensorInfo((1,), torch.int8)}
    with pytest.raises(CheckpointError, match=r"objects.json: info is not a valid dataclass"):
        load_objects(tmp_path / "a")
