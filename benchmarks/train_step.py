"""How fast is a training step through the whole stack: Trainer, MegatronStrategy, GPTModel?

Shapes as in the published Megatron-Core comparisons: (a) dense 1.1B, (b) 8 layers of Llama-3-8B's
width, (c) 8 layers of Qwen3-30B-A3B's (128 experts, of which each token passes 8). Random tokens,
bf16-mixed (bfloat16 weights, float32 main gradients and masters, AdamW), clip 1.0, no recompute.
Prints one JSON line a configuration:

    python benchmarks/train_step.py --shapes a b --compile --out results.json
    python benchmarks/train_step.py --devices 2 --pp 2 --accumulate 8 --schedule zb-v --virtual 2

Whatever has no option of its own is set by `--set`: a field of the strategy's configs
(`--set pipeline.head_cost=0.9 data_parallel.bucket_size=10_000_000`) or of the network
(`--set network.qk_layernorm=True`), several behind one `--set` or each behind its own.

Tokens a second a GPU are the median over `--steps` steps, the device synchronised around each.
FLOPs a token: 6 N_matmul + k L heads head_dim S, k = 12 for the whole score matrix (full), 6 for
what a causal kernel computes; MFU against 989 TFLOP/s. The ceiling is a product of 8192^3 in
bfloat16, measured before. Peak memory is that of the rank that needs most. `host_ms` is the host's
time until all of a step is launched, the median; where the queue of launches is full, it has waited
for the device (a short `--seq` tells the host's own time). `speed.py` runs this beside the peer.

`--mirror 2 --tp 2` runs one rank (`--rank`) of a layout of two alone, the others being its mirror
images (`mirror.py`): computing, launching and memory without communication. Losses are then those
of no training. `--shapes tiny` runs on the CPU too.
"""

import argparse
import contextlib
import gc
import json
import os
import statistics
from dataclasses import fields
from typing import Any

import lightning as L
import torch
import torch._functorch.config
from mirror import mirrored, stage_input
from shapes import RandomTokens
from step_callbacks import Clock, Kernels
from step_options import (
    asked_for,
    build_parser,
    layout_of,
    network_of,
    ranks_of,
    shape_of,
)

from megatron_lightning.callbacks import StepTimeline
from megatron_lightning.config import GPTConfig
from megatron_lightning.config.parallel import ParallelConfig
from megatron_lightning.config.training import OptimizerConfig, SchedulerConfig
from megatron_lightning.models import GPTModel
from megatron_lightning.strategies import MegatronStrategy

H200_BF16_TFLOPS = 989.0


def measure(name: str, args: argparse.Namespace) -> dict[str, Any]:
    """Train `--warm` + `--steps` steps of one shape."""
    shape = shape_of(name, args)
    config, layout = network_of(shape, args), layout_of(args)
    top = ceiling()
    if torch.cuda.is_available():
        gc.collect()  # what the shape before left in cycles
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    clock, kernels = train(shape, config, layout, args)
    if kernels is not None:
        table = kernels.table()
        if args.profile:
            print(table, flush=True)
    return {
        **asked_for(name, shape, layout, args),
        **rates(shape, config, clock, top, args),
        "kernel_busy_share": None if kernels is None else round(kernels.busy_share, 4),
        "peak_gib": round(clock.peak_gib, 2),
        "shared_gib": round(clock.shared_gib, 2),
        "first_loss": clock.losses[0],
        "last_loss": clock.losses[-1],
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
    }


def train(
    shape: dict[str, Any], config: GPTConfig, layout: ParallelConfig, args: argparse.Namespace
) -> tuple[Clock, Kernels | None]:
    """Fit `--warm` + `--steps` steps; what was seen, with the kernels of one step if asked for."""
    clock = Clock()
    kernels = Kernels(args.warm - 1) if args.profile or args.busy else None
    callbacks: list[L.Callback] = [clock] if kernels is None else [clock, kernels]
    if args.timeline:
        last = args.warm + args.steps - 1
        callbacks.append(StepTimeline(last, directory=args.timeline))
    model = GPTModel(
        config,
        OptimizerConfig(lr=1e-4),
        SchedulerConfig(lr_decay_style="constant"),
        backend=args.backend,
    )
    arrives = stage_input(shape, tp=args.tp, cp=args.cp)
    alone = mirrored(ranks=args.mirror, rank=args.rank, arrives=arrives)
    with alone if args.mirror else contextlib.nullcontext():
        trainer = trainer_of(layout, args, callbacks)
        trainer.fit(model, RandomTokens(shape, args.warm + args.steps, args.packed))
    return clock, kernels


def trainer_of(
    layout: ParallelConfig, args: argparse.Namespace, callbacks: list[L.Callback]
) -> L.Trainer:
    """A trainer of this layout, and nothing that is not the step."""
    options = {field.name: getattr(layout, field.name) for field in fields(layout)}
    return L.Trainer(
        strategy=MegatronStrategy(**options),
        accelerator="gpu" if torch.cuda.is_available() else "cpu",
        devices=1 if args.mirror else args.devices,
        num_nodes=args.mirror or 1,
        precision="bf16-mixed",
        max_steps=args.warm + args.steps,
        gradient_clip_val=1.0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=callbacks,
    )


def rates(
    shape: dict[str, Any],
    config: GPTConfig,
    clock: Clock,
    top: float | None,
    args: argparse.Namespace,
) -> dict[str, Any]:
    """Tokens, times and operations of the steps behind `--warm`; `top`: see `ceiling`."""
    ranks, dp = ranks_of(args)
    seconds = sorted(clock.seconds[args.warm :])
    step = statistics.median(seconds)
    tokens = shape["micro"] * shape["accumulate"] * shape["seq"]
    rate = tokens * dp / step / ranks
    tflops = rate * config.flops_per_token(shape["seq"]) / 1e12
    causal = rate * config.flops_per_token(shape["seq"], causal=True) / 1e12
    return {
        "tokens_per_second_per_gpu": round(rate),
        "step_ms": round(1e3 * step, 1),
        "step_ms_p95": round(1e3 * seconds[int(0.95 * (len(seconds) - 1))], 1),
        "host_ms": round(1e3 * statistics.median(clock.host_seconds[args.warm :]), 1),
        "tflops_full": round(tflops, 1),
        "tflops_causal": round(causal, 1),
        "mfu_full": round(tflops / H200_BF16_TFLOPS, 4),
        "mfu_causal": round(causal / H200_BF16_TFLOPS, 4),
        "ceiling_tflops": top and round(top, 1),
        "share_of_ceiling": top and round(tflops / top, 4),
    }


def ceiling() -> float | None:
    """TFLOP/s of a product of 8192^3 in bfloat16, median of 20; None without a GPU."""
    if not torch.cuda.is_available():
        return None
    x, y = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    times = []
    for call in range(25):
        begin.record()
        torch.mm(x, y)
        end.record()
        torch.cuda.synchronize()
        if call >= 5:
            times.append(begin.elapsed_time(end))
    return 2 * 8192**3 / statistics.median(times) / 1e9


def main() -> None:
    """Measure the shapes that were asked for, one JSON line each."""
    args = build_parser(__doc__).parse_args()
    torch._functorch.config.activation_memory_budget = args.memory_budget
    for name in args.shapes:
        result = measure(name, args)
        if int(os.environ.get("LOCAL_RANK", "0")) == 0:
            print(json.dumps(result), flush=True)
            if args.out:
                with open(args.out, "a") as file:
                    file.write(json.dumps(result) + "\n")


if __name__ == "__main__":
    main()
