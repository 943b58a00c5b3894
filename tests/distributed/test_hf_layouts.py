"""Hugging Face models between ranks: who reads what, biases, forked ranks, a model cut anew."""

import itertools
import json
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor

from megatron_lightning.bridge import from_hf
from megatron_lightning.config import (
    AttentionConfig,
    ClampConfig,
    DataParallelConfig,
    GPTConfig,
    MoEConfig,
    RuntimeConfig,
)
from megatron_lightning.models import GPTModel
from megatron_lightning.strategies import MegatronStrategy
from tests.harness import RankError, run_ranks_fresh
from tests.hf_models import LOCAL, Batches, Recorded, assert_same_tensors, tensors_of
from tests.launch_runs import forget_launcher

LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "tp2": (2, dict(tensor_parallel_size=2)),
    "pp2": (2, dict(pipeline_parallel_size=2)),
    "tp2_pp2": (4, dict(tensor_parallel_size=2, pipeline_parallel_size=2)),
}


def make_trainer(devices: int, layout: dict[str, Any], **options: Any) -> L.Trainer:
    return L.Trainer(
        strategy=MegatronStrategy(**layout),
        accelerator="cpu",
        devices=devices,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **options,
    )


def batch_of(vocab_size: int) -> dict[str, Tensor]:
    tokens = torch.arange(24).reshape(2, 12) % vocab_size
    return {"tokens": tokens, "labels": tokens, "loss_mask": torch.ones(2, 12)}


def import_and_export(
    rank: int, world_size: int, folder: str, layout: dict[str, Any], out: str, precision: str
) -> dict[str, Any]:
    model = from_hf(folder)
    assert model.network is None
    source: Any = model.initial_values
    trainer = make_trainer(world_size, layout, precision=precision)
    (logits,) = trainer.predict(model, Batches(batch_of(model.config.vocab_size)))  # type: ignore[misc]
    held = sum(p.numel() for p in model.parameters())
    model.save_hf(out)
    return {"logits": logits, "read": source.reader.bytes_read, "held": held}


@pytest.fixture(scope="module")
def biased(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama with random biases everywhere, of sizes at which parts of rows are long."""
    config = GPTConfig(
        vocab_size=512,
        num_layers=2,
        hidden_size=512,
        num_attention_heads=8,
        num_query_groups=4,
        ffn_hidden_size=1024,
        add_bias_linear=True,
    )
    model = GPTModel(config)
    torch.manual_seed(5)
    for parameter in model.built_network().parameters():
        torch.nn.init.normal_(parameter, std=0.02)
    folder = tmp_path_factory.mktemp("hf") / "biased"
    model.save_hf(folder, dtype=torch.bfloat16)
    return folder


@pytest.mark.parametrize("layout", ["tp2", "pp2", pytest.param("tp2_pp2", marks=pytest.mark.slow)])
def test_each_rank_reads_its_boxes(biased: Path, tmp_path: Path, layout: str) -> None:
    """C40 among others: biases keep their places; logits as in one process; bitwise back again."""
    world_size, options = LAYOUTS[layout]
    seen = run_ranks_fresh(
        import_and_export, world_size, str(biased), options, str(tmp_path / "out"), "32-true"
    )
    whole = from_hf(biased)
    with torch.no_grad():
        logits = whole(batch_of(512)["tokens"])
    total = 2 * whole.config.num_parameters()
    for found in seen:
        torch.testing.assert_close(found["logits"], logits, rtol=1e-5, atol=1e-5)
        assert found["read"] == 2 * found["held"]
    read = sum(found["read"] for found in seen)
    assert total <= read < 1.02 * total  # norms and some biases are on both tensor ranks
    assert_same_tensors(tmp_path / "out", biased)


EXPERTS: dict[str, dict[str, Any]] = {
    "mixtral": {},
    "gpt_oss": dict(
        add_bias_linear=True,
        window_size=8,
        window_pattern="SF",
        attention=AttentionConfig(sinks=True),
        clamp=ClampConfig(),
    ),
}
EXPERT_LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "ep2": (2, dict(expert_parallel_size=2)),
    "tp2": (2, dict(tensor_parallel_size=2)),
    "tp2_ep2": (
        4,
        dict(tensor_parallel_size=2, expert_parallel_size=2, expert_tensor_parallel_size=2),
    ),
}


@pytest.mark.parametrize(
    ("name", "layout"),
    [
        ("gpt_oss", "ep2"),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in itertools.product(EXPERTS, EXPERT_LAYOUTS)
            if case != ("gpt_oss", "ep2")
        ),
    ],
)
def test_each_rank_reads_its_experts(tmp_path: Path, name: str, layout: str) -> None:
    """And of those its columns; whatever way they are stored."""
    config = GPTConfig(
        vocab_size=256,
        num_layers=2,
        hidden_size=512,
        num_attention_heads=8,
        num_query_groups=4,
        ffn_hidden_size=768,
        moe=MoEConfig(num_experts=4, router_bias=name == "gpt_oss"),
        **EXPERTS[name],
    )
    model = GPTModel(config)
    torch.manual_seed(5)
    for parameter in model.built_network().parameters():
        torch.nn.init.normal_(parameter, std=0.02)
    model.save_hf(tmp_path / name, dtype=torch.bfloat16)
    world_size, options = EXPERT_LAYOUTS[layout]
    seen = run_ranks_fresh(
        import_and_export,
        world_size,
        str(tmp_path / name),
        options,
        str(tmp_path / "out"),
        "32-true",
    )
    whole = from_hf(tmp_path / name)
    with torch.no_grad():
        logits = whole(batch_of(256)["tokens"])
    for found in seen:
        torch.testing.assert_close(found["logits"], logits, rtol=1e-5, atol=1e-5)
        assert found["read"] == 2 * found["held"]
    assert_same_tensors(tmp_path / "out", tmp_path / name)


def test_bfloat16_through_a_layout_is_bitwise(biased: Path, tmp_path: Path) -> None:
    run_ranks_fresh(
        import_and_export, 2, str(biased), LAYOUTS["tp2"][1], str(tmp_path / "out"), "bf16-true"
    )
    assert_same_tensors(tmp_path / "out", biased)
    assert {t.dtype for t in tensors_of(tmp_path / "out").values()} == {torch.bfloat16}


def train_sharded(rank: int, world_size: int, out: str) -> None:
    """A model from nowhere, whose parameters are kept in float32 and read in bfloat16."""
    sizes = dict(vocab_size=64, num_layers=2, hidden_size=32, num_attention_heads=4)
    model = GPTModel(GPTConfig(**sizes))
    layout = dict(data_parallel=DataParallelConfig(sharding="fsdp"))
    trainer = make_trainer(world_size, layout, max_steps=1, precision="bf16-mixed")
    trainer.fit(model, Batches(batch_of(64)))
    model.save_hf(out)


def test_fully_sharded_weights_leave_in_the_dtype_they_are_read_in(tmp_path: Path) -> None:
    run_ranks_fresh(train_sharded, 2, str(tmp_path / "out"))
    assert {t.dtype for t in tensors_of(tmp_path / "out").values()} == {torch.bfloat16}
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (config["model_type"], config["torch_dtype"]) == ("llama", "bfloat16")


def export_into(rank: int, world_size: int, out: str) -> None:
    model = from_hf(LOCAL / "qwen2")
    trainer = make_trainer(world_size, dict(tensor_parallel_size=2))
    trainer.predict(model, Batches(batch_of(35)))  # type: ignore[arg-type]
    model.save_hf(out)


def test_a_folder_that_exists_is_refused_on_every_rank(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(RankError, match="exists already; give a new folder"):
        run_ranks_fresh(export_into, 2, str(tmp_path))


def train_in_forked_ranks(rank: int, world_size: int, out: str) -> tuple[bool, bool]:
    """As a notebook does: the ranks are forked from here and gone afterwards."""
    forget_launcher()
    recorded = Recorded.read(LOCAL / "llama")
    model = from_hf(LOCAL / "llama")
    layout = dict(tensor_parallel_size=2, runtime=RuntimeConfig(launcher="fork"))
    trainer = make_trainer(2, layout, max_steps=2)
    trainer.fit(model, Batches(recorded.batch(), recorded.batch()))
    model.save_hf(out)
    tokens = recorded.arrays["input_ids"]
    back = from_hf(out)
    changed = not torch.allclose(model(tokens), recorded.arrays["logits"], atol=1e-4)
    return changed, torch.equal(back(tokens), model(tokens))


def test_after_forked_ranks(tmp_path: Path) -> None:
    assert run_ranks_fresh(train_in_forked_ranks, 1, str(tmp_path / "x")) == [(True, True)]
    config = json.loads((tmp_path / "x" / "config.json").read_text())
    assert config == json.loads((LOCAL / "llama" / "config.json").read_text())
