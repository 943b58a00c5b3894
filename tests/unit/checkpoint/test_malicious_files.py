"""A malicious pickle in place of any file of a checkpoint, of ours or of others: a named error, and
nothing of it is run.
"""

import io
import os
import pickle
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import Metadata

from megatron_lightning.checkpoint import (
    CheckpointError,
    is_checkpoint,
    list_tensors,
    load,
    load_metadata,
    load_objects,
    save,
    verify,
)
from megatron_lightning.checkpoint.convert import Conversion, convert
from megatron_lightning.checkpoint.convert.inert_pickle import read_table
from megatron_lightning.checkpoint.preflight import read_tables
from megatron_lightning.config import GPTConfig
from tests.parity.mcore_cases import load_case

ALLOWED = Conversion(allow_pickle=True)


class Bomb:
    """Makes a file when it is un-pickled."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return os.mkdir, (str(self.marker),)


def plain_pickle(marker: Path) -> bytes:
    return pickle.dumps(Bomb(marker))


def old_pickle(marker: Path) -> bytes:
    return pickle.dumps(Bomb(marker), protocol=2)


def text_pickle(marker: Path) -> bytes:
    return f"cos\nmkdir\n(S'{marker}'\ntR.".encode()  # protocol 0 has no signature


def archive(marker: Path) -> bytes:
    data = io.BytesIO()
    torch.save({"state_dict": Bomb(marker)}, data)
    return data.getvalue()


def archive_in_old_form(marker: Path) -> bytes:
    data = io.BytesIO()
    torch.save({"state_dict": Bomb(marker)}, data, _use_new_zipfile_serialization=False)
    return data.getvalue()


BOMBS: list[Callable[[Path], bytes]] = [
    plain_pickle,
    old_pickle,
    text_pickle,
    archive,
    archive_in_old_form,
]


@pytest.fixture
def marker(tmp_path: Path) -> Path:
    return tmp_path / "it-was-run"


@pytest.fixture(params=BOMBS, ids=lambda make: make.__name__)
def bomb(request: pytest.FixtureRequest, marker: Path) -> bytes:
    """The bytes, which do go off when they are un-pickled."""
    data = request.param(marker)
    if request.param is plain_pickle:
        pickle.loads(data)
        assert marker.is_dir()
        marker.rmdir()
    return data


@pytest.fixture
def native(tmp_path: Path) -> Path:
    tensors = {"model.w": torch.randn(40, 40), "model.b": torch.randn(3)}
    objects = {"large": torch.arange(5000), "small": (1, 2)}
    save(tmp_path / "a.ckpt", tensors, objects, metadata={"global_step": 1})
    return tmp_path / "a.ckpt"


READERS: dict[str, Callable[[Path], object]] = {
    "load": lambda path: load(path, {"model.w": torch.zeros(40, 40)}, strict="unexpected_ok"),
    "load_objects": load_objects,
    "list_tensors": list_tensors,
    "load_metadata": load_metadata,
    "read_tables": read_tables,
    "verify": verify,
    "convert": lambda path: convert(path, path.with_name("new"), source_kind="native"),
}


@pytest.mark.parametrize("size", ["same size", "own size"])
@pytest.mark.parametrize(
    "file", ["manifest.json", "metadata.json", "objects.json", "data/rank_00000.bin"]
)
def test_any_file_of_ours(native: Path, file: str, size: str, bomb: bytes, marker: Path) -> None:
    original = (native / file).read_bytes()
    if size == "same size":
        bomb = bomb[: len(original)].ljust(len(original), b"\0")
    (native / file).write_bytes(bomb)
    messages: dict[str, str] = {}
    for name, read in READERS.items():
        try:
            read(native)
        except CheckpointError as error:
            messages[name] = str(error)
    assert not marker.exists()
    assert all(file in message for message in messages.values())
    # those that do not open the file need not notice; the two that read all of it must
    assert {"verify", "convert"} <= set(messages)
    if file == "manifest.json":
        assert set(messages) == set(READERS)
        assert not is_checkpoint(native)
    if file.startswith("data/"):
        assert "load" in messages


def test_a_pickle_beside_the_files(native: Path, bomb: bytes, marker: Path) -> None:
    for name in ("common.pt", "data/rank_00001.bin", ".metadata"):
        (native / name).write_bytes(bomb)
        if not bomb.startswith(b"cos"):  # without a signature it is a stray file, and left alone
            with pytest.raises(CheckpointError, match=f"{name} does not belong here"):
                load_objects(native)
        (native / name).unlink()
    assert not marker.exists()


# ---------------------------------------------------------------------- files of others


def test_lightning_file(tmp_path: Path, bomb: bytes, marker: Path) -> None:
    path = tmp_path / "last.ckpt"
    path.write_bytes(bomb)
    with pytest.raises(CheckpointError, match=r"last\.ckpt"):
        load_objects(path)
    with pytest.raises(ValueError, match="--allow-pickle"):
        convert(path, tmp_path / "new")
    with pytest.raises(CheckpointError, match=r"last\.ckpt.*nothing of it was run"):
        convert(path, tmp_path / "new", how=ALLOWED)
    assert not marker.exists()
    assert not (tmp_path / "new").exists()


@pytest.fixture
def stock(tmp_path: Path) -> Path:
    dcp.save({"state_dict": {"w": torch.randn(4, 4)}}, checkpoint_id=tmp_path / "stock")
    return tmp_path / "stock"


@pytest.mark.parametrize(
    ("kind", "file"),
    [
        *((kind, ".metadata") for kind in ("torch-dcp", "lightning", "megatron-core")),
        *((kind, "__0_0.distcp") for kind in ("torch-dcp", "lightning", "megatron-core")),
        ("lightning", "meta.pt"),
    ],
)
def test_folder_of_torch(
    stock: Path, tmp_path: Path, file: str, kind: Any, bomb: bytes, marker: Path
) -> None:
    config = GPTConfig(vocab_size=4, num_layers=1, hidden_size=4, num_attention_heads=1)
    (stock / file).write_bytes(bomb)
    how = ALLOWED
    if kind == "megatron-core":
        how = Conversion(allow_pickle=True, hyper_parameters={"config": config})
    with pytest.raises(CheckpointError) as raised:
        convert(stock, tmp_path / "new", source_kind=kind, how=how)
    if kind != "megatron-core" or file == ".metadata":  # else the names are refused before the data
        assert file in str(raised.value)
    assert not marker.exists()
    assert not (tmp_path / "new").exists()


def test_safetensors(tmp_path: Path, bomb: bytes, marker: Path) -> None:
    (tmp_path / "w.safetensors").write_bytes(bomb)
    with pytest.raises(CheckpointError, match=r"w\.safetensors is no safetensors file"):
        convert(tmp_path / "w.safetensors", tmp_path / "new")
    assert not marker.exists()


def hidden_bombs(marker: Path) -> dict[str, bytes]:
    """Tables that begin harmlessly, and names by which code is reached in two steps."""
    bomb = Bomb(marker)
    return {
        "in a field": pickle.dumps(Metadata({"w": bomb})),  # type: ignore[dict-item]
        "eval": f"cbuiltins\neval\n(S'__import__(\"os\").mkdir({str(marker)!r})'\ntR.".encode(),
        "getattr": f"cbuiltins\ngetattr\n(cos\npath\nS'join'\ntR(S'{marker}'\ntR.".encode(),
        "dotted": pickle.dumps(0)[:2]
        + b"\x8c\x05torch\x8c\x19serialization.os.makedirs\x93"
        + b"\x8c"
        + bytes([len(str(marker))])
        + str(marker).encode()
        + b"\x85R.",
        "torch.load": f"ctorch\nload\n(S'{marker}'\ntR.".encode(),
        "instance": f"(S'{marker}'\nios\nmkdir\n.".encode(),
        "persistent": b"Psomething\n.",
    }


@pytest.mark.parametrize("name", hidden_bombs(Path("x")))
def test_hidden_bombs(name: str, marker: Path) -> None:
    data = hidden_bombs(marker)[name]
    with pytest.raises(CheckpointError, match=r"^the table"):
        read_table(data, "the table")
    assert not marker.exists()


def test_allowed_names_stay_inert() -> None:
    """Even what a table may name is never the real thing."""
    data = pickle.dumps(Metadata({}))
    record = read_table(data, "x")
    assert type(record).__mro__[1].__name__ == "Record"
    assert (
        read_table(b"cbuiltins\ngetattr\n(cpathlib\nPosixPath\nS'home'\ntR.", "x").kind == "getattr"
    )


def test_common_pt_is_never_opened(tmp_path: Path, marker: Path) -> None:
    """Megatron-Core's file of arguments is not needed."""
    folder = Path(__file__).parents[2] / "data" / "mcore" / "gpt_absolute" / "torch_dist"
    copy = tmp_path / "torch_dist"
    copy.mkdir()
    for file in folder.iterdir():
        (copy / file.name).write_bytes(file.read_bytes())
    (copy / "common.pt").write_bytes(archive(marker))
    how = Conversion(
        allow_pickle=True, hyper_parameters={"config": load_case("gpt_absolute").config}
    )
    convert(copy, tmp_path / "new", how=how)
    assert not marker.exists()
    verify(tmp_path / "new")


def test_the_archives_are_what_they_seem(marker: Path) -> None:
    """The bombs of torch.save are archives with a pickle inside that goes off."""
    with zipfile.ZipFile(io.BytesIO(archive(marker))) as opened:
        name = next(n for n in opened.namelist() if n.endswith("data.pkl"))
        pickle.loads(opened.read(name))
    assert marker.is_dir()
