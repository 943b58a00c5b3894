"""Idle time of two GPUs under each schedule, measured, against the simulator with the measured
durations of forwards and backwards.

`pytest -m gpu -s tests/gpu/test_pipeline_timeline.py` prints the numbers and the tables.
"""

from collections.abc import Iterator
from statistics import median
from typing import Any

import lightning as L
import pytest
import torch

from megatron_lightning.callbacks import StepTimeline
from megatron_lightning.config import GPTConfig, PipelineConfig
from megatron_lightning.models import GPTModel
from megatron_lightning.strategies import MegatronStrategy
from tests.harness import run_ranks_fresh

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif("torch.cuda.device_count() < 2", reason="needs two CUDA devices"),
]

SEQUENCE, MICRO_BATCH, MICRO_BATCHES, STEPS = 4096, 2, 4, 8
SCHEDULES = {
    "1f1b": PipelineConfig(),
    "interleaved": PipelineConfig(virtual_pipeline_size=2),
    "zb-h1": PipelineConfig(schedule="zb-h1"),
    "zb-v": PipelineConfig(schedule="zb-v", virtual_pipeline_size=2),
}


def config() -> GPTConfig:
    """About 1.1 billion parameters: a stage takes milliseconds, far more than launching it."""
    return GPTConfig(
        vocab_size=32000,
        num_layers=16,
        hidden_size=2048,
        ffn_hidden_size=8192,
        num_attention_heads=16,
        num_query_groups=8,
    )


class RandomTokens:
    """Batches of random tokens, the same on both ranks."""

    def __len__(self) -> int:
        return STEPS

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        generator = torch.Generator().manual_seed(0)
        shape = (MICRO_BATCH * MICRO_BATCHES, SEQUENCE + 1)
        for _ in range(STEPS):
            tokens = torch.randint(0, config().vocab_size, shape, generator=generator)
            batch = {"tokens": tokens[:, :-1], "labels": tokens[:, 1:]}
            yield batch | {"loss_mask": torch.ones(shape[0], SEQUENCE)}


def watched(rank: int, world_size: int, schedule: str, directory: str) -> dict[str, Any] | None:
    """Train, watching every step but the first; medians of the last steps, from rank 0."""
    callback = StepTimeline(1, directory=directory)
    trainer = L.Trainer(
        accelerator="gpu",
        devices=world_size,
        strategy=MegatronStrategy(
            pipeline_parallel_size=2, micro_batch_size=MICRO_BATCH, pipeline=SCHEDULES[schedule]
        ),
        precision="bf16-mixed",
        max_steps=STEPS,
        callbacks=[callback],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        num_sanity_val_steps=0,
    )
    trainer.fit(GPTModel(config()), RandomTokens())
    if rank > 0:
        return None
    reports = callback.reports[-5:]
    return {
        "measured": median(sum(report.pipeline_idle_seconds.values()) for report in reports),
        "simulated": median(sum(report.simulated.idle) for report in reports),
        "bubble": median(report.bubble_fraction for report in reports),
        "simulated_bubble": median(report.simulated.bubble_fraction for report in reports),
        "seconds": median(report.seconds for report in reports),
        "table": reports[-1].table(),
    }


@pytest.mark.alone
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_idle_time_is_the_simulated_one(schedule: str, tmp_path: Any) -> None:
    got = run_ranks_fresh(watched, 2, schedule, str(tmp_path), timeout=240)[0]
    assert got is not None
    print(
        f"\n{schedule}: idle of both GPUs {got['measured'] * 1e3:.2f} ms, simulated "
        f"{got['simulated'] * 1e3:.2f} ms; bubble {got['bubble']:.2%}, simulated "
        f"{got['simulated_bubble']:.2%}; step {got['seconds'] * 1e3:.1f} ms\n{got['table']}"
    )
    assert got["measured"] == pytest.approx(got["simulated"], rel=0.15)
