"""Hugging Face models on GPUs: read into them, and written from them, in layouts under NCCL."""

from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch

from megatron_lightning.bridge import from_hf
from megatron_lightning.config import DataParallelConfig
from tests.harness import run_ranks_fresh
from tests.hf_models import (
    LOCAL,
    LOCAL_NAMES,
    MOE_NAMES,
    TRAINING,
    Batches,
    PlainAdamW,
    Recorded,
    Watch,
    assert_same_tensors,
)
from tests.layout_runs import make_strategy

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif("not torch.cuda.is_available()", reason="needs a CUDA device"),
]
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "single": (1, {}),
    "tp2": (2, dict(tensor_parallel_size=2)),
    "pp2": (2, dict(pipeline_parallel_size=2)),
    "ep2": (2, dict(expert_parallel_size=2)),
    "fsdp2": (2, dict(data_parallel=DataParallelConfig(sharding="fsdp"))),
}


def names_in(layout: dict[str, Any]) -> tuple[str, ...]:
    """The models that a layout is for."""
    return MOE_NAMES if "expert_parallel_size" in layout else LOCAL_NAMES


def use(rank: int, world_size: int, layout: dict[str, Any], out: str) -> dict[str, Any]:
    found = {}
    for name in names_in(layout):
        recorded, watch = Recorded.read(LOCAL / name), Watch()
        model = from_hf(LOCAL / name, model_class=PlainAdamW)
        trainer = L.Trainer(
            strategy=make_strategy(layout),
            accelerator="gpu",
            devices=world_size,
            max_steps=8,
            gradient_clip_val=1.0,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            callbacks=[watch],
        )
        (logits,) = trainer.predict(model, Batches(recorded.batch()))  # type: ignore[misc]
        model.save_hf(Path(out) / name, max_shard_bytes=20_000)
        trainer.fit(model, Batches(*[recorded.batch()] * 8))
        found[name] = (logits.cpu(), watch.losses)
    return found


@pytest.mark.parametrize("layout", LAYOUTS)
def test_as_transformers(tmp_path: Path, layout: str) -> None:
    world_size, options = LAYOUTS[layout]
    if torch.cuda.device_count() < world_size:
        pytest.skip(f"needs {world_size} CUDA devices")
    for ranks in run_ranks_fresh(use, world_size, options, str(tmp_path), timeout=280):
        for name, (logits, losses) in ranks.items():
            recorded = Recorded.read(LOCAL / name)
            torch.testing.assert_close(logits, recorded.arrays["logits"], rtol=1e-3, atol=1e-3)
            assert losses == pytest.approx(recorded.losses, abs=TRAINING)
    for name in names_in(options):
        assert_same_tensors(tmp_path / name, LOCAL / name)
