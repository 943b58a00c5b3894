"""`HFExport` on GPUs: weights of the step, through pinned memory, while training goes on."""

from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch

from megatron_lightning.bridge import from_hf
from megatron_lightning.callbacks import HFExport
from megatron_lightning.config import DataParallelConfig
from tests.distributed.test_hf_export import Paced, Snapshots
from tests.harness import run_ranks_fresh
from tests.hf_models import LOCAL, Batches, Recorded, assert_same_tensors
from tests.layout_runs import make_strategy

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif("not torch.cuda.is_available()", reason="needs a CUDA device"),
]
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "single": (1, {}),
    "tp2": (2, dict(tensor_parallel_size=2)),
    "fsdp2": (2, dict(data_parallel=DataParallelConfig(sharding="fsdp"))),
    "zero1": (2, dict(data_parallel=DataParallelConfig(sharding="optimizer"))),
}


def export(rank: int, world_size: int, layout: dict[str, Any], out: str) -> list[str]:
    recorded, model = Recorded.read(LOCAL / "qwen2"), from_hf(LOCAL / "qwen2")
    exports = HFExport(Path(out) / "beside", every_n_steps=2, verify=True)
    trainer = L.Trainer(
        strategy=make_strategy(layout),
        accelerator="gpu",
        devices=world_size,
        precision="bf16-mixed",
        max_steps=5,
        limit_val_batches=0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[exports, Snapshots(Path(out) / "at_once", (2, 5)), Paced()],
    )
    trainer.fit(model, Batches(*[recorded.batch()] * 5))
    return [path.name for path in exports.exported]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_exports_are_those_of_their_steps(tmp_path: Path, layout: str) -> None:
    world_size, options = LAYOUTS[layout]
    if torch.cuda.device_count() < world_size:
        pytest.skip(f"needs {world_size} CUDA devices")
    for exported in run_ranks_fresh(export, world_size, options, str(tmp_path), timeout=280):
        assert exported[0] == "step-00000002"
        assert exported[-1] == "step-00000005"
    for step in (2, 5):
        name = f"step-{step:08d}"
        assert_same_tensors(tmp_path / "beside" / name, tmp_path / "at_once" / name)
