"""Training on the GPU: FP8 on its own units and float16, against bfloat16 and simulation, and exact
resume with delayed scaling.

Run with `pytest tests/gpu/test_fp8_training_cuda.py -s`.
"""

import functools
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor

from megatron_lightning.config import GPTConfig, QuantizationConfig, RuntimeConfig
from megatron_lightning.config.training import OptimizerConfig, SchedulerConfig
from megatron_lightning.models.gpt import GPTModel
from megatron_lightning.precision.fp8 import device_problem
from megatron_lightning.strategies import MegatronStrategy
from tests.layout_runs import Batches, Run

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or device_problem(torch.device("cuda")) is not None,
        reason="no CUDA device with FP8 products",
    ),
]


def config() -> GPTConfig:
    return GPTConfig(
        vocab_size=512,
        num_layers=4,
        hidden_size=256,
        num_attention_heads=4,
        num_query_groups=2,
        ffn_hidden_size=512,
    )


class Keep(L.Callback):
    def __init__(self) -> None:
        self.losses: list[float] = []

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, *_: Any) -> None:
        self.losses.append(float(outputs["loss"]))


def fit(
    quantization: QuantizationConfig | None,
    *,
    steps: int = 8,
    precision: Any = "bf16-mixed",
    folder: str = "",
    resume: str | None = None,
    accumulate: int = 1,
    **options: Any,
) -> tuple[list[float], dict[str, Tensor]]:
    torch.use_deterministic_algorithms(False)
    model = GPTModel(
        config(),
        OptimizerConfig(lr=1e-3),
        SchedulerConfig(lr_decay_steps=20),
        attention="reference",  # deterministic
    )
    keep = Keep()
    callbacks: list[L.Callback] = [keep]
    if folder:
        callbacks.append(
            L.pytorch.callbacks.ModelCheckpoint(  # type: ignore[attr-defined]
                folder, filename="{step}", every_n_train_steps=4, save_top_k=-1
            )
        )
    trainer = L.Trainer(
        strategy=MegatronStrategy(quantization=quantization, micro_batch_size=4, **options),
        accelerator="gpu",
        devices=1,
        precision=precision,
        max_steps=steps,
        accumulate_grad_batches=accumulate,
        gradient_clip_val=1.0,
        logger=False,
        callbacks=callbacks,
        enable_checkpointing=bool(folder),
        enable_progress_bar=False,
        enable_model_summary=False,
        limit_val_batches=0,
    )
    run = Run(config=config(), steps=steps, trainer={"accumulate_grad_batches": accumulate})
    trainer.fit(model, Batches(run), ckpt_path=resume)
    final = {n: p.detach().float().cpu() for n, p in model.named_parameters()}
    return keep.losses, final


def test_resume_with_delayed_scaling_is_bitwise(tmp_path: Path) -> None:
    quantization = QuantizationConfig(recipe="fp8_delayed", amax_history_length=16)
    losses, final = fit(quantization, folder=str(tmp_path))
    rest, again = fit(quantization, resume=str(tmp_path / "step=4.ckpt"))
    assert rest == losses[4:]
    for name, value in final.items():
        assert torch.equal(value, again[name]), name


@functools.cache
def _losses(recipe: Any, simulate: bool) -> tuple[float, ...]:
    quantization = None if recipe is None else QuantizationConfig(recipe=recipe, simulate=simulate)
    return tuple(fit(quantization, accumulate=2)[0])


def assert_training_follows(recipe: Any, *, compiled: bool) -> None:
    plain, simulated = _losses(None, False), _losses(recipe, True)
    runtime = RuntimeConfig(compile_layers=compiled)
    real, _ = fit(QuantizationConfig(recipe=recipe), accumulate=2, runtime=runtime)
    print(f"\n{recipe} compiled={compiled}: bf16 {plain[-1]:.4f} fp8 {real[-1]:.4f}"
          f" simulated {simulated[-1]:.4f}")  # fmt: skip
    for got, same, full in zip(real, simulated, plain, strict=True):
        assert got == pytest.approx(full, rel=1e-2)
        assert got == pytest.approx(same, rel=1e-2)


@pytest.mark.parametrize("recipe", ["fp8_delayed", "fp8_tensorwise", "fp8_rowwise"])
def test_training_follows_bfloat16_and_simulation(recipe: str) -> None:
    assert_training_follows(recipe, compiled=False)


def test_float16_trains_on_the_gpu() -> None:
    plain, _ = fit(None)
    half, _ = fit(None, precision="16-mixed")
    print(f"\nbf16 {plain[-1]:.4f} fp16 {half[-1]:.4f}")
    # After these few steps at a high rate; measured on an H200: 0.8 % apart. Over 300 steps of real
    # text benchmarks/low_precision.py asks for 0.5 %.
    assert half[-1] == pytest.approx(plain[-1], rel=1.5e-2)


def test_training_in_compiled_layers_follows_too() -> None:
    """Last: compiling takes most of a minute."""
    assert_training_follows("fp8_delayed", compiled=True)
