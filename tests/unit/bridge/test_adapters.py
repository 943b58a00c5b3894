"""Folders of `peft`: what is taken, what is refused by name, and merged weights on disk."""

import functools
import json
import shutil
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from megatron_lightning.bridge import (
    ExportOptions,
    export_checkpoint,
    from_hf,
    merge,
    pretrained,
    save_adapters,
)
from megatron_lightning.bridge.adapters import short_names
from megatron_lightning.checkpoint import Box
from megatron_lightning.cli.main import main
from megatron_lightning.config import GPTConfig, LoraConfig
from megatron_lightning.layers.lora import StackedParts
from megatron_lightning.models import GPTModel
from megatron_lightning.strategies import MegatronStrategy
from tests.hf_models import tensors_of
from tests.lora_runs import DATA, RECORDED, Data, batch_of

LLAMA, ADAPTERS = DATA / "hf" / "llama", RECORDED / "llama"
TOKENS = torch.arange(20).view(2, 10)


def stirred(name: str, **fields: Any) -> GPTModel:
    model = from_hf(DATA / "hf" / name).add_lora(**{"rank": 4, "alpha": 8, **fields})
    model(TOKENS)
    with torch.no_grad():
        for parameter in (p for n, p in model.named_parameters() if "lora_b" in n):
            parameter.normal_(std=0.1)
    return model


@pytest.mark.parametrize(
    "targets",
    [
        ("linear_fc1", "linear_fc2", "linear_proj", "linear_qkv"),
        ("linear_fc1:up", "linear_qkv:key", "linear_qkv:query"),
        ("0.self_attention.linear_qkv", "linear_fc2"),
    ],
)
def test_there_and_back(tmp_path: Path, targets: tuple[str, ...]) -> None:
    model = stirred("llama", targets=targets, rank_stabilised=True)
    model.save_adapters(tmp_path / "a")
    back = from_hf(LLAMA).load_adapters(tmp_path / "a")
    assert back.network is None
    assert back.lora is not None
    assert back.lora.targets == targets
    assert torch.equal(back(TOKENS), model(TOKENS))
    built = from_hf(LLAMA)
    built(TOKENS)
    assert torch.equal(built.load_adapters(tmp_path / "a")(TOKENS), model(TOKENS))


def test_names_are_as_short_as_they_may_be() -> None:
    known = {f"model.layers.{i}.{x}" for i in (0, 1, 10) for x in ("a.c_proj", "b.c_proj", "fc")}
    assert short_names({n for n in known if n.endswith("fc")}, known) == ["fc"]
    assert short_names({n for n in known if "a.c_proj" in n}, known) == ["a.c_proj"]
    assert short_names({"model.layers.0.fc"}, known) == ["0.fc"]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"peft_type": "IA3"}, "peft_type='IA3' is not supported"),
        ({"use_dora": True}, "use_dora.*not supported"),
        ({"bias": "all"}, "bias.*not supported"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save.*not supported"),
        ({"rank_pattern": {"q_proj": 2}}, "rank_pattern.*not supported"),
        ({"r": None}, r"\['r'\] missing, and no value is guessed"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights.*not supported"),
        ({"r": 4.5}, r"r=4.5: not a number that it may be"),
        ({"lora_alpha": "8"}, r"lora_alpha='8': not a number"),
        ({"r": 8}, r"lora_A.weight has shape \[4, .*\], not \[8,"),
    ],
)
def test_configs_refused_by_name(tmp_path: Path, fields: dict[str, Any], message: str) -> None:
    folder = shutil.copytree(ADAPTERS, tmp_path / "a")
    config = json.loads((folder / "adapter_config.json").read_text())
    (folder / "adapter_config.json").write_text(json.dumps({**config, **fields}))
    with pytest.raises(ValueError, match=message):
        from_hf(LLAMA).load_adapters(folder)


@pytest.mark.parametrize("change", ["missing", "foreign", "embedding", "no file"])
def test_files_refused_by_name(tmp_path: Path, change: str) -> None:
    folder = shutil.copytree(ADAPTERS, tmp_path / "a")
    file = folder / "adapter_model.safetensors"
    tensors = load_file(file)
    first = next(name for name in tensors if name.endswith("q_proj.lora_A.weight"))
    match change:
        case "missing":
            del tensors[first]
            message = "q_proj.lora_A.weight is missing"
        case "foreign":
            tensors["base_model.model.model.layers.7.self_attn.q_proj.lora_A.weight"] = tensors[
                first
            ].clone()
            message = "layers.7.*belong to no linear layer"
        case "embedding":
            tensors["base_model.model.model.embed_tokens.lora_embedding_A"] = torch.zeros(4, 4)
            message = "embed_tokens.lora_embedding_A.*belong to no linear layer"
        case _:
            message = "there is no adapter_model.safetensors"
    if change == "no file":
        file.unlink()
    else:
        save_file(tensors, file)
    with pytest.raises(ValueError, match=message):
        from_hf(LLAMA).load_adapters(folder)


def test_of_a_module_that_has_others_or_none(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="rank 4 and scale 2, but the module's"):
        from_hf(LLAMA).add_lora(rank=8).load_adapters(ADAPTERS)
    with pytest.raises(ValueError, match="has no adapters"):
        save_adapters(from_hf(LLAMA), tmp_path / "a")
    joined = from_hf(LLAMA).add_lora(joined=True)
    with pytest.raises(ValueError, match="train with LoraConfig.joined=False"):
        joined.save_adapters(tmp_path / "b")
    apart = from_hf(DATA / "hf" / "phi3").add_lora(joined=False)
    with pytest.raises(ValueError, match="one module there.*joined=True"):
        apart.save_adapters(tmp_path / "b")
    with pytest.raises(ValueError, match=r"dtype=torch.int8: use one of"):
        stirred("qwen2").save_adapters(tmp_path / "b", dtype=torch.int8)
    assert not list(tmp_path.iterdir())


def test_an_unmerged_export_is_refused_and_the_base_can_be_had(tmp_path: Path) -> None:
    model = stirred("qwen2")
    with pytest.raises(ValueError, match="merge_adapters=True"):
        model.save_hf(tmp_path / "a")
    assert not list(tmp_path.iterdir())
    model.save_hf(tmp_path / "base", merge_adapters=False)
    for name, tensor in tensors_of(DATA / "hf" / "qwen2").items():
        assert torch.equal(tensors_of(tmp_path / "base")[name], tensor)


@pytest.mark.parametrize("held", ["all", "adapters"])
def test_checkpoints_of_runs_become_merged_models(
    tmp_path: Path, held: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    model = from_hf(LLAMA).add_lora(rank=4, checkpoint=held)
    trainer = L.Trainer(
        strategy=MegatronStrategy(),
        accelerator="cpu",
        devices=1,
        max_steps=2,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(model, Data(model.config.vocab_size, 2))
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    model.save_hf(tmp_path / "want", merge_adapters=True)
    command = ["convert", str(tmp_path / "a.ckpt"), str(tmp_path / "out"), "--to", "huggingface"]
    with pytest.raises(SystemExit) as refused:
        main(command)
    assert refused.value.code == 2
    assert "--adapters merge" in capsys.readouterr().err
    with pytest.raises(SystemExit) as done:
        main([*command, "--adapters", "merge", "--verify"])
    assert done.value.code == 0
    told = f"{len(tensors_of(LLAMA))} tensors of weights, from {tmp_path / 'a.ckpt'}; read back"
    assert told in capsys.readouterr().out
    want, got = tensors_of(tmp_path / "want"), tensors_of(tmp_path / "out")
    base = tensors_of(LLAMA)
    assert want.keys() == got.keys() == base.keys()
    for name, tensor in want.items():
        torch.testing.assert_close(got[name], tensor, atol=1e-6, rtol=1e-6)
    assert sum(not torch.equal(got[name], base[name]) for name in base) == 14
    narrow = ExportOptions(merge_adapters=True, dtype=torch.bfloat16)
    export_checkpoint(tmp_path / "a.ckpt", tmp_path / "narrow", narrow)
    for name, tensor in tensors_of(tmp_path / "narrow").items():
        assert torch.equal(tensor, got[name].bfloat16())  # rounded once
    export_checkpoint(tmp_path / "a.ckpt", tmp_path / "base", ExportOptions(merge_adapters=False))
    assert all(torch.equal(tensors_of(tmp_path / "base")[n], t) for n, t in base.items())


class TrainsNorm(GPTModel):
    """Adapters, and the last norm."""

    def build_network(self, device: str) -> Any:
        network: Any = super().build_network(device)
        network.decoder.final_layernorm.weight.requires_grad_(True)
        return network


def test_what_is_trained_beside_adapters_is_kept_with_them(tmp_path: Path) -> None:
    """In a checkpoint of adapters alone, on its way back, and in a merged model from disk."""
    model = from_hf(LLAMA, model_class=TrainsNorm).add_lora(rank=4, checkpoint="adapters")
    trainer = L.Trainer(
        strategy=MegatronStrategy(),
        accelerator="cpu",
        devices=1,
        max_steps=2,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(model, Data(model.config.vocab_size, 2))
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    trained: Any = model.built_network().decoder.final_layernorm.weight
    assert not torch.equal(trained, tensors_of(LLAMA)["model.norm.weight"])
    again = TrainsNorm.load_from_checkpoint(tmp_path / "a.ckpt")
    assert torch.equal(again.built_network().decoder.final_layernorm.weight, trained)
    export_checkpoint(tmp_path / "a.ckpt", tmp_path / "out", ExportOptions(merge_adapters=True))
    assert torch.equal(tensors_of(tmp_path / "out")["model.norm.weight"], trained)


def test_a_model_from_a_config_file(tmp_path: Path) -> None:
    base = GPTModel(GPTConfig(vocab_size=257, num_layers=1, hidden_size=32, num_attention_heads=2))
    base.save_hf(tmp_path / "base")
    model = pretrained(str(tmp_path / "base"), lora=LoraConfig(rank=2))
    assert torch.equal(model(TOKENS), base(TOKENS))
    with pytest.raises(SystemExit) as done:
        main(
            [
                "fit",
                "--config=examples/lora.yaml",
                f"--model.path={tmp_path / 'base'}",
                "--model.lora.rank=2",
                "--data.tokenizer=bytes",
                "--data.chat_template=chatml",
                "--data.global_batch_size=2",
                "--trainer.devices=1",
                "--trainer.accelerator=cpu",
                "--trainer.max_steps=1",
                "--trainer.strategy.tensor_parallel_size=1",
                "--trainer.strategy.sequence_parallel=false",
                f"--trainer.default_root_dir={tmp_path}",
                f"--trainer.logger.save_dir={tmp_path}",
            ]
        )
    assert done.value.code in (0, None)
    (saved,) = tmp_path.rglob("manifest.json")
    again = GPTModel.load_from_checkpoint(saved.parent)
    assert again.lora is not None
    assert again.lora.rank == 2


def test_labels_of_the_recorded_batches_leave_prompts_out() -> None:
    assert batch_of(35, 0)["loss_mask"][:, :2].sum() == 0


@pytest.mark.parametrize("projections", [("whole",), ("up",), ("gate", "up")])
def test_experts_are_merged_one_by_one(
    projections: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Any box of stacked experts (E, 2, F, H); no product is larger than that of one."""
    num, width, hidden, rank = 3, 4, 5, 2
    shape = (num, 2, width, hidden)
    offsets = (6, 0, 0, 0)  # experts 6 to 8 of more
    weight = torch.randn(shape).bfloat16()
    whole = projections == ("whole",)
    out = (2, width) if whole else (width,)
    pairs = {
        name: (torch.randn(num, rank, hidden), torch.randn(num, *out, rank)) for name in projections
    }
    want = weight.float()
    for name, (a, b) in pairs.items():
        delta = 0.5 * torch.einsum("erh,e...r->e...h", a, b)
        if whole:
            want = want + delta
        else:
            want[:, ("gate", "up").index(name)] += delta

    class OneWeight:
        def values(self, name: str, box: Box) -> Tensor:
            return weight[box.shift(offsets, sign=-1).slices()]

    reads: list[Tensor] = []
    products: list[Tensor] = []
    given = {
        name: tuple(functools.partial(_counted, reads, each) for each in pair)
        for name, pair in pairs.items()
    }
    parts = None if whole else StackedParts(("gate", "up"))
    factors = merge.Factors(parts, given, offsets, shape, 0.5)
    product = merge.Factors.product

    def noted(self: merge.Factors, *arguments: Any) -> Tensor:
        products.append(product(self, *arguments))
        return products[-1]

    monkeypatch.setattr(merge.Factors, "product", noted)
    held = merge.Merged(OneWeight(), {"w": factors})  # type: ignore[arg-type]
    some = Box((7, 1, 1, 2), (2, 1, 3, 2))
    for box in (Box(offsets, shape), some, Box((8, 0, 0, 0), (1, *shape[1:]))):
        got = held.values("w", box)
        assert got.dtype is torch.bfloat16
        assert torch.equal(got, want.bfloat16()[box.shift(offsets, sign=-1).slices()])
    assert len(reads) == 2 * len(projections)
    assert {tuple(each.shape) for each in products} == {shape[1:]}
    assert len(products) == 3 + 2  # the last expert is still there


def _counted(reads: list[Tensor], tensor: Tensor) -> Tensor:
    reads.append(tensor)
    return tensor
