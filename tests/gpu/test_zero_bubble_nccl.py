"""Zero-bubble training on two GPUs under NCCL against one GPU, in float32 and bfloat16."""

import dataclasses
import functools
from typing import Any

import pytest
import torch

from megatron_lightning.config import PipelineConfig, RecomputeConfig, RuntimeConfig
from tests.harness import run_ranks_fresh
from tests.layout_runs import Run, assert_same_training, tiny_config, train

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif("torch.cuda.device_count() < 2", reason="needs two CUDA devices"),
]

SCHEDULES = {
    "zb-h1": PipelineConfig(schedule="zb-h1"),
    "zb-v": PipelineConfig(schedule="zb-v", virtual_pipeline_size=2),
}
DTYPES = {"32-true": torch.float32, "bf16-mixed": torch.bfloat16}


def run_of(layout: dict[str, Any], precision: str) -> Run:
    config = tiny_config(tie_word_embeddings=True, qk_layernorm=True)
    return Run(config=config, layout=layout, trainer=dict(accelerator="gpu", precision=precision))


@functools.cache
def single(precision: str) -> dict[str, Any]:
    return run_ranks_fresh(train, 1, run_of({}, precision))[0]


@pytest.mark.parametrize("precision", DTYPES)
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_training_equals_one_gpu(schedule: str, precision: str) -> None:
    layout = dict(pipeline_parallel_size=2, micro_batch_size=2, pipeline=SCHEDULES[schedule])
    ranks = run_ranks_fresh(train, 2, run_of(layout, precision), timeout=200)
    assert_same_training(ranks, single(precision), DTYPES[precision])


@pytest.mark.parametrize("saving", [False, True])
def test_compiled_layers_give_the_eager_training(saving: bool) -> None:
    recompute = RecomputeConfig(mode="selective", modules=["mlp.activation"])
    layout = dict(
        pipeline_parallel_size=2,
        micro_batch_size=2,
        pipeline=dataclasses.replace(
            SCHEDULES["zb-v"], defer_head_gradient=not saving, message_ctas=1 if saving else None
        ),
        recompute=recompute if saving else RecomputeConfig(),
        runtime=RuntimeConfig(compile_layers=True),
    )
    run = dataclasses.replace(run_of(layout, "32-true"), steps=2, keep_gradients=(0, 1))
    alone = run_ranks_fresh(train, 1, dataclasses.replace(run, layout={}))[0]
    assert_same_training(run_ranks_fresh(train, 2, run, timeout=280), alone)
