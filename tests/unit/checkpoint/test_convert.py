"""`convert`: forms of our own checkpoint there and back, bitwise, atomic, and in little memory."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file

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
from megatron_lightning.checkpoint.config_codec import CODEC
from megatron_lightning.checkpoint.convert import Content, Conversion, LazyTensor, convert
from megatron_lightning.checkpoint.convert.native import read_native, write_native
from megatron_lightning.checkpoint.convert.single_file import write_safetensors
from megatron_lightning.checkpoint.convert.torch_dcp import write_dcp
from megatron_lightning.config import GPTConfig
from megatron_lightning.models import GPTModel

CONFIG = GPTConfig(vocab_size=37, num_layers=2, hidden_size=16, num_attention_heads=2)


def training_state() -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Bfloat16 weights, float32 masters and moments, and what stands beside them."""
    torch.manual_seed(3)
    tensors: dict[str, torch.Tensor] = {}
    for name, shape in GPTModel(CONFIG).global_shapes().items():
        master = torch.randn(shape)
        tensors[f"master.{name}"] = master
        tensors[f"model.{name}"] = master.bfloat16()
        for key in ("exp_avg", "exp_avg_sq"):
            tensors[f"optimizer.0.{key}.{name}"] = torch.randn(shape)
        tensors[f"optimizer.0.step.{name}"] = torch.tensor(3.0)
    objects = {
        "hyper_parameters": {"config": CONFIG},
        "callbacks": {"Noise": {"table": torch.randn(2000)}},  # large enough to be taken out
        "Data": {"order": torch.arange(1000)},
        "optimizer_param_groups": [[{"lr": 1e-3, "betas": (0.9, 0.95)}]],
        "lr_schedulers": [{"last_epoch": 3}],
        "loops": {"fit_loop": {"state": 3, "worst": float("-inf")}},
    }
    return tensors, objects


@pytest.fixture
def source(tmp_path: Path) -> Path:
    tensors, objects = training_state()
    metadata = {"global_step": 3, "layout": "tp=2 (2 ranks)"}
    save(tmp_path / "source", tensors, objects, metadata=metadata, codec=CODEC)
    return tmp_path / "source"


def stored(folder: Path) -> dict[str, torch.Tensor]:
    tensors = {n: torch.empty(i.shape, dtype=i.dtype) for n, i in list_tensors(folder).items()}
    load(folder, tensors)
    return tensors


def assert_equal(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert found[name].dtype == tensor.dtype, name
        assert torch.equal(found[name], tensor), name


def assert_same_objects(one: Path, other: Path) -> None:
    first, second = (load_objects(path, codec=CODEC) for path in (one, other))
    assert first.keys() == second.keys()
    for state in (first, second):
        assert torch.is_tensor(state["callbacks"]["Noise"]["table"])
        state["callbacks"]["Noise"]["table"] = state["callbacks"]["Noise"]["table"].tolist()
        state["Data"]["order"] = state["Data"]["order"].tolist()
    assert first == second


def test_native_in_several_files(source: Path, tmp_path: Path) -> None:
    convert(source, tmp_path / "new", how=Conversion(files=3))
    sizes = [file.stat().st_size for file in (tmp_path / "new" / "data").iterdir()]
    assert len(sizes) == 3
    assert max(sizes) < 1.5 * min(sizes)
    verify(tmp_path / "new")
    assert_equal(stored(tmp_path / "new"), training_state()[0])
    assert_same_objects(source, tmp_path / "new")
    about = load_metadata(tmp_path / "new")
    assert about["global_step"] == 3
    assert about["converted_from"] == str(source)


def test_weights_only_keeps_what_lightning_keeps(source: Path, tmp_path: Path) -> None:
    convert(source, tmp_path / "new", how=Conversion(weights_only=True))
    tensors = training_state()[0]
    wanted = {name: value for name, value in tensors.items() if name.startswith("model.")}
    assert_equal(stored(tmp_path / "new"), wanted)
    objects = load_objects(tmp_path / "new", codec=CODEC)
    assert objects.keys() == {"hyper_parameters", "loops", "Data"}
    assert torch.equal(objects["Data"]["order"], torch.arange(1000))


def test_float32_weights_are_the_masters(source: Path, tmp_path: Path) -> None:
    convert(source, tmp_path / "new", how=Conversion(dtype=torch.float32))
    found, tensors = stored(tmp_path / "new"), training_state()[0]
    assert not any(name.startswith("master.") for name in found)
    for name, value in tensors.items():
        if name.startswith("master."):
            assert torch.equal(found[name.replace("master.", "model.", 1)], value)
    # and back: masters keep what bfloat16 weights lose
    convert(tmp_path / "new", tmp_path / "back", how=Conversion(dtype=torch.bfloat16))
    assert_equal(stored(tmp_path / "back"), tensors)


def test_moments_there_and_back(source: Path, tmp_path: Path) -> None:
    half = Conversion(moments_dtype=torch.bfloat16)
    convert(source, tmp_path / "half", how=half)
    found = stored(tmp_path / "half")
    for name, value in training_state()[0].items():
        moment = name.startswith("optimizer.") and ".step." not in name
        assert torch.equal(found[name], value.bfloat16() if moment else value), name
        assert (found[name].dtype == torch.bfloat16) == (moment or name.startswith("model."))
    convert(tmp_path / "half", tmp_path / "wide", how=Conversion(moments_dtype=torch.float32))
    convert(tmp_path / "wide", tmp_path / "again", how=half)
    assert_equal(stored(tmp_path / "again"), found)


def test_safetensors_and_back(source: Path, tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    convert(source, file)
    tensors = training_state()[0]
    weights = {n.removeprefix("model."): v for n, v in tensors.items() if n.startswith("model.")}
    assert_equal(load_file(file), weights)
    convert(file, tmp_path / "back")
    assert_equal(stored(tmp_path / "back"), {f"model.{n}": v for n, v in weights.items()})
    model = GPTModel.load_from_checkpoint(tmp_path / "back")  # the config came along
    assert model.config == CONFIG
    assert load_metadata(tmp_path / "back")["global_step"] == 3


def test_a_safetensors_file_of_others_needs_a_config(tmp_path: Path) -> None:
    model = GPTModel(CONFIG)
    shapes = model.global_shapes()
    weights = {name: torch.randn(shape) for name, shape in shapes.items()}
    save_file(weights, tmp_path / "w.safetensors")
    how = Conversion(hyper_parameters={"config": CONFIG}, shapes=shapes)
    convert(tmp_path / "w.safetensors", tmp_path / "native", how=how)
    loaded = GPTModel.load_from_checkpoint(tmp_path / "native").canonical_parameters()
    for name, value in weights.items():
        rows = value.shape[0]
        assert torch.equal(loaded[name].detach()[:rows], value), name
    wider = replace(CONFIG, hidden_size=32, head_dim=16, ffn_hidden_size=0)
    how = replace(how, shapes=GPTModel(wider).global_shapes())
    with pytest.raises(
        CheckpointError, match=r"does not fit the model:\n  .*norm.weight: shape \[16\]"
    ):
        convert(tmp_path / "w.safetensors", tmp_path / "other", how=how)
    assert not (tmp_path / "other").exists()


def test_torch_dcp_and_back(source: Path, tmp_path: Path) -> None:
    convert(source, tmp_path / "stock", target_kind="torch-dcp")
    tensors = training_state()[0]
    target = {name: torch.zeros_like(value) for name, value in tensors.items()}
    dcp.load(target, checkpoint_id=tmp_path / "stock")
    assert_equal(target, tensors)
    with pytest.raises(ValueError, match="--allow-pickle"):
        convert(tmp_path / "stock", tmp_path / "back")
    convert(tmp_path / "stock", tmp_path / "back", how=Conversion(allow_pickle=True))
    assert_equal(stored(tmp_path / "back"), tensors)
    assert_same_objects(source, tmp_path / "back")


def test_torch_dcp_written_by_torch(tmp_path: Path) -> None:
    """A folder of `dcp.save`, nested as users write it."""
    weight = torch.randn(4, 6)
    dcp.save({"model": {"w": weight, "empty": torch.zeros(0)}}, checkpoint_id=tmp_path / "stock")
    convert(tmp_path / "stock", tmp_path / "native", how=Conversion(allow_pickle=True))
    assert_equal(stored(tmp_path / "native"), {"model.w": weight, "model.empty": torch.zeros(0)})


# ---------------------------------------------------------------------- bad input


def test_a_flipped_byte_is_not_converted(source: Path, tmp_path: Path) -> None:
    (data,) = (source / "data").iterdir()
    contents = bytearray(data.read_bytes())
    contents[len(contents) // 2] ^= 1
    data.write_bytes(contents)
    with pytest.raises(CheckpointError, match=r"data/rank_00000.bin is damaged.*in tensors"):
        convert(source, tmp_path / "new")
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("target", ["native", "w.safetensors", "torch-dcp"])
def test_a_failure_leaves_nothing(source: Path, tmp_path: Path, target: str) -> None:
    content = read_native(source)
    calls: list[object] = []

    def broken(box: object) -> torch.Tensor:
        calls.append(box)
        raise OSError("No space left on device")

    name = "model.network.decoder.layers.1.mlp.linear_fc2.weight"
    bad = replace(content.tensors[name], part=broken)
    content = replace(content, tensors={**content.tensors, name: bad})
    write: Callable[[Path, Any], None] = {
        "native": write_native,
        "w.safetensors": write_safetensors,
        "torch-dcp": write_dcp,
    }[target]
    before = sorted(os.listdir(tmp_path))
    with pytest.raises(OSError, match="No space left"):
        write(tmp_path / target, content)
    assert calls
    assert sorted(os.listdir(tmp_path)) == before


def test_options_that_do_not_fit(source: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="exists; choose another name"):
        convert(source, source)
    with pytest.raises(ValueError, match="files=0"):
        convert(source, tmp_path / "x", how=Conversion(files=0))
    with pytest.raises(ValueError, match=r"dtype=torch.int8: give a floating dtype"):
        convert(source, tmp_path / "x", how=Conversion(dtype=torch.int8))
    how = Conversion(weights_only=True, moments_dtype=torch.float32)
    with pytest.raises(ValueError, match="no moments with weights_only"):
        convert(source, tmp_path / "x", how=how)
    with pytest.raises(ValueError, match="only native, safetensors, torch-dcp are written"):
        convert(source, tmp_path / "x", target_kind="megatron-core")
    with pytest.raises(CheckpointError, match="does not exist"):
        convert(tmp_path / "no", tmp_path / "x")
    (tmp_path / "folder").mkdir()
    with pytest.raises(CheckpointError, match="no checkpoint of a known kind"):
        convert(tmp_path / "folder", tmp_path / "x")
    assert is_checkpoint(source)


# ---------------------------------------------------------------------- memory

_MEMORY = """
import json, resource, sys
import torch
from pathlib import Path
from megatron_lightning.checkpoint.convert import Conversion, convert
torch.set_num_threads(1)
def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
folder = Path(sys.argv[1])
convert(folder / "small", folder / "warm.safetensors")
convert(folder / "small", folder / "warm-dcp", target_kind="torch-dcp")
convert(folder / "warm-dcp", folder / "warm", how=Conversion(allow_pickle=True))
found = {}
for name, source, target, kind in (
    ("native", "large", "native", "native"),
    ("safetensors", "large", "w.safetensors", "safetensors"),
    ("torch-dcp", "large", "stock", "torch-dcp"),
    ("back", "stock", "back", "native"),
):
    before = peak()
    how = Conversion(allow_pickle=True, dtype=torch.bfloat16)
    convert(folder / source, folder / target, target_kind=kind, how=how)
    found[name] = peak() - before
print(json.dumps(found))
"""


def test_memory_is_that_of_one_tensor(tmp_path: Path) -> None:
    """32 tensors of 8 MiB are converted with less than four of them in memory."""
    one = torch.randn(2048, 1024)
    save(tmp_path / "small", {"model.w": torch.ones(4)}, {})
    save(tmp_path / "large", {f"model.w{i}": one for i in range(32)}, {})
    done = subprocess.run(
        [sys.executable, "-c", _MEMORY, str(tmp_path)], capture_output=True, text=True, check=True
    )
    found = json.loads(done.stdout)
    assert max(found.values()) < 4 * one.nbytes, found


def test_pieces_of_a_large_tensor_are_read_by_themselves(tmp_path: Path) -> None:
    """More than 64 MiB of one tensor is never asked for at once."""
    asked = []

    def part(box: Any) -> torch.Tensor:
        asked.append(box.numel)
        return torch.zeros(box.sizes, dtype=torch.uint8)

    tensor = LazyTensor((3, 2**26 // 2, 1), torch.uint8, part)
    content = Content(origin="-", tensors={"model.w": tensor}, objects={}, metadata={})
    write_native(tmp_path / "x", content, files=2)
    assert sum(asked) == 3 * 2**25
    assert max(asked) <= 2**26
    verify(tmp_path / "x")
