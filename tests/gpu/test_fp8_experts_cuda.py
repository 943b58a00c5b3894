"""Experts in FP8 on the GPU's own units: numbers against float64, no wait of the host, and what
each part takes.

Run with `pytest tests/gpu/test_fp8_experts_cuda.py -s`; the table is what to look at.
"""

import functools
import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron_lightning.config import (
    DataParallelConfig,
    MoEConfig,
    QuantizationConfig,
    RuntimeConfig,
)
from megatron_lightning.config.training import OptimizerConfig, SchedulerConfig
from megatron_lightning.layers.moe.experts import ExpertLinear, expert_weight_gradient
from megatron_lightning.models.gpt import GPTModel
from megatron_lightning.parallel.axes import MeshAxis
from megatron_lightning.parallel.quantized.experts import RowScaledExperts
from megatron_lightning.parallel.quantized.products import WeightClock
from megatron_lightning.parallel.random import Normal
from megatron_lightning.precision import fp8_casts
from megatron_lightning.precision.fp8 import device_problem
from megatron_lightning.precision.fp8_casts import cast_stack_columns
from megatron_lightning.precision.grouped import ExpertRecipe, can_group
from megatron_lightning.precision.operands import identity
from megatron_lightning.strategies import MegatronStrategy
from tests.gpu.test_fp8_training_cuda import Keep, config
from tests.layout_runs import Batches, Run

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or device_problem(torch.device("cuda")) is not None,
        reason="no CUDA device with FP8 products",
    ),
]

COUNTS: dict[str, list[int]] = {
    "uneven": [0, 1, 7, 33, 0, 200, 15, 0],
    "multiples": [16, 0, 64, 128, 16, 0, 32, 16],
    "one": [256, *[0] * 7],
    "large": [2100, 1, 4097, 0, 17, 2050, 3, 129],
    "none": [0] * 8,
}
LEFT = 5
"""Rows of garbage behind."""


def low(rounds: bool = True) -> RowScaledExperts:
    return RowScaledExperts(
        recipe=ExpertRecipe(simulate=False, rounds_weight_gradient=rounds),
        split="none",
        axis=MeshAxis(name="alone"),
        clock=WeightClock(),
    )


def rounded(x: Tensor) -> Tensor:
    """Each row to E4M3 by the largest power of two that keeps it within 448, in float64."""
    scale = 2.0 ** torch.floor(torch.log2(448 / x.double().abs().amax(-1, keepdim=True)))
    return (x.double() * scale).float().to(torch.float8_e4m3fn).double() / scale


def error(got: Tensor, want: Tensor) -> float:
    """The largest of any row, of its norm."""
    if not want.numel():
        return 0.0
    off = (got.double() - want).norm(dim=-1) / want.norm(dim=-1).clamp(min=1e-30)
    return float(off.max())


@pytest.mark.parametrize("sizes", [(256, (2, 96)), (2048, (2, 768)), (768, (2048,))])
@pytest.mark.parametrize("case", COUNTS)
def test_against_float64_of_rounded_factors(case: str, sizes: tuple[int, tuple[int, ...]]) -> None:
    """Groups of any size, and rows of NaN behind them, in one product."""
    torch.manual_seed(3)
    counts, (inputs, outputs) = COUNTS[case], sizes
    used = sum(counts)
    layer = ExpertLinear(len(counts), inputs, outputs, bias=False, initial=Normal(1.0)).cuda()
    nn.init.normal_(layer.weight, std=0.05)
    layer.bfloat16().quantized_experts = low()
    spread = torch.logspace(-3, 3, used + LEFT, device="cuda")[:, None]
    rows = (torch.randn(used + LEFT, inputs, device="cuda") * spread).bfloat16()
    grad = (torch.randn(used + LEFT, *outputs, device="cuda") * 1e-4).bfloat16()
    rows[used:], grad[used:] = torch.nan, torch.nan
    rows.requires_grad_()
    numbers = torch.tensor(counts, device="cuda")
    assert can_group(rows, len(counts))
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        y = layer(rows, numbers)
        y.backward(grad)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert rows.grad is not None
    assert layer.weight.grad is not None
    off = {"forward": 0.0, "dgrad": 0.0, "wgrad": 0.0}
    begin = 0
    for expert, count in enumerate(counts):
        w = layer.weight[expert].detach().flatten(0, -2)
        x, g = (each.detach()[begin : begin + count] for each in (rows, grad.flatten(1)))
        made = layer.weight.grad[expert].flatten(0, -2)
        if count:
            got = (y[begin : begin + count].flatten(1), rows.grad[begin : begin + count], made)
            want = (
                rounded(x) @ rounded(w).t(),
                rounded(g) @ rounded(w.t()).t(),
                rounded(g.t()) @ rounded(x.t()).t(),
            )
            for name, one, other in zip(off, got, want, strict=True):
                off[name] = max(off[name], error(one, other))
        else:
            assert not made.any()
        begin += count
    print(f"\n{case} {sizes}: largest relative error of a row "
          + ", ".join(f"{name} {value:.1e}" for name, value in off.items()))  # fmt: skip
    assert max(off.values()) < 1e-2  # bfloat16, and fast accumulation


@pytest.mark.parametrize(("inputs", "outputs"), [(14336, 4096), (4096, 28672)])
def test_what_fast_accumulation_loses(inputs: int, outputs: int) -> None:
    """Long sums, beside what E4M3 itself loses (3e-2)."""
    torch.manual_seed(3)
    counts = torch.tensor([300, 4000], device="cuda")
    x, g = (
        torch.randn(int(counts.sum()), size, device="cuda").bfloat16() for size in (inputs, outputs)
    )
    w = torch.randn(2, outputs, inputs, device="cuda").bfloat16()
    recipe = ExpertRecipe(simulate=False)
    operands = {
        "forward": (recipe.tokens(x, "input"), recipe.weight(w)),
        "dgrad": (recipe.tokens(g, "gradient"), recipe.transposed(w)),
    }
    told = []
    for name, (rows, weight) in operands.items():
        assert rows.scale is not None
        assert weight.scale is not None
        got = recipe.product(rows, weight, counts, torch.bfloat16, forward=False)
        want = (rows.values.float() * rows.scale)[:300] @ (
            weight.values[0].float() * weight.scale[0]
        ).t()
        told.append((name, float((got[:300].float() - want).norm() / want.norm())))
    columns = recipe.columns(g, "gradient", counts), recipe.columns(x, "input", counts)
    got = recipe.weight_gradient(*columns, torch.bfloat16)[1].float()
    first, last = (int(end) for end in columns[0].ends)
    factors = [
        each.values[:, first:last].float() * each.scale.view(2, -1, 1)[1] for each in columns
    ]
    want = factors[0] @ factors[1].t()
    told.append(("wgrad", float((got - want).norm() / want.norm())))
    print(f"\nK{inputs} N{outputs}: " + ", ".join(f"{name} {value:.1e}" for name, value in told))
    assert max(value for _, value in told) < 1e-2


@pytest.mark.parametrize("shape", [(3, 304, 80), (8, 1536, 2048), (5, 2048, 768)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_stacked_casts_equal_plain_torch(
    shape: tuple[int, ...], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = torch.randn(shape, device="cuda") * torch.logspace(-3, 3, shape[-1], device="cuda")
    x = x.to(dtype)
    x[1] = 0
    got = cast_stack_columns(x, "e4m3", identity)
    known = cast_stack_columns(x, "e4m3", lambda amax: amax)
    monkeypatch.setattr(fp8_casts, "_by_kernel", lambda x: False)
    want = cast_stack_columns(x, "e4m3", identity)
    for one in (got, known):
        assert torch.equal(one[0].view(torch.uint8), want[0].view(torch.uint8))
        assert torch.equal(one[1], want[1])


MOE = MoEConfig(num_experts=8, router_topk=2, ffn_hidden_size=128, aux_loss_coeff=1e-2)


@functools.cache
def losses(recipe: Any, simulate: bool, layout: str) -> tuple[float, ...]:
    """Of eight steps."""
    options: dict[str, Any] = {
        "plain": {},
        "compiled": {"runtime": RuntimeConfig(compile_layers=True)},
        "zero1": {"data_parallel": DataParallelConfig(sharding="optimizer")},
    }[layout]
    quantization = None
    if recipe is not None:
        quantization = QuantizationConfig(recipe=recipe, simulate=simulate, experts=True)
    small = replace(config(), moe=MOE)
    keep = Keep()
    trainer = L.Trainer(
        strategy=MegatronStrategy(quantization=quantization, micro_batch_size=4, **options),
        accelerator="gpu",
        devices=1,
        precision="bf16-mixed",
        max_steps=8,
        accumulate_grad_batches=2,
        gradient_clip_val=1.0,
        logger=False,
        callbacks=[keep],
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        limit_val_batches=0,
    )
    model = GPTModel(small, OptimizerConfig(lr=1e-3), SchedulerConfig(lr_decay_steps=20))
    run = Run(config=small, steps=8, trainer={"accumulate_grad_batches": 2})
    trainer.fit(model, Batches(run))
    return tuple(keep.losses)


@pytest.mark.parametrize(
    ("recipe", "layout"),
    [
        ("fp8_rowwise", "plain"),
        ("fp8_rowwise", "compiled"),
        ("fp8_rowwise", "zero1"),
        ("fp8_tensorwise", "compiled"),
        ("fp8_delayed", "plain"),
    ],
)
def test_training_follows_bfloat16_and_simulation(recipe: str, layout: str) -> None:
    plain, simulated = losses(None, False, "plain"), losses(recipe, True, "plain")
    real = losses(recipe, False, layout)
    print(f"\n{recipe} {layout}: bf16 {plain[-1]:.4f} fp8 {real[-1]:.4f} sim {simulated[-1]:.4f}")
    for got, same, full in zip(real, simulated, plain, strict=True):
        assert got == pytest.approx(full, rel=1e-2)
        assert got == pytest.approx(same, rel=1e-2)


# ---------------------------------------------------------------------- speed


def milliseconds(call: Callable[[], Any], repeats: int = 10) -> float:
    for _ in range(2):
        call()
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda._sleep(20_000_000)
    begin.record()
    for _ in range(repeats):
        call()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / repeats


SHAPES = {
    "c.fc1": (128, 2048, 1536, 65536),
    "c.fc2": (128, 768, 2048, 65536),
    "mixtral.fc1": (8, 4096, 28672, 16384),
    "mixtral.fc2": (8, 14336, 4096, 16384),
}
"""Experts, input and output features, rows."""


@pytest.mark.alone
@pytest.mark.parametrize("skewed", [False, True])
@pytest.mark.parametrize("name", SHAPES)
def test_what_each_part_takes(name: str, skewed: bool) -> None:
    """A table. Experts' shares of the rows are equal, or fall as 1 / (place + 8)."""
    num, inputs, outputs, rows = SHAPES[name]
    share = 1 / torch.arange(8, num + 8) if skewed else torch.ones(num)
    counts = (share / share.sum() * rows).long()
    counts[0] += rows - counts.sum()
    numbers, ends = counts.cuda(), counts.cumsum(0).int().cuda()
    options: dict[str, Any] = dict(device="cuda", dtype=torch.bfloat16)
    x, g = torch.randn(rows, inputs, **options), torch.randn(rows, outputs, **options)
    w = torch.randn(num, outputs, inputs, **options) * 0.05
    recipe = ExpertRecipe(simulate=False)
    tokens, gradients = recipe.tokens(x, "input"), recipe.tokens(g, "gradient")
    weight, turned = recipe.weight(w), recipe.transposed(w)
    flops = 2 * rows * inputs * outputs

    parts: dict[str, Callable[[], Any]] = {
        "forward bf16": lambda: F.grouped_mm(x, w.transpose(1, 2), offs=ends),
        "forward fp8, cast before": lambda: recipe.product(
            tokens, weight, numbers, torch.bfloat16, forward=True
        ),
        "forward fp8, with its cast": lambda: recipe.product(
            recipe.tokens(x, "input"), weight, numbers, torch.bfloat16, forward=True
        ),
        "dgrad bf16": lambda: F.grouped_mm(g, w, offs=ends),
        "dgrad fp8, cast before": lambda: recipe.product(
            gradients, turned, numbers, torch.bfloat16, forward=False
        ),
        "dgrad fp8, with its cast": lambda: recipe.product(
            recipe.tokens(g, "gradient"), turned, numbers, torch.bfloat16, forward=False
        ),
        "wgrad bf16": lambda: expert_weight_gradient(g, x, w, numbers),
    }
    columns = recipe.columns(g, "gradient", numbers), recipe.columns(x, "input", numbers)
    parts["wgrad fp8, cast before"] = lambda: recipe.weight_gradient(*columns, torch.bfloat16)
    parts["wgrad fp8, with its casts"] = lambda: recipe.weight_gradient(
        recipe.columns(g, "gradient", numbers), recipe.columns(x, "input", numbers), torch.bfloat16
    )
    print(f"\n{name} E{num} K{inputs} N{outputs} {rows} rows, at most {int(counts.max())} of one")
    for label, call in parts.items():
        took = milliseconds(call)
        print(f"  {label:<34} {took:7.3f} ms {flops / took / 1e9:6.0f} TFLOP/s")
    casts: dict[str, tuple[Callable[[], Any], Tensor]] = {
        "cast of tokens": (lambda: recipe.tokens(x, "input"), x),
        "cast of gradients": (lambda: recipe.tokens(g, "gradient"), g),
        "tokens transposed": (lambda: recipe.columns(x, "input", numbers), x),
        "gradients transposed": (lambda: recipe.columns(g, "gradient", numbers), g),
        "cast of weights, once a window": (lambda: recipe.weight(w), w),
        "weights transposed": (lambda: recipe.transposed(w), w),
    }
    for label, (call, matrix) in casts.items():
        took = milliseconds(call)
        print(f"  {label:<34} {took:7.3f} ms {3 * matrix.numel() / took / 1e9:6.2f} TB/s")
    if name == "c.fc1" and not skewed:
        _try_tiles(recipe, w, x, numbers)


def _try_tiles(recipe: ExpertRecipe, w: Tensor, x: Tensor, counts: Tensor) -> None:
    from megatron_lightning.precision.kernels import fp8_stacks as kernels

    names = ("_HEIGHT", "_WIDTH", "_WARPS")
    usual = [getattr(kernels, name) for name in names]
    for tile in itertools.product((64, 128, 256), (32, 64), (4, 8)):
        for field, value in zip(names, tile, strict=True):
            setattr(kernels, field, value)
        weights = milliseconds(lambda: recipe.transposed(w), 3)
        tokens = milliseconds(lambda: recipe.columns(x, "input", counts), 3)
        print("  tiles of {} x {}, {} warps:".format(*tile)
              + f" weights {weights:.3f}, tokens {tokens:.3f} ms")  # fmt: skip
    for field, value in zip(names, usual, strict=True):
        setattr(kernels, field, value)


@pytest.mark.alone
@pytest.mark.parametrize("name", SHAPES)
def test_what_a_window_takes(name: str) -> None:
    """Forward and backward of one linear layer of experts, weights rounded once in a window."""
    num, inputs, outputs, rows = SHAPES[name]
    layer = ExpertLinear(num, inputs, (outputs,), bias=False, initial=Normal(1.0))
    layer.to("cuda", torch.bfloat16)
    nn.init.normal_(layer.weight, std=0.05)
    counts = torch.full((num,), rows // num, device="cuda")
    options: dict[str, Any] = dict(device="cuda", dtype=torch.bfloat16)
    x = torch.randn(rows, inputs, **options, requires_grad=True)
    g = torch.randn(rows, outputs, **options)
    kinds = {"bf16": None, "fp8, wgrad bf16": low(False), "fp8": low()}
    print(f"\n{name} E{num} K{inputs} N{outputs} {rows} rows: milliseconds of a micro-batch")
    for size in (1, 2, 4, 16):
        told = []
        for kind, experts in kinds.items():
            layer.quantized_experts = experts
            window = functools.partial(_window, layer, experts, x, g, counts, size)
            told.append(f"{kind} {milliseconds(window, 3) / size:.3f}")
        print(f"  {size:2} in a window: " + ", ".join(told))


def _window(
    layer: ExpertLinear,
    experts: RowScaledExperts | None,
    x: Tensor,
    g: Tensor,
    counts: Tensor,
    size: int,
) -> None:
    if experts is not None:
        experts.clock.tick()
    for _ in range(size):
        x.grad = layer.weight.grad = None
        layer(x, counts).backward(g)
