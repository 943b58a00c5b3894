"""`plan`'s peak memory against the measured one: dense shape (a), 1.1 B parameters, bf16-mixed,
4 x 4096 tokens a micro-batch, on one and two GPUs, within 10 %.
"""

import dataclasses
from collections.abc import Iterator
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor

from megatron_lightning.cli.plan_estimate import make_plan
from megatron_lightning.cli.plan_request import PlanRequest
from megatron_lightning.config import (
    DataParallelConfig,
    GPTConfig,
    ParallelConfig,
    PipelineConfig,
    QuantizationConfig,
    RecomputeConfig,
    RuntimeConfig,
)
from megatron_lightning.models import GPTModel
from megatron_lightning.strategies import MegatronStrategy
from tests.harness import run_ranks_fresh

pytestmark = pytest.mark.gpu

SHAPE = GPTConfig(
    vocab_size=32768,
    num_layers=16,
    hidden_size=2048,
    num_attention_heads=32,
    num_query_groups=8,
    ffn_hidden_size=8192,
    max_position_embeddings=4096,
)
SEQUENCE, MICRO = 4096, 4
ZB_V = PipelineConfig(schedule="zb-v", virtual_pipeline_size=2)
ALL_LAYERS = QuantizationConfig(keep_first=0, keep_last=0)
ACTIVATION = RecomputeConfig(mode="selective", modules=("mlp.activation",))
CASES: dict[str, tuple[int, dict[str, Any]]] = {
    "one": (1, {}),
    "one_compiled": (1, dict(runtime=RuntimeConfig(compile_layers=True))),
    "one_full_recompute": (1, dict(recompute=RecomputeConfig(mode="full"))),
    "one_mlp_recompute": (1, dict(recompute=RecomputeConfig(mode="selective", modules=("mlp",)))),
    "one_compiled_activation": (
        1,
        dict(runtime=RuntimeConfig(compile_layers=True), recompute=ACTIVATION),
    ),
    "one_compiled_fp8": (
        1,
        dict(runtime=RuntimeConfig(compile_layers=True), quantization=ALL_LAYERS),
    ),
    "one_fp8_rowwise": (1, dict(quantization=QuantizationConfig(recipe="fp8_rowwise"))),
    "one_offload": (1, dict(recompute=RecomputeConfig(offload=True))),
    "tp2_sp": (2, dict(tensor_parallel_size=2, sequence_parallel=True)),
    "pp2": (2, dict(pipeline_parallel_size=2)),
    "pp2_zb_h1": (2, dict(pipeline_parallel_size=2, pipeline=PipelineConfig(schedule="zb-h1"))),
    "pp2_zb_v": (2, dict(pipeline_parallel_size=2, pipeline=ZB_V)),
    "pp2_zb_v_activation": (
        2,
        dict(
            pipeline_parallel_size=2,
            pipeline=dataclasses.replace(ZB_V, defer_head_gradient=False),
            recompute=dataclasses.replace(ACTIVATION, modules=("layers.[0-3].mlp.activation",)),
        ),
    ),
    "cp2": (2, dict(context_parallel_size=2)),
    "dp2": (2, {}),
    "dp2_fsdp": (2, dict(data_parallel=DataParallelConfig(sharding="fsdp"))),
    "dp2_zero1": (2, dict(data_parallel=DataParallelConfig(sharding="optimizer"))),
}


class Tokens(L.LightningDataModule):
    """Random batches of two micro-batches (four under a pipeline)."""

    def __init__(self, rows: int) -> None:
        super().__init__()
        self.rows, self.micro_batch_size = rows, MICRO

    def train_dataloader(self) -> "Tokens":
        return self

    def __len__(self) -> int:
        return 3

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        generator = torch.Generator().manual_seed(0)
        for _ in range(len(self)):
            size = (self.rows, SEQUENCE + 1)
            tokens = torch.randint(0, SHAPE.vocab_size, size, generator=generator)
            mask = torch.ones(self.rows, SEQUENCE)
            yield {"tokens": tokens[:, :-1], "labels": tokens[:, 1:], "loss_mask": mask}


def peak(rank: int, world_size: int, layout: dict[str, Any]) -> int:
    trainer = L.Trainer(
        strategy=MegatronStrategy(**layout),
        accelerator="gpu",
        devices=world_size,
        precision="bf16-mixed",
        max_steps=3,
        gradient_clip_val=1.0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(GPTModel(SHAPE), Tokens(MICRO * (4 if "pipeline_parallel_size" in layout else 2)))
    return torch.cuda.max_memory_allocated()


@pytest.mark.parametrize("case", CASES)
def test_peak_memory(case: str) -> None:
    gpus, layout = CASES[case]
    if torch.cuda.device_count() < gpus:
        pytest.skip(f"needs {gpus} CUDA devices")
    parallel = ParallelConfig(**layout)
    data = gpus // parallel.model_parallel_size
    rows = MICRO * (4 if parallel.pipeline_parallel_size > 1 else 2)
    request = PlanRequest(
        model=SHAPE,
        model_name="a",
        parallel=parallel,
        gpus=gpus,
        seq_length=SEQUENCE,
        micro_batch_size=MICRO,
        global_batch_size=rows * data,
    )
    plan = make_plan(request)
    measured = run_ranks_fresh(peak, gpus, layout, timeout=500)
    for rank, found in enumerate(measured):
        stage = rank if parallel.pipeline_parallel_size > 1 else 0
        said = plan.ranks[stage].memory
        print(f"{case} rank {rank}: {said.peak / 2**30:.2f} GiB said, {found / 2**30:.2f} measured")
        print(f"  {said}")
    for rank, found in enumerate(measured):
        stage = rank if parallel.pipeline_parallel_size > 1 else 0
        assert plan.ranks[stage].memory.peak == pytest.approx(found, rel=0.1)
