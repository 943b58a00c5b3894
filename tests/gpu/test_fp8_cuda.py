"""FP8 on the GPU's own units: numbers against simulation and bfloat16, training, exact resume with
delayed scaling, and the speed of a linear layer.

Run with `pytest tests/gpu/test_fp8_cuda.py -s`; the tables are what to look at.
"""

from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn

from megatron_lightning.config import GPTConfig, QuantizationConfig, RuntimeConfig
from megatron_lightning.config.training import OptimizerConfig, SchedulerConfig
from megatron_lightning.layers.linear import Linear
from megatron_lightning.models.gpt import GPTModel
from megatron_lightning.parallel.mesh import MeshAxis
from megatron_lightning.parallel.quantized import QuantizedProducts, WeightClock
from megatron_lightning.parallel.random import Normal
from megatron_lightning.precision import fp8_casts
from megatron_lightning.precision.delayed import DelayedScaling
from megatron_lightning.precision.formats import (
    FP8_DTYPES,
    FP8_MAX,
    cast_fp8,
    power_of_two_scale,
)
from megatron_lightning.precision.fp8 import FP8RowRecipe, FP8TensorRecipe, device_problem
from megatron_lightning.precision.operands import Recipe, RowRecipe, TensorRecipe
from megatron_lightning.strategies import MegatronStrategy
from tests.layout_runs import Batches, Run

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or device_problem(torch.device("cuda")) is not None,
        reason="no CUDA device with FP8 products",
    ),
]


def products(recipe: Recipe) -> QuantizedProducts:
    axis = MeshAxis(name="alone")
    return QuantizedProducts(
        recipe=recipe,
        split="none",
        tensor_axis=axis,
        context_axis=axis,
        splits_sequence=False,
        clock=WeightClock(),
    )


def bits(x: Tensor) -> Tensor:
    return x.view(torch.uint8)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("name", ["e4m3", "e5m2"])
@pytest.mark.parametrize("shape", [(512, 256), (509, 272), (3, 64), (1, 16), (130, 4100)])
def test_kernels_give_what_plain_torch_gives(
    shape: tuple[int, int], name: str, dtype: torch.dtype
) -> None:
    """Casts, transposes, largest values and scales, bitwise; odd sizes, every magnitude."""
    torch.manual_seed(1)
    x = (torch.randn(shape) * torch.randn(shape).mul(4).exp2()).to(dtype)
    device = x.cuda()
    amax = fp8_casts.largest_of(device)
    assert amax.item() == x.abs().max().item()
    scale, inverse = fp8_casts.scales_of(amax, name)
    wanted = power_of_two_scale(x.abs().max().float(), FP8_MAX[name])
    assert scale.item() == wanted.item() == 1 / inverse.item()
    for factor in (scale, scale * 64):  # the second one saturates
        seen = torch.zeros((), device="cuda")
        values, turned = fp8_casts.cast_both(device, factor, name, (True, True), seen)
        want = cast_fp8(x.float() * factor.cpu(), name)
        assert values is not None
        assert turned is not None
        assert torch.equal(bits(values).cpu(), bits(want))
        assert torch.equal(bits(turned).cpu()[:, : shape[0]], bits(want).t())
        assert turned.shape[1] % 16 == 0
        assert not bits(turned)[:, shape[0] :].any()
        assert seen.item() == amax.item()
    rows = fp8_casts.row_largest_of(device)
    assert torch.equal(rows.cpu(), x.abs().amax(dim=1, keepdim=True).float())
    row_scale, _ = fp8_casts.scales_of(rows, name)
    cast = fp8_casts.cast_rows(device, row_scale, name)
    want = cast_fp8(x.float() * row_scale.cpu(), name)
    assert torch.equal(bits(cast).cpu()[:, : shape[1]], bits(want))


@pytest.mark.parametrize("bad", [torch.inf, -torch.inf, torch.nan])
def test_what_is_not_finite_stays_so(bad: float) -> None:
    x = torch.ones(64, 64, device="cuda", dtype=torch.bfloat16)
    x[3, 5] = bad
    assert not fp8_casts.largest_of(x).isfinite()
    one = torch.ones((), device="cuda")
    for name in FP8_DTYPES:
        values, turned = fp8_casts.cast_both(x, one, name, (True, True), None)
        assert values is not None
        assert turned is not None
        assert (~values.float().isfinite()).nonzero().tolist() == [[3, 5]]
        assert (~turned.float().isfinite()).nonzero().tolist() == [[5, 3]]
    for recipe in (FP8TensorRecipe("e5m2"), FP8RowRecipe("e5m2")):
        pair = recipe.pair(x, "gradient")
        assert pair.itself is not None
        y = recipe.product(pair.itself, pair.itself, torch.bfloat16, forward=True)
        assert not y[3].isfinite().any()


def gradients(layer: Linear, x: Tensor, grad: Tensor) -> list[Tensor]:
    x = x.detach().clone().requires_grad_()
    layer.zero_grad()
    y = layer(x)
    y.backward(grad)
    assert x.grad is not None
    assert layer.weight.grad is not None
    return [y.detach(), x.grad, layer.weight.grad.clone()]


RECIPES = {
    "tensorwise": (FP8TensorRecipe, TensorRecipe),
    "rowwise": (FP8RowRecipe, RowRecipe),
}


@pytest.mark.parametrize("tokens", [512, 509, 3])
@pytest.mark.parametrize("recipe", RECIPES)
def test_a_linear_gives_what_simulation_gives(recipe: str, tokens: int) -> None:
    """C28: token counts that products of FP8 can't take; the same numbers as simulation but for
    the order of sums, and near those of bfloat16.
    """
    torch.manual_seed(2)
    layer = Linear(1024, (2, 768), bias=True, initial=Normal(1.0), device="cuda").bfloat16()
    nn.init.normal_(layer.weight, std=0.02)
    nn.init.normal_(layer.bias)  # type: ignore[arg-type]
    x = torch.randn(tokens, 1, 1024, device="cuda", dtype=torch.bfloat16)
    grad = torch.randn(tokens, 1, 2, 768, device="cuda", dtype=torch.bfloat16) * 1e-4
    plain = gradients(layer, x, grad)
    real_class, simulated_class = RECIPES[recipe]
    layer.quantized = products(real_class("e5m2"))
    real = gradients(layer, x, grad)
    layer.quantized = products(simulated_class("e5m2"))
    simulated = gradients(layer, x, grad)
    print(f"\n{recipe}, {tokens} tokens: product, against simulation, against bfloat16")
    # Products are rounded to bfloat16 (4e-3); fast accumulation keeps 14 bits of partial sums in
    # the forward product.
    for name, got, same, full in zip(("y", "dx", "dw"), real, simulated, plain, strict=True):
        near = float((got.float() - same.float()).norm() / same.float().norm())
        far = float((got.float() - full.float()).norm() / full.float().norm())
        print(f"  {name:<3} {near:.2e}  {far:.2e}")
        assert near < 5e-3
        assert far < 8e-2


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


@pytest.mark.parametrize("recipe", ["fp8_tensorwise", "fp8_rowwise", "fp8_delayed"])
@pytest.mark.parametrize("compiled", [False, True])
def test_training_follows_bfloat16_and_simulation(recipe: Any, compiled: bool) -> None:
    runtime = RuntimeConfig(compile_layers=compiled)
    plain, _ = fit(None, accumulate=2)
    real, _ = fit(QuantizationConfig(recipe=recipe), accumulate=2, runtime=runtime)
    simulated, _ = fit(QuantizationConfig(recipe=recipe, simulate=True), accumulate=2)
    print(f"\n{recipe} compiled={compiled}: bf16 {plain[-1]:.4f} fp8 {real[-1]:.4f}"
          f" simulated {simulated[-1]:.4f}")  # fmt: skip
    for got, same, full in zip(real, simulated, plain, strict=True):
        assert got == pytest.approx(full, rel=1e-2)
        assert got == pytest.approx(same, rel=1e-2)


def test_float16_trains_on_the_gpu() -> None:
    plain, _ = fit(None)
    half, _ = fit(None, precision="16-mixed")
    print(f"\nbf16 {plain[-1]:.4f} fp16 {half[-1]:.4f}")
    assert half[-1] == pytest.approx(plain[-1], rel=5e-3)


@pytest.mark.parametrize("simulate", [False, True])
def test_resume_with_delayed_scaling_is_bitwise(simulate: bool, tmp_path: Path) -> None:
    quantization = QuantizationConfig(
        recipe="fp8_delayed", amax_history_length=16, simulate=simulate
    )
    losses, final = fit(quantization, folder=str(tmp_path))
    rest, again = fit(quantization, resume=str(tmp_path / "step=4.ckpt"))
    assert rest == losses[4:]
    for name, value in final.items():
        assert torch.equal(value, again[name]), name


def _milliseconds(layer: Linear, x: Tensor, grad: Tensor, repeats: int = 10) -> float:
    def once() -> None:
        x.grad = layer.weight.grad = None
        layer(x).backward(grad)

    for _ in range(3):
        once()
    times = []
    for _ in range(repeats):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()  # type: ignore[no-untyped-call]
        once()
        end.record()  # type: ignore[no-untyped-call]
        end.synchronize()
        times.append(start.elapsed_time(end))
    return sorted(times)[repeats // 2]


def test_speed_of_a_linear() -> None:
    """Forward and both gradients at 8192 tokens, 4096 -> 28672, weights rounded before."""
    tokens, inputs, outputs = 8192, 4096, 28672
    layer = Linear(inputs, outputs, bias=False, initial=Normal(1.0), device="cuda").bfloat16()
    nn.init.normal_(layer.weight, std=0.02)
    x = torch.randn(tokens, 1, inputs, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    grad = torch.randn(tokens, 1, outputs, device="cuda", dtype=torch.bfloat16)
    flops = 3 * 2 * tokens * inputs * outputs
    delayed = DelayedScaling(
        ["layer"], gradient="e5m2", length=16, margin=0, device=torch.device("cuda")
    )
    kinds: dict[str, Recipe | None] = {
        "bf16": None,
        "fp8_tensorwise": FP8TensorRecipe("e5m2"),
        "fp8_delayed": FP8TensorRecipe("e5m2", delayed.recipe("layer")),
        "fp8_rowwise": FP8RowRecipe("e5m2"),
    }
    times = {}
    print("\nlinear, T 8192, K 4096, N 28672, forward + backward")
    for name, recipe in kinds.items():
        layer.quantized = None if recipe is None else products(recipe)
        if name == "fp8_delayed":
            layer(x).backward(grad)
            delayed.finish_window(lambda amax: amax)
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        times[name] = _milliseconds(layer, x, grad)
        peak = torch.cuda.max_memory_allocated() / 2**30
        print(
            f"  {name:<15} {times[name]:6.2f} ms  {flops / times[name] / 1e9:6.0f} TFLOP/s"
            f"  {times['bf16'] / times[name]:.2f} x bf16  peak {peak:.2f} GiB"
        )
    kernels = {
        "largest": lambda: fp8_casts.largest_of(grad),
        "cast + transpose": lambda: fp8_casts.cast_both(
            grad.view(tokens, outputs), torch.ones((), device="cuda"), "e5m2", (True, True), None
        ),
    }
    for name, call in kernels.items():
        call()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()  # type: ignore[no-untyped-call]
        for _ in range(10):
            call()
        end.record()  # type: ignore[no-untyped-call]
        end.synchronize()
        took = start.elapsed_time(end) / 10
        moved = grad.numel() * (2 if name == "largest" else 4)
        print(f"  {name} of the gradient: {took:.3f} ms, {moved / took / 1e9:.2f} TB/s")
    assert times["bf16"] / times["fp8_tensorwise"] >= 1.6
