"""What a linear layer in FP8 spends its time on: largest values, casts, products, and the host.

    python benchmarks/fp8_linear.py --shapes a b
    python benchmarks/fp8_linear.py --products   # which products with block scales there are
    python benchmarks/fp8_linear.py --algorithms --shapes b
    python benchmarks/fp8_casts.py               # the cast by size of tile, and more

Shapes are those of `train_step.py`. Milliseconds are the mean of calls one after the other, host
microseconds the time until such a call returns. Weights are rounded before, as in all micro-batches
of a window but the first.
"""

import argparse
import functools
import itertools
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from megatron_lightning.config.quantization import REAL_RECIPES
from megatron_lightning.layers.linear import Linear
from megatron_lightning.parallel.axes import MeshAxis
from megatron_lightning.parallel.quantized.products import QuantizedProducts, WeightClock
from megatron_lightning.parallel.random import Normal
from megatron_lightning.precision import cublas_lt, fp8_casts
from megatron_lightning.precision.accumulate import add_to_sum_
from megatron_lightning.precision.delayed import DelayedScaling
from megatron_lightning.precision.fp8 import FP8BlockRecipe, FP8RowRecipe, FP8TensorRecipe
from megatron_lightning.precision.operands import Operand, Recipe, Role

SHAPES = {
    "a.qkv": (16384, 2048, 3072),
    "a.o": (16384, 2048, 2048),
    "a.fc1": (16384, 2048, 16384),
    "a.fc2": (16384, 8192, 2048),
    "b.qkv": (8192, 4096, 6144),
    "b.o": (8192, 4096, 4096),
    "b.fc1": (8192, 4096, 28672),
    "b.fc2": (8192, 14336, 4096),
}
"""Tokens, input and output features."""


def timed(call: Callable[[], Any], repeats: int = 20) -> tuple[float, float]:
    """(milliseconds on the device, microseconds of the host) of one call."""
    for _ in range(3):
        call()
    torch.cuda.synchronize()
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda._sleep(20_000_000)  # the host is ahead
    begin.record()
    start = time.perf_counter()
    for _ in range(repeats):
        call()
    host = time.perf_counter() - start
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / repeats, host / repeats * 1e6


def said(
    label: str, milliseconds: float, host: float, *, bytes_: float = 0, flops: float = 0
) -> None:
    """One line of the table."""
    told = f"  {label:<34} {milliseconds:7.3f} ms  host {host:5.0f} us"
    if bytes_:
        told += f"  {bytes_ / milliseconds / 1e9:5.2f} TB/s"
    if flops:
        told += f"  {flops / milliseconds / 1e9:6.0f} TFLOP/s"
    print(told, flush=True)


def random(rows: int, columns: int, std: float = 1.0) -> Tensor:
    return torch.randn(rows, columns, device="cuda", dtype=torch.bfloat16) * std


def recipes() -> Iterator[tuple[str, Recipe | None, DelayedScaling | None]]:
    """Name, recipe and what keeps its history."""
    delayed = DelayedScaling(
        ["layer"], gradient="e5m2", length=16, margin=0, device=torch.device("cuda")
    )
    for name in ("bf16", *REAL_RECIPES):
        if name == "bf16":
            yield name, None, None
        elif name == "fp8_delayed":
            yield name, FP8TensorRecipe("e5m2", delayed.recipe("layer")), delayed
        elif name == "fp8_rowwise":
            yield name, FP8RowRecipe("e5m2"), None
        elif name == "fp8_blockwise":
            yield name, FP8BlockRecipe("e4m3"), None
        else:
            yield name, FP8TensorRecipe("e5m2"), None


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


def linear(name: str) -> None:
    """Parts and whole of one layer, by recipe."""
    tokens, inputs, outputs = SHAPES[name]
    flops = 2.0 * tokens * inputs * outputs
    print(f"{name}: {tokens} tokens, {inputs} -> {outputs}")
    layer = Linear(inputs, outputs, bias=False, initial=Normal(1.0), device="cuda").bfloat16()
    nn.init.normal_(layer.weight, std=0.02)
    x = random(tokens, inputs).view(tokens, 1, inputs).requires_grad_()
    grad = random(tokens, outputs).view(tokens, 1, outputs)

    def once() -> None:
        x.grad = layer.weight.grad = None
        layer(x).backward(grad)

    plain = 0.0
    for label, recipe, delayed in recipes():
        layer.quantized = None if recipe is None else products(recipe)
        if delayed is not None:
            once()
            delayed.finish_window(lambda amax: amax)
        whole, host = timed(once)
        plain = plain or whole
        said(f"{label}, whole ({plain / whole:.2f} x bf16)", whole, host, flops=3 * flops)
        if recipe is None:
            continue
        rows, of_y = x.detach().view(tokens, inputs), grad.view(tokens, outputs)
        xs = recipe.pair(rows, "input")
        ws = recipe.pair(layer.weight.detach(), "weight")
        gs = recipe.pair(of_y, "gradient")
        roles: tuple[tuple[Tensor, Role], ...] = ((rows, "input"), (of_y, "gradient"))
        for each, role in roles:
            took = timed(functools.partial(recipe.pair, each, role))
            said(f"    operands of the {role}", *took, bytes_=each.numel() * 4.0)
        factors: tuple[tuple[str, Operand | None, Operand | None, bool], ...] = (
            ("forward", xs.itself, ws.itself, True),
            ("dgrad", gs.itself, ws.transposed, False),
            ("wgrad", gs.transposed, xs.transposed, False),
        )
        for part, a, b, forward in factors:
            assert a is not None
            assert b is not None
            call = functools.partial(recipe.product, a, b, torch.bfloat16, forward=forward)
            said(f"    {part}", *timed(call), flops=flops)
        _sums(recipe, gs.transposed, xs.transposed, flops)
    del layer.quantized


def _sums(recipe: Recipe, a: Operand | None, b: Operand | None, flops: float) -> None:
    """A weight's gradient and its float32 sum: the first of a window, and the others."""
    assert a is not None
    assert b is not None
    total = torch.zeros(len(a.values), len(b.values), device="cuda")

    def first() -> None:
        recipe.product(a, b, torch.float32, forward=False, out=total)

    def apart() -> None:
        add_to_sum_(total, recipe.product(a, b, torch.bfloat16, forward=False))

    said("    wgrad, written in float32", *timed(first), flops=flops)
    said("    wgrad, added in a pass of its own", *timed(apart), flops=flops)
    if recipe.add_product_(total, a, b):
        call = functools.partial(recipe.add_product_, total, a, b)
        said("    wgrad, added within the product", *timed(call), flops=flops)


def parts() -> None:
    """Kernels one by one."""
    one = torch.ones((), device="cuda")
    for rows, columns in ((8192, 28672), (16384, 2048)):
        print(f"kernels, {rows} x {columns}")
        x = random(rows, columns)
        size = float(x.numel())
        y = torch.empty_like(x)
        said("copy", *timed(functools.partial(y.copy_, x)), bytes_=4 * size)
        said("largest", *timed(functools.partial(fp8_casts.largest_of, x)), bytes_=2 * size)
        said("row largest", *timed(functools.partial(fp8_casts.row_largest_of, x)), bytes_=2 * size)
        said("scales", *timed(lambda: fp8_casts.scales_of(one, "e4m3")))
        for kinds, factor in (((True, True), 4), ((True, False), 3), ((False, True), 3)):
            call = functools.partial(fp8_casts.cast_both, x, one, "e5m2", kinds)
            said(f"cast, itself and transposed {kinds}", *timed(call), bytes_=factor * size)
        scale = torch.ones(rows, 1, device="cuda")
        call = functools.partial(fp8_casts.cast_rows, x, scale, "e5m2")
        said("cast rows", *timed(call), bytes_=3 * size)
        call = functools.partial(fp8_casts.scale_rows, x, "e5m2")
        said("largest and cast of rows", *timed(call), bytes_=3 * size)
        amax = fp8_casts.column_largest_of(x)
        call = functools.partial(fp8_casts.column_largest_of, x)
        said("column largest", *timed(call), bytes_=2 * size)
        call = functools.partial(fp8_casts.cast_columns, x, amax, "e5m2")
        said("cast of columns, transposed", *timed(call), bytes_=3 * size)
        for square in (False, True):
            call = functools.partial(
                fp8_casts.cast_blocks, x, "e4m3", square=square, wanted=(True, True)
            )
            said(f"cast of blocks, square {square}", *timed(call), bytes_=4 * size)
        said("transposed copy by torch", *timed(x.t().contiguous), bytes_=4 * size)


def algorithms(name: str) -> None:
    """A layer's products by each algorithm that cuBLAS proposes, after what torch takes."""
    tokens, inputs, outputs = SHAPES[name]
    kinds = {
        "forward": (tokens, outputs, inputs, "e4m3", torch.bfloat16, False, True),
        "dgrad": (tokens, inputs, outputs, "e5m2", torch.bfloat16, False, False),
        "wgrad, first": (outputs, inputs, tokens, "e5m2", torch.float32, False, False),
        "wgrad, added": (outputs, inputs, tokens, "e5m2", torch.float32, True, False),
    }
    one = torch.ones((), device="cuda")
    stream = torch.cuda.current_stream().cuda_stream
    for part, (rows, columns, summed, format_, dtype, add, fast) in kinds.items():
        flops = 2.0 * rows * columns * summed
        a = fp8_casts.cast_both(random(rows, summed), one, format_, (True, False))[0]
        b = fp8_casts.cast_both(random(columns, summed), one, "e4m3", (True, False))[0]
        assert a is not None
        assert b is not None
        out = torch.zeros(rows, columns, device="cuda", dtype=dtype)
        recipe = FP8TensorRecipe("e5m2")
        factors = Operand(a, one), Operand(b, one)
        if not add:
            call = functools.partial(recipe.product, *factors, dtype, forward=fast, out=out)
            said(f"{name} {part}, torch", *timed(call, 30), flops=flops)
        for rank in range(8):
            try:
                product = cublas_lt.Product(
                    cublas_lt.library(),
                    cublas_lt.handle(torch.cuda.current_device()),
                    (rows, columns, summed),
                    (a.dtype, b.dtype),
                    (256, 256, 256),
                    result=dtype,
                    add=add,
                    fast=fast,
                    rank=rank,
                )
            except cublas_lt.CublasError:
                break
            call = functools.partial(product, out, a, one, b, one, stream)
            said(f"{name} {part}, algorithm {rank}", *timed(call, 30), flops=flops)


def block_scales(rows: int, columns: int, kind: str) -> tuple[Tensor, Tensor]:
    """Random ones of 1x128 or 128x128 as products take them, and spread over the matrix."""
    blocks = -(-columns // 128)
    if kind == "1x128":
        held = torch.rand(blocks, rows, device="cuda") + 0.5
        return held.t(), held.t().repeat_interleave(128, 1)[:, :columns]
    held = torch.rand(-(-rows // 128), -(-blocks // 4) * 4, device="cuda") + 0.5
    spread = held[:, :blocks].repeat_interleave(128, 0).repeat_interleave(128, 1)
    return held, spread[:rows, :columns]


def block_product(
    a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, kinds: tuple[str, str], **options: Any
) -> Callable[[], Tensor]:
    """A call of the product a b^T with scales of these kinds."""
    from torch.nn.functional import ScalingType, scaled_mm

    types = {"1x128": ScalingType.BlockWise1x128, "128x128": ScalingType.BlockWise128x128}
    left, right = kinds
    turned = scale_b.t() if right == "128x128" else scale_b
    return functools.partial(
        scaled_mm, a, b.t(), scale_a, types[left], turned, types[right], **options
    )


def block_products() -> None:
    """Products with a scale for each 1x128 or 128x128: which there are, their error and speed."""
    block_errors()
    block_speeds()


def block_errors() -> None:
    """Which products there are, and their error."""
    for tokens, kinds, (of_a, of_b), dtype, fast in itertools.product(
        (512, 509, 3, 528),
        (("1x128", "128x128"), ("1x128", "1x128"), ("128x128", "1x128"), ("128x128", "128x128")),
        (("e4m3fn", "e4m3fn"), ("e5m2", "e4m3fn"), ("e4m3fn", "e5m2")),
        (torch.bfloat16, torch.float32, torch.float16),
        (False, True),
    ):
        if tokens != 512 and (dtype is torch.float16 or of_b == "e5m2" or fast):
            continue
        a, b = random(tokens, 384), random(272, 384)
        a, b = (each.to(getattr(torch, f"float8_{kind}")) for each, kind in ((a, of_a), (b, of_b)))
        left, right = kinds
        scale_a, all_a = block_scales(tokens, 384, left)
        scale_b, all_b = block_scales(272, 384, right)
        want = (a.float() * all_a) @ (b.float() * all_b).t()
        call = block_product(a, b, scale_a, scale_b, kinds, output_dtype=dtype, use_fast_accum=fast)
        label = f"  {tokens} x 384 x 272, {left} x {right}, {of_a} x {of_b}, {dtype}, fast {fast}"
        print(f"{label}: {outcome(call, want)}", flush=True)


def block_speeds() -> None:
    """Times of the products of a linear layer, in the shapes of the other tables."""
    for name, (tokens, inputs, outputs) in SHAPES.items():
        for kinds in (("1x128", "128x128"), ("1x128", "1x128")):
            for label, (m, k, n) in {
                "forward": (tokens, inputs, outputs),
                "dgrad": (tokens, outputs, inputs),
                "wgrad": (outputs, tokens, inputs),
            }.items():
                left, right = kinds
                a, b = random(m, k).to(torch.float8_e4m3fn), random(n, k).to(torch.float8_e4m3fn)
                scale_a, scale_b = block_scales(m, k, left)[0], block_scales(n, k, right)[0]
                call = block_product(a, b, scale_a, scale_b, kinds)
                try:
                    said(f"{name} {label} {left} x {right}", *timed(call), flops=2.0 * m * k * n)
                except (RuntimeError, ValueError) as error:
                    print(f"  {name} {label} {left} x {right}: {str(error).splitlines()[0]}")


def outcome(call: Callable[[], Tensor], want: Tensor) -> str:
    """The result's relative error, or how the product was refused."""
    try:
        got = call().float()
        torch.cuda.synchronize()
    except (RuntimeError, ValueError) as error:
        return str(error).splitlines()[0][:160]
    near = float((got - want).norm() / want.norm())
    return f"{near:.1e}" if near < 5e-3 else f"WRONG {near:.1e}"


def main() -> None:
    """Print tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--shapes", nargs="*", default=["a", "b"], help="beginnings of names")
    parser.add_argument("--products", action="store_true", help="products with scales of blocks")
    parser.add_argument("--algorithms", action="store_true", help="cuBLAS's, product by product")
    args = parser.parse_args()
    torch.manual_seed(0)
    if args.algorithms:
        for name in SHAPES:
            if name.startswith(tuple(args.shapes)):
                algorithms(name)
        return
    parts()
    for name in SHAPES:
        if name.startswith(tuple(args.shapes)):
            linear(name)
    if args.products:
        block_products()


if __name__ == "__main__":
    main()
