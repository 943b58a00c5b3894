"""Fine-tuning on CUDA: packed chats against the same chats one by one, and over context and tensor
ranks against one GPU.
"""

import functools
import json
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_lightning.data import SFTDataModule
from tests.harness import run_ranks_fresh
from tests.layout_runs import Run, assert_same_training, tiny_config, train

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif("not torch.cuda.is_available()", reason="needs a CUDA device"),
]

PRECISIONS = {"32-true": torch.float32, "bf16-mixed": torch.bfloat16}
DOCUMENTS, SEQ_LENGTH = 48, 128


def make_data(run: Run, packing: Any) -> SFTDataModule:
    """All documents in every batch, so that only the packing differs."""
    path = Path(tempfile.mkdtemp()) / "chats.jsonl"
    generator = torch.Generator().manual_seed(5)
    with path.open("w") as file:
        for _ in range(DOCUMENTS):
            a, b = (int(torch.randint(1, 50, (), generator=generator)) for _ in range(2))
            file.write(json.dumps({"prompt": "p" * a, "completion": "c" * b}) + "\n")

    def make(size: int) -> SFTDataModule:
        return SFTDataModule(
            str(path), SEQ_LENGTH, 1, size, tokenizer="bytes", packing=packing, valid=str(path)
        )

    if packing == "none":
        return make(DOCUMENTS)
    planned = make(2)
    planned.setup("fit")
    samples = planned.statistics["train"].samples
    return make(samples + samples % 2)  # a sample without loss fills up an odd batch


def fit(ranks: int, precision: str, packing: str, **layout: Any) -> list[dict[str, Any]]:
    run = Run(
        config=tiny_config(qk_layernorm=True),
        layout=layout,
        trainer=dict(accelerator="gpu", precision=precision, check_val_every_n_epoch=None),
        steps=4,
        keep_gradients=(0, 3),
        make_data=functools.partial(make_data, packing=packing),
    )
    return run_ranks_fresh(train, ranks, run, timeout=200)


@functools.cache
def unpacked(precision: str) -> dict[str, Any]:
    return fit(1, precision, "none")[0]


@pytest.mark.parametrize("packing", ["first_fit_decreasing", "in_order"])
@pytest.mark.parametrize("precision", PRECISIONS)
def test_packed_equals_unpacked(precision: str, packing: str) -> None:
    ranks = fit(1, precision, packing)
    assert_same_training(ranks, unpacked(precision), PRECISIONS[precision])


@pytest.mark.skipif("torch.cuda.device_count() < 2", reason="needs two CUDA devices")
@pytest.mark.parametrize("axis", ["context", "tensor", "pipeline"])
@pytest.mark.parametrize("precision", PRECISIONS)
def test_packed_over_two_gpus(precision: str, axis: str) -> None:
    ranks = fit(2, precision, "first_fit_decreasing", **{f"{axis}_parallel_size": 2})
    assert_same_training(ranks, unpacked(precision), PRECISIONS[precision])
