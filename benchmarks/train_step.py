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
import ast
import contextlib
import gc
import json
import os
import statistics
import time
from dataclasses import fields, is_dataclass, replace
from typing import Any, get_args

import lightning as L
import torch
import torch._functorch.config
import torch.distributed as dist
from kernel_gaps import idle_lines
from mirror import mirrored, stage_input
from shapes import SHAPES, RandomTokens, synchronize
from torch.profiler import ProfilerActivity, profile

from megatron_lightning.callbacks import StepTimeline
from megatron_lightning.config import (
    ContextConfig,
    DataParallelConfig,
    GPTConfig,
    MoEConfig,
    PipelineConfig,
    QuantizationConfig,
    RotaryConfig,
    RuntimeConfig,
)
from megatron_lightning.config.context import ContextForm
from megatron_lightning.config.parallel import ParallelConfig, ScheduleName
from megatron_lightning.config.quantization import REAL_RECIPES
from megatron_lightning.config.training import OptimizerConfig, SchedulerConfig
from megatron_lightning.models import GPTModel
from megatron_lightning.models.gpt import BackendName
from megatron_lightning.parallel.peers.exchange import held_bytes
from megatron_lightning.runtime.kernel_times import union
from megatron_lightning.strategies import MegatronStrategy

H200_BF16_TFLOPS = 989.0


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
        assert self.profiler.profiler is not None
        lines += idle_lines(self.profiler.profiler.kineto_results.events())
        return "\n".join(lines)


class Clock(L.Callback):
    """Seconds of each step, the device synchronised, and of the host until all is launched."""

    reads_gradients = reads_parameters = False

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self.host_seconds: list[float] = []
        self.losses: list[float] = []
        self.peak_gib = self.shared_gib = 0.0

    def on_fit_start(self, trainer: L.Trainer, module: Any) -> None:
        gc.disable()

    def on_train_batch_start(self, trainer: L.Trainer, module: Any, batch: Any, index: int) -> None:
        synchronize()
        self.start = time.perf_counter()

    def on_train_batch_end(
        self, trainer: L.Trainer, module: Any, outputs: Any, batch: Any, index: int
    ) -> None:
        self.host_seconds.append(time.perf_counter() - self.start)
        synchronize()
        self.seconds.append(time.perf_counter() - self.start)
        self.losses.append(float(outputs["loss"] if isinstance(outputs, dict) else outputs))

    def on_train_end(self, trainer: L.Trainer, module: Any) -> None:
        device = trainer.strategy.root_device
        peak = torch.tensor(torch.cuda.max_memory_allocated() / 2**30, device=device)
        if dist.is_initialized():
            dist.all_reduce(peak, op=dist.ReduceOp.MAX)
        self.peak_gib = float(peak)
        self.shared_gib = held_bytes() / 2**30  # with tensor ranks; not in the peak


def experts_of(shape: dict[str, Any], forced: bool) -> MoEConfig | None:
    """The shape's experts; `forced`: all equally busy, whatever the router says."""
    experts: MoEConfig | None = shape.get("experts")
    if experts is None or not forced:
        return experts
    return replace(experts, load_balancing="forced", aux_loss_coeff=0.0)


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


def quantization(args: argparse.Namespace) -> QuantizationConfig | None:
    """Low precision of the linear layers, if asked for."""
    if args.fp8 is None:
        return None
    return QuantizationConfig(
        recipe=args.fp8, kernels=args.backend, keep_first=args.keep, keep_last=args.keep
    )


def shape_of(name: str, args: argparse.Namespace) -> dict[str, Any]:
    """The shape, with what the command line says instead."""
    given = {key: getattr(args, key) for key in ("seq", "micro", "accumulate")}
    return SHAPES[name] | {key: value for key, value in given.items() if value}


def override(config: Any, settings: list[str]) -> Any:
    """`config` with "field=value" or "section.field=value" set; values are Python literals or, if
    they are none, strings. ValueError for a name that isn't there.
    """
    for setting in settings:
        name, _, text = setting.partition("=")
        try:
            value: Any = ast.literal_eval(text)
        except (ValueError, SyntaxError):
            value = text
        config = _with_field(config, name.split("."), value, setting)
    return config


def _with_field(config: Any, path: list[str], value: Any, setting: str) -> Any:
    known = [field.name for field in fields(config)] if is_dataclass(config) else []
    if path[0] not in known:
        raise ValueError(f"--set {setting}: {path[0]!r} is none of {', '.join(known) or 'nothing'}")
    if len(path) > 1:
        value = _with_field(getattr(config, path[0]), path[1:], value, setting)
    return replace(config, **{path[0]: value})


def settings_of(args: argparse.Namespace, network: bool) -> list[str]:
    """What `--set` says of the network, or of the layout."""
    if not network:
        return [one for one in args.set if not one.startswith("network.")]
    return [one.removeprefix("network.") for one in args.set if one.startswith("network.")]


def network_of(shape: dict[str, Any], args: argparse.Namespace) -> GPTConfig:
    """The shape's network."""
    config = GPTConfig(
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
    return override(config, settings_of(args, network=True))


def layout_of(args: argparse.Namespace) -> ParallelConfig:
    """The layout that was asked for."""
    config = ParallelConfig(
        tensor_parallel_size=args.tp,
        pipeline_parallel_size=args.pp,
        expert_parallel_size=args.ep,
        sequence_parallel=args.tp > 1,
        context_parallel_size=args.cp,
        pipeline=PipelineConfig(
            schedule=args.schedule,
            virtual_pipeline_size=args.virtual,
            layout=args.layout or None,
        ),
        context=ContextConfig(form=args.context),
        data_parallel=DataParallelConfig(
            sharding=args.sharding, fuse_weight_gradients=not args.no_fuse
        ),
        runtime=RuntimeConfig(compile_layers=args.compile),
        quantization=quantization(args),
    )
    return override(config, settings_of(args, network=False))


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


def ranks_of(args: argparse.Namespace) -> tuple[int, int]:
    """(ranks of the layout, data ranks of them)."""
    ranks = args.mirror or args.devices
    return ranks, ranks // (args.tp * args.pp * args.cp)


def asked_for(
    name: str, shape: dict[str, Any], layout: ParallelConfig, args: argparse.Namespace
) -> dict[str, Any]:
    """What the command line said, as far as it counts."""
    ranks, dp = ranks_of(args)
    return {
        "shape": name,
        "compile": args.compile,
        "devices": ranks,
        "mirror": f"rank {args.rank} of {args.mirror}" if args.mirror else None,
        "tp": args.tp,
        "pp": args.pp,
        "ep": args.ep,
        "forced": args.forced,
        "backend": args.backend,
        "fp8": args.fp8,
        "keep": args.keep if args.fp8 else None,
        "dp": dp,
        "cp": args.cp,
        "seq": shape["seq"],
        "micro": shape["micro"],
        "accumulate": shape["accumulate"],
        "schedule": layout.pipeline.schedule if args.pp > 1 else None,
        "virtual": layout.pipeline.virtual_pipeline_size if args.pp > 1 else None,
        "context": layout.context.form if args.cp > 1 else None,
        "packed": args.packed,
        "set": args.set,
        "memory_budget": args.memory_budget,
        "sharding": args.sharding,
        "fuse_weight_gradients": not args.no_fuse,
    }


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


def main() -> None:
    """Measure the shapes that were asked for, one JSON line each."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shapes", nargs="+", default=["a"], choices=sorted(SHAPES))
    parser.add_argument("--compile", action="store_true", help="torch.compile each layer")
    parser.add_argument("--backend", default="torch", choices=get_args(BackendName))
    parser.add_argument("--devices", type=int, default=1)
    parser.add_argument("--mirror", type=int, default=0, help="one rank of so many, alone")
    parser.add_argument("--rank", type=int, default=0, help="--mirror: which")
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--pp", type=int, default=1)
    parser.add_argument("--ep", type=int, default=1)
    parser.add_argument("--cp", type=int, default=1)
    parser.add_argument("--seq", type=int, default=0, help="tokens a sample, not the shape's")
    parser.add_argument("--micro", type=int, default=0, help="samples a micro-batch")
    parser.add_argument("--accumulate", type=int, default=0, help="micro-batches a step and rank")
    parser.add_argument("--schedule", default="1f1b", choices=get_args(ScheduleName))
    parser.add_argument("--virtual", type=int, default=1, help="--pp: chunks of layers a rank")
    parser.add_argument("--layout", default="", help='--pp: stages, e.g. "Et*8|t*8L"')
    parser.add_argument("--context", default="ring", choices=get_args(ContextForm))
    parser.add_argument("--packed", action="store_true", help="samples full of short documents")
    parser.add_argument("--memory-budget", type=float, default=1.0, help="of torch.compile: below"
                        " 1, cheap operations are computed again in backward")  # fmt: skip
    parser.add_argument("--set", nargs="+", action="extend", default=[], help="SECTION.FIELD=VALUE"
                        " of a config; --set may come again")  # fmt: skip
    parser.add_argument("--fp8", choices=REAL_RECIPES, help="recipe of the linear layers")
    parser.add_argument("--keep", type=int, default=0, help="--fp8: first and last layers in bf16")
    parser.add_argument("--sharding", default="none", choices=["none", "optimizer", "fsdp"])
    parser.add_argument("--no-fuse", action="store_true", help="autograd adds weight gradients")
    parser.add_argument("--forced", action="store_true", help="(c): all experts equally busy")
    parser.add_argument("--warm", type=int, default=4)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--timeline", default="", metavar="FOLDER", help="write where the last"
                        " step's time goes on every rank, and print a table")  # fmt: skip
    parser.add_argument("--profile", action="store_true", help="a table of the kernels of one step")
    parser.add_argument("--busy", action="store_true", help="profile a step for its busy share")
    parser.add_argument("--out", default="")
    args = parser.parse_args()
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
