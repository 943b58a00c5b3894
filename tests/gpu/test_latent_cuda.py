"""Latent attention and multi-token prediction on a GPU: bfloat16 kernels against float64 formulas,
heads of DeepSeek-V3's sizes, and a few steps of training.

pytest -m gpu tests/gpu/test_latent_cuda.py -rP
"""

import time

import lightning as L
import pytest
import torch
from torch import Tensor

from megatron_lightning.config import GPTConfig, LatentAttentionConfig, RuntimeConfig
from megatron_lightning.layers import RotaryEmbedding, SequenceInfo, TorchBackend
from megatron_lightning.layers.latent_attention import LatentAttention
from megatron_lightning.models import GPTModel, preset_config
from megatron_lightning.strategies import MegatronStrategy
from tests.hf_models import Batches

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]
LENGTH, BATCH, HIDDEN = 1024, 2, 512


def config(window: int = 0) -> GPTConfig:
    preset = preset_config("deepseek-v3")
    return GPTConfig(
        vocab_size=512,
        num_layers=2,
        hidden_size=HIDDEN,
        num_attention_heads=8,
        window_size=window,
        rotary=preset.rotary,
        latent_attention=LatentAttentionConfig(q_lora_rank=384, kv_lora_rank=256),
    )


def gradients(
    layer: LatentAttention, hidden: Tensor, made: GPTConfig, sequence: SequenceInfo | None
) -> list[Tensor]:
    """Output, gradient of the input, gradients of all weights."""
    tables = RotaryEmbedding(made.rotary_dim, made.rotary)(LENGTH, None, hidden.device)
    x = hidden.clone().requires_grad_()
    out = layer(x, tables, sequence)
    out.backward(hidden.flip(0))
    return [out.detach(), x.grad, *(p.grad for p in layer.parameters())]


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("window", [0, 128])
def test_fused_cores(window: int, packed: bool) -> None:
    """Queries and keys of 192, values of 128; the written-out core in float64 is the oracle."""
    made = config(window)
    sequence = SequenceInfo(((300, 724), (1024,))) if packed else None
    torch.manual_seed(0)
    exact = LatentAttention(made, 0, TorchBackend(attention="reference"), device="cuda").double()
    for parameter in exact.parameters():
        torch.nn.init.normal_(parameter, mean=float(parameter.dim() == 1), std=0.04)
    fused = LatentAttention(made, 0, TorchBackend(), device="cuda").bfloat16()
    with torch.no_grad():
        for mine, theirs in zip(fused.parameters(), exact.parameters(), strict=True):
            mine.copy_(theirs)
            theirs.copy_(mine)
    hidden = torch.randn(LENGTH, BATCH, HIDDEN, device="cuda").bfloat16()
    wanted = gradients(exact, hidden.double(), made, sequence)
    found = gradients(fused, hidden, made, sequence)
    for got, want in zip(found, wanted, strict=True):
        error = (got.double() - want).norm() / want.norm()
        print(f"{tuple(want.shape)}: {float(error):.1e}")
        assert error < 2e-2  # a few roundings of bfloat16


def batch() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(5)
    tokens = torch.randint(0, 257, (4, 65), generator=generator)
    return {"tokens": tokens[:, :-1], "labels": tokens[:, 1:], "loss_mask": torch.ones(4, 64)}


@pytest.mark.parametrize("compiled", [False, True])
def test_training(compiled: bool) -> None:
    """A model with everything learns a batch by heart in bfloat16, and what it logs is there."""
    model = GPTModel(preset_config("tiny-deepseek"))
    strategy = MegatronStrategy(runtime=RuntimeConfig(compile_layers=compiled))
    trainer = L.Trainer(
        strategy=strategy,
        accelerator="gpu",
        devices=1,
        precision="bf16-mixed",
        max_steps=20,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    begun = time.perf_counter()
    trainer.fit(model, Batches(*[batch()] * 20))  # type: ignore[arg-type]
    metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
    print(f"{time.perf_counter() - begun:.1f} s, {metrics}")
    assert metrics["train_loss"] < 5.4  # 5.55 at first
    assert metrics["mtp_1_loss"] < 5.5
