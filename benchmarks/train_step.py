"""How fast is a training step through the whole stack: Trainer, MegatronStrategy, GPTModel?

Shapes as in the published Megatron-Core comparisons: (a) dense 1.1B, (b) 8 layers of Llama-3-8B's
width, (c) 8 layers of Qwen3-30B-A3B's (128 experts, of which each token passes 8). Random tokens,
bf16-mixed (bfloat16 weights, float32 main gradients and masters, AdamW), clip 1.0, no recompute.
Prints one JSON line a configuration:

    python benchmarks/train_step.py --shapes a b --compile --out results.json

Tokens a second a GPU are the median over `--steps` steps, the device synchronised around each.
FLOPs a token: 6 N_matmul + k L heads head_dim S, k = 12 for the whole score matrix (full), 6 for
what a causal kernel computes; MFU against 989 TFLOP/s. The ceiling is a product of 8192^3 in
bfloat16, measured before. `speed.py` runs this beside the peer.
"""

import argparse
import gc
import json
import os
import statistics
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import lightning as L
import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from megatron_lightning.config import (
    DataParallelConfig,
    GPTConfig,
    MoEConfig,
    QuantizationConfig,
    RotaryConfig,
    RuntimeConfig,
)
from megatron_lightning.config.quantization import REAL_RECIPES
from megatron_lightning.config.training import OptimizerConfig, SchedulerConfig
from megatron_lightning.models import GPTModel
from megatron_lightning.runtime.kernel_times import union
from megatron_lightning.strategies import MegatronStrategy

H200_BF16_TFLOPS = 989.0
SHAPES: dict[str, dict[str, Any]] = {
    "a": dict(
        layers=16,
        hidden=2048,
        ffn=8192,
        heads=32,
        groups=8,
        vocab=32768,
        seq=4096,
        micro=4,
        accumulate=2,
    ),
    "b": dict(
        layers=8,
        hidden=4096,
        ffn=14336,
        heads=32,
        groups=8,
        vocab=128256,
        seq=8192,
        micro=1,
        accumulate=2,
    ),
    "c": dict(
        layers=8,
        hidden=2048,
        ffn=6144,
        heads=32,
        groups=4,
        head_dim=128,
        vocab=151936,
        seq=4096,
        micro=2,
        accumulate=2,
        qk_layernorm=True,
        rope=1e6,
        experts=MoEConfig(
            num_experts=128,
            router_topk=8,
            ffn_hidden_size=768,
            aux_loss_coeff=1e-3,
        ),
    ),
}


class RandomTokens(L.LightningDataModule):
    """A few fixed random batches over and over, on the device."""

    def __init__(self, shape: dict[str, Any], batches: int) -> None:
        super().__init__()
        self.shape, self.batches = shape, batches
        self.micro_batch_size = shape["micro"]

    def train_dataloader(self) -> "RandomTokens":
        return self

    def __len__(self) -> int:
        return self.batches

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        rows = self.shape["micro"] * self.shape["accumulate"]
        generator = torch.Generator().manual_seed(0)
        size = (4, rows, self.shape["seq"] + 1)
        tokens = torch.randint(0, self.shape["vocab"], size, generator=generator)
        for index in range(self.batches):
            row = tokens[index % 4]
            mask = torch.ones(rows, self.shape["seq"])
            yield {
                "tokens": row[:, :-1].contiguous(),
                "labels": row[:, 1:].contiguous(),
                "loss_mask": mask,
            }


class Kernels(L.Callback):
    """One step under torch's profiler: the kernels that take longest, and when none runs."""

    reads_gradients = reads_parameters = False

    def __init__(self, step: int) -> None:
        self.step = step
        self.busy_share = 0.0
        self.profiler = profile(activities=[ProfilerActivity.CUDA])

    def on_train_batch_start(self, trainer: L.Trainer, module: Any, batch: Any, index: int) -> None:
        if index == self.step:
            self.profiler.start()

    def on_train_batch_end(
        self, trainer: L.Trainer, module: Any, outputs: Any, batch: Any, index: int
    ) -> None:
        if index == self.step:
            torch.cuda.synchronize()
            self.profiler.stop()

    def table(self, rows: int = 40, width: int = 200) -> str:
        """A line for each of the longest kernels: milliseconds, calls, name."""
        times: dict[str, list[float]] = {}
        intervals = []
        for event in self.profiler.events() or ():
            if "cuda" in str(event.device_type).lower():
                interval = (event.time_range.start, event.time_range.end)
                times.setdefault(event.name, []).append(interval[1] - interval[0])
                intervals.append(interval)
        covered = union(intervals)
        busy = sum(end - begin for begin, end in covered) / 1e3
        span = (covered[-1][1] - covered[0][0]) / 1e3
        self.busy_share = busy / span
        lines = [f"busy {busy:.1f} of {span:.1f} ms, {len(intervals)} kernels"]
        longest = sorted(times.items(), key=lambda item: -sum(item[1]))
        for name, durations in longest[:rows]:
            lines.append(f"{sum(durations) / 1e3:8.2f} ms {len(durations):5d}  {name[:width]}")
        return "\n".join(lines)


class Clock(L.Callback):
    """Seconds of each step, the device synchronised."""

    reads_gradients = reads_parameters = False

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self.losses: list[float] = []

    def on_fit_start(self, trainer: L.Trainer, module: Any) -> None:
        gc.disable()

    def on_train_batch_start(self, trainer: L.Trainer, module: Any, batch: Any, index: int) -> None:
        torch.cuda.synchronize()
        self.start = time.perf_counter()

    def on_train_batch_end(
        self, trainer: L.Trainer, module: Any, outputs: Any, batch: Any, index: int
    ) -> None:
        torch.cuda.synchronize()
        self.seconds.append(time.perf_counter() - self.start)
        self.losses.append(float(outputs["loss"] if isinstance(outputs, dict) else outputs))


def experts_of(shape: dict[str, Any], forced: bool) -> MoEConfig | None:
    """The shape's experts; `forced`: all equally busy, whatever the router says."""
    experts: MoEConfig | None = shape.get("experts")
    if experts is None or not forced:
        return experts
    return replace(experts, load_balancing="forced", aux_loss_coeff=0.0)


def ceiling() -> float:
    """TFLOP/s of a product of 8192^3 in bfloat16, median of 20."""
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


def quantization(args: argparse.Namespace) -> QuantizationConfig | None:
    """Low precision of the linear layers, if asked for."""
    if args.fp8 is None:
        return None
    return QuantizationConfig(recipe=args.fp8, keep_first=args.keep, keep_last=args.keep)


def network_of(shape: dict[str, Any], args: argparse.Namespace) -> GPTConfig:
    """The shape's network."""
    return GPTConfig(
        vocab_size=shape["vocab"],
        num_layers=shape["layers"],
        hidden_size=shape["hidden"],
        ffn_hidden_size=shape["ffn"],
        num_attention_heads=shape["heads"],
        num_query_groups=shape["groups"],
        head_dim=shape.get("head_dim", 0),
        qk_layernorm=shape.get("qk_layernorm", False),
        rotary=RotaryConfig(base=shape.get("rope", 500000.0)),
        moe=experts_of(shape, args.forced),
        max_position_embeddings=shape["seq"],
    )


def trainer_of(args: argparse.Namespace, callbacks: list[L.Callback]) -> L.Trainer:
    """The layout that was asked for, and nothing that is not the step."""
    return L.Trainer(
        strategy=MegatronStrategy(
            tensor_parallel_size=args.tp,
            pipeline_parallel_size=args.pp,
            expert_parallel_size=args.ep,
            sequence_parallel=args.tp > 1,
            context_parallel_size=args.cp,
            data_parallel=DataParallelConfig(
                sharding=args.sharding, fuse_weight_gradients=not args.no_fuse
            ),
            runtime=RuntimeConfig(compile_layers=args.compile),
            quantization=quantization(args),
        ),
        accelerator="gpu",
        devices=args.devices,
        precision="bf16-mixed",
        max_steps=args.warm + args.steps,
        gradient_clip_val=1.0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=callbacks,
    )


def measure(name: str, args: argparse.Namespace) -> dict[str, Any]:
    """Train `--warm` + `--steps` steps of one shape."""
    shape = SHAPES[name]
    config = network_of(shape, args)
    top = ceiling()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    clock = Clock()
    kernels = [Kernels(args.warm - 1)] if args.profile or args.busy else []
    trainer = trainer_of(args, [clock, *kernels])
    model = GPTModel(config, OptimizerConfig(lr=1e-4), SchedulerConfig(lr_decay_style="constant"))
    trainer.fit(model, RandomTokens(shape, args.warm + args.steps))
    for one in kernels:
        table = one.table()
        if args.profile:
            print(table, flush=True)
    seconds = sorted(clock.seconds[args.warm :])
    step = statistics.median(seconds)
    tokens = shape["micro"] * shape["accumulate"] * shape["seq"]
    dp = args.devices // (args.tp * args.pp * args.cp)
    rate = tokens * dp / step / args.devices
    tflops = rate * config.flops_per_token(shape["seq"]) / 1e12
    causal = rate * config.flops_per_token(shape["seq"], causal=True) / 1e12
    return {
        "shape": name,
        "compile": args.compile,
        "devices": args.devices,
        "tp": args.tp,
        "pp": args.pp,
        "ep": args.ep,
        "forced": args.forced,
        "fp8": args.fp8,
        "keep": args.keep if args.fp8 else None,
        "dp": dp,
        "cp": args.cp,
        "sharding": args.sharding,
        "fuse_weight_gradients": not args.no_fuse,
        "tokens_per_second_per_gpu": round(rate),
        "step_ms": round(1e3 * step, 1),
        "step_ms_p95": round(1e3 * seconds[int(0.95 * (len(seconds) - 1))], 1),
        "tflops_full": round(tflops, 1),
        "tflops_causal": round(causal, 1),
        "mfu_full": round(tflops / H200_BF16_TFLOPS, 4),
        "mfu_causal": round(causal / H200_BF16_TFLOPS, 4),
        "ceiling_tflops": round(top, 1),
        "share_of_ceiling": round(tflops / top, 4),
        "kernel_busy_share": round(kernels[0].busy_share, 4) if kernels else None,
        "peak_gib": round(torch.cuda.max_memory_allocated() / 2**30, 2),
        "first_loss": clock.losses[0],
        "last_loss": clock.losses[-1],
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
    }


def main() -> None:
    """Measure the shapes that were asked for, one JSON line each."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shapes", nargs="+", default=["a"], choices=sorted(SHAPES))
    parser.add_argument("--compile", action="store_true", help="torch.compile each layer")
    parser.add_argument("--devices", type=int, default=1)
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--pp", type=int, default=1)
    parser.add_argument("--ep", type=int, default=1)
    parser.add_argument("--cp", type=int, default=1)
    parser.add_argument("--fp8", choices=REAL_RECIPES, help="recipe of the linear layers")
    parser.add_argument("--keep", type=int, default=0, help="--fp8: first and last layers in bf16")
    parser.add_argument("--sharding", default="none", choices=["none", "optimizer", "fsdp"])
    parser.add_argument("--no-fuse", action="store_true", help="autograd adds weight gradients")
    parser.add_argument("--forced", action="store_true", help="(c): all experts equally busy")
    parser.add_argument("--warm", type=int, default=4)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--profile", action="store_true", help="a table of the kernels of one step")
    parser.add_argument("--busy", action="store_true", help="profile a step for its busy share")
    parser.add_argument("--out", default="")
    args = parser.parse_args()
    for name in args.shapes:
        result = measure(name, args)
        if int(os.environ.get("LOCAL_RANK", "0")) == 0:
            print(json.dumps(result), flush=True)
            if args.out:
                with open(args.out, "a") as file:
                    file.write(json.dumps(result) + "\n")


if __name__ == "__main__":
    main()
