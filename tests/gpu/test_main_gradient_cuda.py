"""Weight gradients added straight to float32 sums on CUDA: exactness, training, what it saves.

pytest tests/gpu/test_main_gradient_cuda.py -m gpu -s
"""

import functools
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor

from megatron_lightning.config import DataParallelConfig, RuntimeConfig
from megatron_lightning.config.model import GPTConfig
from megatron_lightning.layers.block import TransformerLayer
from megatron_lightning.layers.rotary import RotaryEmbedding
from megatron_lightning.layers.torch_backend import TorchBackend
from megatron_lightning.parallel.main_gradient import add_product_
from megatron_lightning.precision.accumulate import add_to_sum_
from tests import layout_runs
from tests.harness import run_ranks_fresh
from tests.layout_runs import Run, assert_same_training, tiny_config, train
from tests.unit.parallel.test_main_gradient import served

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif("not torch.cuda.is_available()", reason="needs a CUDA device"),
]


@pytest.mark.parametrize("count", [1, 4096, 100_003])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_a_gradient_is_added_as_torch_adds(dtype: torch.dtype, count: int) -> None:
    total, grad = torch.randn(count, device="cuda"), torch.randn(count, device="cuda").to(dtype)
    want = total + grad
    add_to_sum_(total, grad)
    assert torch.equal(total, want)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_sum_is_exact(dtype: torch.dtype) -> None:
    generator = torch.Generator("cuda").manual_seed(0)
    x, grad = (
        torch.randn(64, 8, width, device="cuda", generator=generator).to(dtype)
        for width in (256, 384)
    )
    exact = grad.flatten(0, 1).double().t() @ x.flatten(0, 1).double()
    total = torch.full((2, 192, 256), torch.nan, device="cuda")
    limit = 1e-3 if dtype is torch.float32 else 1e-5  # TF32, where that is on
    for times in (1, 2):
        add_product_(total, grad, x, first=times == 1)
        error = (total.view(384, 256).double() - times * exact).norm() / exact.norm()
        assert error < limit


def on_gpu(*, fuse: bool, compiled: bool) -> Run:
    return Run(
        config=tiny_config(tie_word_embeddings=True, qk_layernorm=True),
        layout=dict(
            micro_batch_size=2,
            data_parallel=DataParallelConfig(fuse_weight_gradients=fuse),
            runtime=RuntimeConfig(compile_layers=compiled),
        ),
        trainer=dict(accelerator="gpu", precision="bf16-mixed", limit_val_batches=0),
        keep_gradients=(0, 3),
    )


class Steady(layout_runs.Recorder):
    """Fails where something is compiled again after the third step."""

    reads_gradients = False

    def on_train_batch_start(self, trainer: L.Trainer, *args: Any) -> None:
        torch._dynamo.config.error_on_recompile = trainer.global_step > 2


def train_steadily(rank: int, world_size: int, run: Run) -> dict[str, Any]:
    layout_runs.Recorder = Steady  # in a process of its own
    return train(rank, world_size, run)


@functools.cache
def plain() -> dict[str, Any]:
    return run_ranks_fresh(train, 1, on_gpu(fuse=False, compiled=False))[0]


@pytest.mark.parametrize("compiled", [False, True])
def test_training_is_that_of_autograd(compiled: bool) -> None:
    found = run_ranks_fresh(train_steadily, 1, on_gpu(fuse=True, compiled=compiled), timeout=300)
    wanted = plain()
    found[0]["metrics"] = wanted["metrics"] = {}
    assert_same_training(found, wanted, torch.bfloat16)


@pytest.mark.alone
def test_time_of_a_layer() -> None:
    """Prints milliseconds of forward and backward of one compiled layer of 1.1B's shape."""
    config = GPTConfig(
        vocab_size=32768,
        num_layers=16,
        hidden_size=2048,
        ffn_hidden_size=8192,
        num_attention_heads=32,
        num_query_groups=8,
        max_position_embeddings=4096,
    )
    tables = RotaryEmbedding(config.rotary_dim, config.rotary)(4096, None, torch.device("cuda"))
    times: dict[str, float] = {}
    for fuse in (False, True):
        layer = TransformerLayer(config, 0, TorchBackend(), device="cuda").bfloat16()
        for parameter in layer.parameters():
            torch.nn.init.normal_(parameter, std=0.02)
        buckets = served(layer)
        buckets.reset()
        for module in layer.modules() if not fuse else ():
            if hasattr(module, "sums_weight_gradient"):
                module.sums_weight_gradient = False  # type: ignore[assignment]
        layer.compile(fullgraph=True)
        x = torch.randn(4096, 4, 2048, device="cuda").bfloat16().requires_grad_()
        grad = torch.randn_like(x)
        times["fused" if fuse else "autograd"] = _milliseconds(layer, tables, x, grad)
        buckets.release()
    print({name: round(time, 3) for name, time in times.items()})
    assert times["fused"] < times["autograd"]


def _milliseconds(layer: Any, tables: Any, x: Tensor, grad: Tensor) -> float:
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    for call in range(25):
        if call == 5:
            begin.record()
        layer(x, tables).backward(grad)
        x.grad = None
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) / 20
