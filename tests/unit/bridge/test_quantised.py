"""Weights in few bits, against the formulas of their formats; boxes read as of the whole."""

import json
import random
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from megatron_lightning.bridge import from_hf
from megatron_lightning.bridge.folder import open_folder
from megatron_lightning.bridge.quantised import Fp8Tensor, Mxfp4Tensor, without_quantisation
from megatron_lightning.bridge.safetensors_files import FileReader, read_header
from megatron_lightning.checkpoint import Box
from megatron_lightning.config import AttentionConfig, ClampConfig, GPTConfig, MoEConfig
from megatron_lightning.models import GPTModel
from tests.hf_models import LOCAL

NUMBERS = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]


def decoded(blocks: Tensor, scales: Tensor) -> Tensor:
    """(E, out, groups, 16) and (E, out, groups) -> (E, groups * 32, out), number by number."""
    experts, out, groups, _ = blocks.shape
    values = torch.empty(experts, groups * 32, out, dtype=torch.float64)
    for e in range(experts):
        for o in range(out):
            for g in range(groups):
                for i, byte in enumerate(blocks[e, o, g].tolist()):
                    for half, bits in enumerate((byte % 16, byte // 16)):
                        number = NUMBERS[bits % 8] * (-1 if bits >= 8 else 1)
                        exponent = int(scales[e, o, g]) - 127
                        values[e, g * 32 + 2 * i + half, o] = number * 2.0**exponent
    return values


def packed(experts: int, out: int, groups: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(2)
    return {
        "blocks": torch.randint(
            0, 256, (experts, out, groups, 16), dtype=torch.uint8, generator=generator
        ),
        "scales": torch.randint(
            118, 126, (experts, out, groups), dtype=torch.uint8, generator=generator
        ),
    }


def random_box(shape: tuple[int, ...], draw: random.Random) -> Box:
    offsets = tuple(draw.randrange(size) for size in shape)
    sizes = tuple(draw.randint(1, s - o) for s, o in zip(shape, offsets, strict=True))
    return Box(offsets, sizes)


@pytest.mark.parametrize("at_once", [1 << 20, 40])
def test_mxfp4(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at_once: int) -> None:
    monkeypatch.setattr("megatron_lightning.bridge.quantised._AT_ONCE", at_once)
    file = tmp_path / "x.safetensors"
    save_file(packed(3, 6, 2), file)
    stored, reader, draw = read_header(file), FileReader(), random.Random(0)
    tensor = Mxfp4Tensor.of(stored["blocks"], stored["scales"], "x")
    wanted = decoded(*packed(3, 6, 2).values())
    for view in (None, (3, 64, 3, 2)):
        seen, whole = tensor.seen_as(view), wanted if view is None else wanted.view(view)
        assert seen.shape == tuple(whole.shape)
        for box in [Box.whole(seen.shape), *(random_box(seen.shape, draw) for _ in range(30))]:
            target = torch.full(box.sizes, torch.nan, dtype=torch.bfloat16)
            seen.read(reader, box, target)
            assert torch.equal(target.double(), whole[box.slices()])
    reader.close()
    with pytest.raises(ValueError, match="MXFP4 blocks of shape"):
        Mxfp4Tensor.of(stored["scales"], stored["scales"], "x")


def test_only_the_bytes_of_the_box_are_read(tmp_path: Path) -> None:
    file = tmp_path / "x.safetensors"
    save_file(packed(4, 64, 8), file)
    stored, reader = read_header(file), FileReader()
    tensor = Mxfp4Tensor.of(stored["blocks"], stored["scales"], "x")
    box = Box((2, 0, 0), (2, 256, 64))
    tensor.read(reader, box, torch.empty(box.sizes))
    assert reader.bytes_read == box.numel * 17 // 32
    reader.close()


def test_fp8_in_tiles(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(2)
    values = torch.randn(10, 21, generator=generator).to(torch.float8_e4m3fn)
    factors = torch.rand(3, 3, generator=generator)
    file = tmp_path / "x.safetensors"
    save_file({"w": values, "w_scale_inv": factors}, file)
    stored, reader, draw = read_header(file), FileReader(), random.Random(0)
    tensor = Fp8Tensor.of(stored["w"], stored["w_scale_inv"], (4, 8), "w")
    wanted = torch.empty(10, 21)
    for i in range(10):
        for j in range(21):
            wanted[i, j] = values[i, j].float() * factors[i // 4, j // 8]
    for box in [Box.whole((10, 21)), *(random_box((10, 21), draw) for _ in range(30))]:
        target = torch.empty(box.sizes)
        tensor.read(reader, box, target)
        assert torch.equal(target, wanted[box.slices()].bfloat16().float())
    reader.close()
    with pytest.raises(ValueError, match=r"factors of \[3, 3\] don't fit"):
        Fp8Tensor.of(stored["w"], stored["w_scale_inv"], (4, 4), "w")


@pytest.fixture(scope="module")
def gpt_oss(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A GPT-OSS with experts in MXFP4, as it is published."""
    config = GPTConfig(
        vocab_size=35,
        num_layers=2,
        hidden_size=32,
        num_attention_heads=4,
        num_query_groups=2,
        ffn_hidden_size=64,
        window_size=5,
        window_pattern="SF",
        add_bias_linear=True,
        attention=AttentionConfig(sinks=True),
        clamp=ClampConfig(),
        moe=MoEConfig(num_experts=4, router_bias=True),
    )
    folder = tmp_path_factory.mktemp("hf") / "gpt_oss"
    GPTModel(config).save_hf(folder, dtype=torch.bfloat16)
    tensors = load_file(folder / "model.safetensors")
    for name in [n for n in tensors if n.endswith("_proj") and "experts" in n]:
        experts, inputs, out = tensors.pop(name).shape
        held = packed(experts, out, inputs // 32)
        tensors |= {f"{name}_{part}": value for part, value in held.items()}
    save_file(tensors, folder / "model.safetensors")
    fields = json.loads((folder / "config.json").read_text())
    fields["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": []}
    (folder / "config.json").write_text(json.dumps(fields))
    return folder


def test_gpt_oss_as_it_is_published(gpt_oss: Path, tmp_path: Path) -> None:
    model = from_hf(gpt_oss)
    network: Any = model.built_network()
    held = load_file(gpt_oss / "model.safetensors")
    name = "model.layers.1.mlp.experts."
    for here, there in (("linear_fc1", "gate_up_proj"), ("linear_fc2", "down_proj")):
        wanted = decoded(held[f"{name}{there}_blocks"], held[f"{name}{there}_scales"])
        if here == "linear_fc1":
            wanted = torch.stack((wanted[..., ::2], wanted[..., 1::2]), 1)
        weight = network.get_parameter(f"decoder.layers.1.mlp.experts.{here}.weight")
        assert torch.equal(weight.detach().double(), wanted.transpose(-1, -2))
    # It leaves in bfloat16, and comes back as the same.
    model.save_hf(tmp_path / "out")
    assert "quantization_config" not in json.loads((tmp_path / "out" / "config.json").read_text())
    assert {t.dtype for t in load_file(tmp_path / "out" / "model.safetensors").values()} == {
        torch.bfloat16
    }
    tokens = torch.arange(20).view(2, 10)
    with torch.no_grad():
        assert torch.equal(from_hf(tmp_path / "out")(tokens), model(tokens))


@pytest.mark.parametrize("name", ["llama", "deepseek_v3"])
def test_models_in_fp8(name: str, tmp_path: Path) -> None:
    """Every projection in float8 tiles, norms and embeddings as they are."""
    shutil.copytree(LOCAL / name, tmp_path / "fp8")
    tensors, wanted = load_file(LOCAL / name / "model.safetensors"), {}
    for key, value in list(tensors.items()):
        if not key.endswith("_proj.weight"):
            continue
        tiles = [-(-size // edge) for size, edge in zip(value.shape, (16, 8), strict=True)]
        factors = torch.rand(tiles) + 0.5
        spread = factors.repeat_interleave(16, 0).repeat_interleave(8, 1)
        spread = spread[: value.shape[0], : value.shape[1]]
        tensors[key] = (value / spread).to(torch.float8_e4m3fn)
        tensors[f"{key}_scale_inv"] = factors
        wanted[key] = (tensors[key].float() * spread).bfloat16()
    save_file(tensors, tmp_path / "fp8" / "model.safetensors")
    config = json.loads((tmp_path / "fp8" / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [16, 8]}
    (tmp_path / "fp8" / "config.json").write_text(json.dumps(config))
    from_hf(tmp_path / "fp8").save_hf(tmp_path / "out")
    back = load_file(tmp_path / "out" / "model.safetensors")
    for key, value in load_file(LOCAL / name / "model.safetensors").items():
        assert torch.equal(back[key], wanted.get(key, value)), key
        assert back[key].dtype == wanted.get(key, value).dtype


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"quant_method": "awq"}, "quant_method='awq' is not supported"),
        ({"quant_method": "fp8"}, "weight_block_size=None"),
        ("mxfp4", "quant_method=None is not supported"),
    ],
)
def test_other_methods_are_refused(gpt_oss: Path, fields: Any, words: str) -> None:
    folder = open_folder(gpt_oss)
    with pytest.raises(ValueError, match=words):
        without_quantisation({"quantization_config": fields}, folder.tensors, "here")
