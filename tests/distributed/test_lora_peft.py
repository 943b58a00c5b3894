"""Adapters are those of `peft`: the same training, files that go both ways, merged weights."""

import json
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from safetensors.torch import load_file

from megatron_lightning.checkpoint import list_tensors
from megatron_lightning.config import DataParallelConfig, LoraConfig
from megatron_lightning.models import GPTModel
from megatron_lightning.strategies import MegatronStrategy
from tests.harness import run_ranks_fresh
from tests.hf_models import tensors_of
from tests.lora_runs import DATA, RECORDED, TOLERANCE, Data, LoraRun, batch_of, recorded, train

TP2 = dict(tensor_parallel_size=2)
TP2_SP = dict(tensor_parallel_size=2, sequence_parallel=True)
NAMES = ("gpt2", "llama", "phi3", "qwen2")


def assert_as_recorded(ranks: list[dict[str, Any]], name: str) -> None:
    want = recorded(name)
    for rank in ranks:
        assert rank["losses"] == pytest.approx(want["losses"], abs=TOLERANCE)
    ended = torch.tensor(want["first_logits"])
    torch.testing.assert_close(ranks[0]["logits"][0, -1], ended, atol=TOLERANCE, rtol=0)
    assert want["losses"][0] - want["losses"][9] > 0.1


@pytest.mark.parametrize(("name", "layout"), [("llama", TP2), ("qwen2", TP2_SP)])
def test_training_is_that_of_peft(name: str, layout: dict[str, Any]) -> None:
    run = LoraRun(base=DATA / "hf" / name, adapters=RECORDED / name, layout=layout)
    assert_as_recorded(run_ranks_fresh(train, 2, run), name)


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_training_is_that_of_peft_elsewhere(name: str) -> None:
    base, adapters = DATA / "hf" / name, RECORDED / name
    assert_as_recorded(run_ranks_fresh(train, 1, LoraRun(base=base, adapters=adapters)), name)
    layout = TP2_SP | dict(pipeline_parallel_size=2, micro_batch_size=2)
    run = LoraRun(base=base, adapters=adapters, layout=layout)
    assert_as_recorded(run_ranks_fresh(train, 4, run), name)


def test_c43_tensor_parallel_adapters_merged_exported_and_resumed(tmp_path: Path) -> None:
    """Rank 4, alpha 8, on qkv, output and both MLP layers, TP=2."""
    base = DATA / "hf" / "llama"
    lora = LoraConfig(rank=4, alpha=8, checkpoint="adapters")
    whole = run_ranks_fresh(train, 1, LoraRun(base=base, lora=lora, export=tmp_path / "one"))[0]
    half = LoraRun(base=base, lora=lora, layout=TP2, steps=5, save=tmp_path / "half.ckpt")
    run_ranks_fresh(train, 2, half)

    stored = list_tensors(tmp_path / "half.ckpt")
    assert all(".adapters." in name for name in stored)  # nor optimizer state of the base
    assert any(name.startswith("optimizer.") for name in stored)
    rest = LoraRun(base=base, lora=lora, layout=TP2, start=half.save, export=tmp_path / "two")
    resumed = run_ranks_fresh(train, 2, rest)[0]
    assert resumed["losses"] == pytest.approx(whole["losses"][5:], abs=TOLERANCE)

    factors = load_file(tmp_path / "two" / "adapters" / "adapter_model.safetensors")
    merged, weights = tensors_of(tmp_path / "two" / "merged"), tensors_of(base)
    other = tensors_of(tmp_path / "one" / "merged")
    assert merged.keys() == weights.keys()
    changed = 0
    for name, weight in weights.items():
        path = f"base_model.model.{name.removesuffix('.weight')}"
        want = weight.float()
        if f"{path}.lora_A.weight" in factors:
            changed += 1
            a, b = (factors[f"{path}.lora_{kind}.weight"] for kind in "AB")
            assert b.abs().max() > 0
            want = want + 2 * (b @ a)
        want = want.to(weight.dtype)
        torch.testing.assert_close(merged[name], want, atol=1e-6, rtol=1e-6)
        torch.testing.assert_close(merged[name], other[name], atol=1e-5, rtol=1e-5)
    assert changed == 7 * 2


def test_c43_the_adapters_of_a_layout_load_in_peft(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    transformers = pytest.importorskip("transformers")
    base = DATA / "hf" / "qwen2"
    layout = TP2_SP | dict(data_parallel=DataParallelConfig(sharding="fsdp"))
    run = LoraRun(base=base, adapters=RECORDED / "qwen2", layout=layout, export=tmp_path)
    ranks = run_ranks_fresh(train, 4, run)
    model = transformers.AutoModelForCausalLM.from_pretrained(base)
    adapted = peft.PeftModel.from_pretrained(model, str(tmp_path / "adapters"))
    tokens = batch_of(model.config.vocab_size, 0)["tokens"]
    merged = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    with torch.no_grad():
        logits = adapted(tokens).logits
        assert torch.allclose(merged(tokens).logits, logits, atol=TOLERANCE)
    assert torch.allclose(ranks[0]["logits"], logits, atol=TOLERANCE)
    ours = json.loads((tmp_path / "adapters" / "adapter_config.json").read_text())
    theirs = json.loads((RECORDED / "qwen2" / "adapter_config.json").read_text())
    for field in ("r", "lora_alpha", "target_modules", "lora_dropout", "use_rslora"):
        assert ours[field] == theirs[field], field


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen2", "llama"])
def test_training_of_a_reference_model_is_that_of_peft_now(
    name: str, golden: Path, tmp_path: Path
) -> None:
    pytest.importorskip("peft")
    pytest.importorskip("transformers")
    from tests.data.lora.make import peft_model, train_peft

    base = golden / "models" / name
    theirs = peft_model(base, dict(target_modules="all-linear"))
    theirs.save_pretrained(tmp_path)
    want = train_peft(theirs, theirs.config.vocab_size)
    one = run_ranks_fresh(train, 1, LoraRun(base=base, adapters=tmp_path))[0]
    two = run_ranks_fresh(train, 2, LoraRun(base=base, adapters=tmp_path, layout=TP2))[0]
    assert one["losses"] == pytest.approx(want, abs=TOLERANCE)
    assert two["losses"] == pytest.approx(want, abs=TOLERANCE)
    assert two["losses"] == pytest.approx(one["losses"], abs=TOLERANCE)


def test_a_checkpoint_of_adapters_alone_finds_its_base(tmp_path: Path) -> None:
    base = DATA / "hf" / "llama"
    lora = LoraConfig(rank=4, alpha=8, checkpoint="adapters")
    run = LoraRun(base=base, lora=lora, steps=2, save=tmp_path / "a.ckpt", export=tmp_path)
    ended = run_ranks_fresh(train, 1, run)[0]
    tokens = batch_of(run.module().config.vocab_size, 0)["tokens"]
    for folder in (None, base):
        model = GPTModel.load_from_checkpoint(tmp_path / "a.ckpt", base=folder)
        assert model.lora == lora
        torch.testing.assert_close(model(tokens), ended["logits"], atol=1e-5, rtol=0)
    with pytest.raises(ValueError, match="adapters alone, and this module has no base.*llama"):
        GPTModel(model.config, lora=lora).load_weights(tmp_path / "a.ckpt")
    trainer = L.Trainer(strategy=MegatronStrategy(), accelerator="cpu", devices=1, logger=False)
    with pytest.raises(ValueError, match="ckpt_path=.*adapters alone, and this module has no base"):
        trainer.fit(
            GPTModel(model.config, lora=lora),
            Data(model.config.vocab_size, 1),
            ckpt_path=tmp_path / "a.ckpt",
        )


@pytest.mark.slow
@pytest.mark.parametrize(("held", "precision"), [("all", "32-true"), ("adapters", "bf16-mixed")])
def test_a_run_goes_on_in_another_layout(tmp_path: Path, held: Any, precision: str) -> None:
    """Exactly: masters and optimizer state of the adapters are there, the base is as it was."""
    base = DATA / "hf" / "qwen2"
    lora = LoraConfig(rank=4, alpha=8, checkpoint=held)
    trainer = dict(precision=precision)
    tolerance = TOLERANCE if precision == "32-true" else 2e-2
    whole = LoraRun(base=base, lora=lora, trainer=trainer)
    want = run_ranks_fresh(train, 1, whole)[0]
    first = LoraRun(
        base=base, lora=lora, trainer=trainer, layout=TP2_SP, steps=5, save=tmp_path / "a.ckpt"
    )
    run_ranks_fresh(train, 2, first)
    for layout in (
        dict(data_parallel=DataParallelConfig(sharding="fsdp")),
        dict(data_parallel=DataParallelConfig(sharding="optimizer")),
        dict(pipeline_parallel_size=2, micro_batch_size=2),
    ):
        rest = LoraRun(base=base, lora=lora, trainer=trainer, layout=layout, start=first.save)
        got = run_ranks_fresh(train, 2, rest)[0]
        assert got["losses"] == pytest.approx(want["losses"][5:], abs=tolerance)
