"""The same training in every two-GPU layout under NCCL, against one GPU, in float32 and
bfloat16.
"""

import functools
from typing import Any

import pytest
import torch

from tests.harness import run_ranks_fresh
from tests.layout_runs import Run, assert_same_training, tiny_config, train

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif("torch.cuda.device_count() < 2", reason="needs two CUDA devices"),
]

LAYOUTS: dict[str, dict[str, Any]] = {
    "tp2": dict(tensor_parallel_size=2),
    "tp2_sp": dict(tensor_parallel_size=2, sequence_parallel=True),
    "pp2": dict(pipeline_parallel_size=2, micro_batch_size=2),
    "pp2_interleaved": dict(pipeline_parallel_size=2, virtual=2, micro_batch_size=2),
    "dp2": {},
}
DTYPES = {"32-true": torch.float32, "bf16-mixed": torch.bfloat16}


def on_gpu(layout: dict[str, Any], precision: str) -> Run:
    config = tiny_config(tie_word_embeddings=True, qk_layernorm=True)
    return Run(config=config, layout=layout, trainer=dict(accelerator="gpu", precision=precision))


@functools.cache
def single(precision: str) -> dict[str, Any]:
    return run_ranks_fresh(train, 1, on_gpu({}, precision))[0]


@pytest.mark.parametrize("precision", DTYPES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_training_equals_one_gpu(layout: str, precision: str) -> None:
    ranks = run_ranks_fresh(train, 2, on_gpu(LAYOUTS[layout], precision), timeout=200)
    assert_same_training(ranks, single(precision), DTYPES[precision])


def test_gpu_starts_from_the_weights_of_the_cpu() -> None:
    """The generator's bits are equal; normals may differ in the last place of float32."""
    on_cpu = run_ranks_fresh(train, 1, Run(config=on_gpu({}, "32-true").config, steps=1))[0]
    differing = total = 0
    for name, (_, _, _, value) in single("32-true")["initial"].items():
        other = on_cpu["initial"][name][3]
        torch.testing.assert_close(value, other, rtol=2e-7, atol=1e-12)
        differing += int((value != other).sum())
        total += value.numel()
    print(f"{differing} of {total} initial values differ between CPU and GPU")
    assert differing <= total * 1e-5
