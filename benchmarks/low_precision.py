"""Do low precisions train? The same GPT on the same real text in each of them, losses side by side.

Text: the documentation and sources that every Python installation has, as bytes. For each seed all
precisions start from the same weights and see the same batches in the same order; the learning rate
rises for a fifth of the steps and falls to zero. What is compared is the loss on text that was
never trained on, the same windows for all, computed in float32 from the float32 weights that the
optimizer holds: only training differs, not the precision of the measurement.

    python benchmarks/low_precision.py                      # on a GPU: 300 steps, 25M parameters
    python benchmarks/low_precision.py --size tiny          # anywhere, a minute a run on a CPU

Limits: float16 within 0.5 % of bfloat16, FP8 within 1 %, simulated NVFP4 within 2 %. Two runs drift
apart whatever makes them differ, so that one says little: each precision is trained with several
seeds, and judged by the mean of its ratios to bfloat16's loss of the same seed and the 95 %
interval of that mean (Student's t). `within` and `beyond` mean that the whole interval lies on that
side of the limit; else nothing can be told, and more seeds are needed. The exit status is 1 where
one is beyond. `bf16_again` is bfloat16 with the batch cut into twice as many micro-batches, which
changes nothing but the order of sums: what equal runs differ by.

The learning rate is that of published recipes for models of this size and the default of
`OptimizerConfig`, the same for all precisions. FP8 runs on the device's own units on CUDA (compute
capability 8.9 or newer), simulated elsewhere. `tf32` is float32 with products of ten-bit factors,
eight times as fast there. `--parallel` runs train side by side on the device.
"""

import argparse
import json
import logging
import math
import os
import signal
import socket
import sys
import tempfile
import time
import warnings
from collections.abc import Iterable, Iterator
from multiprocessing import get_context
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import lightning as L
import torch
from lightning.pytorch.plugins.precision import MixedPrecision
from torch import Tensor

from megatron_lightning.config import GPTConfig, LossScaleConfig, QuantizationConfig
from megatron_lightning.config.quantization import REAL_RECIPES
from megatron_lightning.config.training import OptimizerConfig, SchedulerConfig
from megatron_lightning.data.sample_text import python_help_texts
from megatron_lightning.models import GPTModel
from megatron_lightning.precision import MegatronPrecision
from megatron_lightning.precision.fp8 import device_problem
from megatron_lightning.strategies import MegatronStrategy

LIMITS = {"fp16": 0.005, "nvfp4": 0.02}
FP8_LIMIT = 0.01
PLAIN = ("bf16", "bf16_again", "fp32", "tf32", "fp16")
KINDS = (
    *PLAIN,
    "fp8_tensorwise",
    "fp8_delayed",
    "fp8_rowwise",
    "fp8_blockwise",
    "nvfp4",
    "mxfp8",
)
SIZES: dict[str, dict[str, Any]] = {
    "tiny": dict(layers=4, hidden=64, ffn=192, heads=4, sequence=64, batch=8, lr=1e-3),
    "small": dict(layers=8, hidden=512, ffn=1408, heads=8, sequence=512, batch=32, lr=3e-4),
    "medium": dict(layers=12, hidden=768, ffn=2048, heads=12, sequence=1024, batch=32, lr=3e-4),
}
HELD_OUT_WINDOWS = 128
BLOCK = 1 << 15
"""Bytes of text that are trained on or held out together: one block of 16 is held out."""
STUDENT_T = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201)
"""Two-sided 95 % quantiles for 1, 2, ... degrees of freedom."""


# ------------------------------------------------------------------ text


def corpus(max_bytes: int = 12 << 20) -> tuple[Tensor, Tensor]:
    """Bytes of the language reference and of the standard library's sources, in a fixed order:
    (trained on, held out).
    """
    parts = [text.encode() for text in python_help_texts()]
    folder = Path(os.__file__).parent
    for path in sorted(folder.glob("*.py")) + sorted(folder.glob("[a-z]*/*.py")):
        if "site-packages" not in path.parts and "test" not in path.parts:
            parts.append(path.read_bytes())
    joined = torch.frombuffer(bytearray(b"\n\n".join(parts)[:max_bytes]), dtype=torch.uint8)
    blocks = joined.split(BLOCK)
    held = [block for i, block in enumerate(blocks) if i % 16 == 8]
    rest = [block for i, block in enumerate(blocks) if i % 16 != 8]
    return torch.cat(rest), torch.cat(held)


def windows(text: Tensor, starts: Iterable[int], length: int) -> dict[str, Tensor]:
    """Tokens, labels and loss mask, each (B, length)."""
    tokens = torch.stack([text[start : start + length + 1] for start in starts]).long()
    mask = torch.ones(tokens.shape[0], length)
    return {"tokens": tokens[:, :-1], "labels": tokens[:, 1:], "loss_mask": mask}


class TextBatches:
    """Windows at random places, the same for every precision. Not a DataLoader."""

    def __init__(self, text: Tensor, size: dict[str, Any], steps: int, seed: int) -> None:
        self.text, self.size, self.steps, self.seed = text, size, steps, seed

    def __len__(self) -> int:
        return self.steps

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        length = self.size["sequence"]
        for step in range(self.steps):
            generator = torch.Generator().manual_seed(1_000_003 * self.seed + step)
            starts = torch.randint(
                len(self.text) - length - 1, (self.size["batch"],), generator=generator
            )
            yield windows(self.text, starts.tolist(), length)


# ------------------------------------------------------------------ one run


class Losses(L.Callback):
    """Keeps the loss of every step on the device, and measures at some steps on held-out text."""

    def __init__(self, text: Tensor, size: dict[str, Any], at: set[int]) -> None:
        self.text, self.size, self.at = text, size, at
        self.values: list[Tensor] = []
        self.held_out: dict[int, float] = {}

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, *_: Any) -> None:
        self.values.append(outputs["loss"].detach().float())
        if len(self.values) in self.at:
            strategy = trainer.strategy
            masters = strategy.update.masters
            weights = strategy.parallel_model.parameters
            held = weights if masters is None else masters.named_masters()
            prefix = strategy.network_prefix
            self.held_out[len(self.values)] = self.measure(
                {name.removeprefix(prefix): value for name, value in held.items()}
            )

    @torch.no_grad()
    def measure(self, weights: dict[str, Tensor]) -> float:
        """Loss a byte in float32."""
        device = next(iter(weights.values())).device
        before = torch.get_float32_matmul_precision()
        torch.set_float32_matmul_precision("highest")
        network = GPTModel(model_config(self.size)).build_network(str(device))
        for name, parameter in network.named_parameters():
            parameter.copy_(weights[name])
        length = self.size["sequence"]
        starts = torch.linspace(0, len(self.text) - length - 1, HELD_OUT_WINDOWS).long().tolist()
        total = 0.0
        for begin in range(0, HELD_OUT_WINDOWS, 32):
            batch = windows(self.text, starts[begin : begin + 32], length)
            tokens, labels = batch["tokens"].to(device), batch["labels"].to(device)
            total += float(network.eval()(tokens, None, labels).double().sum())
        torch.set_float32_matmul_precision(before)
        return total / (HELD_OUT_WINDOWS * length)


def model_config(size: dict[str, Any]) -> GPTConfig:
    """The model of a size."""
    return GPTConfig(
        vocab_size=256,
        num_layers=size["layers"],
        hidden_size=size["hidden"],
        ffn_hidden_size=size["ffn"],
        num_attention_heads=size["heads"],
        max_position_embeddings=size["sequence"],
    )


def precision_of(kind: str, device: str) -> tuple[dict[str, Any], QuantizationConfig | None]:
    """The Trainer's options and the strategy's quantization."""
    if kind == "fp16" and device == "cpu":
        return {"plugins": [MegatronPrecision(MixedPrecision("16-mixed", "cpu"))]}, None
    torch.set_float32_matmul_precision("high" if kind == "tf32" else "highest")
    names = {"fp32": "32-true", "tf32": "32-true", "fp16": "16-mixed"}
    options = {"precision": names.get(kind, "bf16-mixed")}
    if kind in PLAIN:
        return options, None
    problem = device_problem(torch.device(device), blocks=kind == "fp8_blockwise")
    runs = kind in REAL_RECIPES and problem is None
    return options, QuantizationConfig(recipe=kind, simulate=not runs)  # type: ignore[arg-type]


def train(kind: str, seed: int, size: dict[str, Any], steps: int, device: str) -> dict[str, Any]:
    """Train in one precision; losses on held-out text by step, and in training."""
    begin = time.perf_counter()
    trained, held = corpus()
    losses = Losses(held, size, {round(steps * third / 3) for third in (1, 2, 3)})
    options, quantization = precision_of(kind, device)
    L.seed_everything(seed, verbose=False)
    model = GPTModel(
        model_config(size),
        OptimizerConfig(lr=size["lr"]),
        SchedulerConfig(lr_warmup_steps=max(1, steps // 5), lr_decay_steps=steps, min_lr=0.0),
        loss_normalization="micro_batch",  # a mean: the usual range of loss scales
    )
    trainer = L.Trainer(
        strategy=MegatronStrategy(
            micro_batch_size=size["batch"] // (2 if kind == "bf16_again" else 1),
            quantization=quantization,
            loss_scale=LossScaleConfig(growth_interval=100),
        ),
        accelerator="gpu" if device == "cuda" else "cpu",
        devices=1,
        max_steps=steps,
        gradient_clip_val=1.0,
        logger=False,
        callbacks=[losses],
        default_root_dir=tempfile.gettempdir(),  # of what a run saves that is stopped
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        limit_val_batches=0,
        **options,
    )
    trainer.fit(model, TextBatches(trained, size, steps, seed))  # type: ignore[arg-type]
    values = torch.stack(losses.values).tolist()
    tens = [fmean(values[i : i + 10]) for i in range(0, len(values), 10)]
    return {
        "kind": kind,
        "seed": seed,
        "loss": losses.held_out[steps],
        "held_out": losses.held_out,
        "first_loss": values[0],
        "last_third": fmean(values[-max(1, steps // 3) :]),
        "training": [round(value, 5) for value in tens],
        "seconds": time.perf_counter() - begin,
    }


# ------------------------------------------------------------------ all runs


def limit_of(kind: str) -> float:
    """Largest relative distance from bfloat16's loss."""
    return LIMITS.get(kind, FP8_LIMIT)


def verdict(ratios: list[float], limit: float) -> dict[str, Any]:
    """Mean of the ratios, its standard error and interval, and what these say about the limit."""
    mean = fmean(ratios)
    found: dict[str, Any] = {"ratios": ratios, "ratio": mean, "limit": limit}
    if len(ratios) < 2:
        return found | {"verdict": "can't be told by one seed"}
    error = stdev(ratios) / math.sqrt(len(ratios))
    half = STUDENT_T[min(len(ratios) - 1, len(STUDENT_T)) - 1] * error
    low, high = mean - half, mean + half
    said = "can't be told"
    if 1 - limit <= low and high <= 1 + limit:
        said = "within"
    elif high < 1 - limit or low > 1 + limit:
        said = "beyond"
    return found | {"standard_error": error, "interval": [low, high], "verdict": said}


def judge(runs: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Each precision's ratios to bfloat16 of the same seed, on held-out text and in training."""
    plain = {run["seed"]: run for run in runs if run["kind"] == "bf16"}
    rows: dict[str, dict[str, Any]] = {}
    for kind in KINDS:
        own = sorted((run for run in runs if run["kind"] == kind), key=lambda run: run["seed"])
        pairs = [(run, plain[run["seed"]]) for run in own if run["seed"] in plain]
        if not pairs:
            continue
        rows[kind] = {
            "seeds": [run["seed"] for run, _ in pairs],
            "loss": fmean(run["loss"] for run, _ in pairs),
            "last_third_ratio": fmean(run["last_third"] / ref["last_third"] for run, ref in pairs),
            **verdict([run["loss"] / ref["loss"] for run, ref in pairs], limit_of(kind)),
        }
    return rows


def prepare(device: str, parallel: int) -> None:
    """Begin a process that trains beside others."""
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore")
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // parallel) if device == "cpu" else 1)
    port = 20000 + os.getpid() % 10000  # another one in each process
    while not is_free(port):
        port += 1
    os.environ["MASTER_PORT"] = str(port)


def is_free(port: int) -> bool:
    """Whether nobody listens there."""
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) != 0


def run_all(
    kinds: Iterable[str],
    seeds: Iterable[int],
    size: dict[str, Any],
    steps: int,
    device: str,
    parallel: int = 1,
    done: Iterable[tuple[str, int]] = (),
) -> Iterator[dict[str, Any]]:
    """Every kind with every seed, bfloat16 always among them, but those that are `done`; each as
    soon as it is.
    """
    wanted = [(kind, seed) for seed in seeds for kind in dict.fromkeys(("bf16", *kinds))]
    jobs = [job for job in wanted if job not in set(done)]
    if parallel == 1:
        yield from (train(*job, size, steps, device) for job in jobs)
        return
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # which ends the processes too
    with get_context("spawn").Pool(
        max(1, min(parallel, len(jobs))), prepare, (device, parallel)
    ) as pool:
        yield from pool.imap_unordered(train_job, [(*job, size, steps, device) for job in jobs])


def train_job(job: tuple[str, int, dict[str, Any], int, str]) -> dict[str, Any]:
    """`train` with its arguments in one."""
    return train(*job)


def write(out: str, runs: list[dict[str, Any]], size: dict[str, Any], steps: int) -> None:
    """The numbers so far, with what they were measured on."""
    record = {
        "size": size,
        "steps": steps,
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        "torch": torch.__version__,
        "lightning": L.__version__,
        "date": time.strftime("%Y-%m-%d"),
        "rows": judge(runs),
        "runs": sorted(runs, key=lambda run: (run["seed"], KINDS.index(run["kind"]))),
    }
    Path(out).write_text(json.dumps(record, indent=1) + "\n")


def earlier(path: str, size: dict[str, Any], steps: int) -> list[dict[str, Any]]:
    """Runs of a file that `write` made; ValueError where they were others."""
    record = json.loads(Path(path).read_text())
    if (record["size"], record["steps"]) != (size, steps):
        raise ValueError(f"--earlier {path}: made with {record['size']}, {record['steps']} steps")
    return record["runs"]


def show(rows: dict[str, dict[str, Any]]) -> None:
    """A table of the verdicts."""
    print(f"{'':<15} {'loss':>7} {'ratio':>7} {'+-':>7}  {'interval':<17} limit  training")
    for kind, row in rows.items():
        low, high = row.get("interval", (math.nan, math.nan))
        print(
            f"{kind:<15} {row['loss']:7.4f} {row['ratio']:7.4f}"
            f" {row.get('standard_error', math.nan):7.4f}  {low:.4f} - {high:.4f}"
            f"   {row['limit']:.3f} {row['last_third_ratio']:8.4f}  {row['verdict']}"
            f"  ({', '.join(f'{ratio:.4f}' for ratio in row['ratios'])})"
        )


def main() -> None:
    """Command line."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--size", choices=SIZES, default="small" if device == "cuda" else "tiny")
    parser.add_argument("--steps", type=int, default=300)
    usual = [kind for kind in KINDS if kind != ("fp32" if device == "cuda" else "tf32")]
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=usual)
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2, 3, 4])
    parser.add_argument("--lr", type=float, help="peak learning rate in place of the size's own")
    parser.add_argument("--parallel", type=int, default=1, help="runs at a time on the device")
    parser.add_argument("--out", default="", help="JSON file for the numbers")
    parser.add_argument(
        "--earlier", nargs="*", default=[], help="JSON files of runs that need no repetition"
    )
    options = parser.parse_args()
    size = {**SIZES[options.size], **({} if options.lr is None else {"lr": options.lr})}
    begin = time.perf_counter()
    runs = [run for path in options.earlier for run in earlier(path, size, options.steps)]
    known = [(run["kind"], run["seed"]) for run in runs]
    for run in run_all(
        options.kinds, options.seeds, size, options.steps, device, options.parallel, known
    ):
        runs.append(run)
        print(
            f"{run['kind']:<15} seed {run['seed']}  loss {run['first_loss']:.4f} ->"
            f" {run['loss']:.4f} held out, {run['last_third']:.4f} in training"
            f"  {run['seconds']:.0f} s",
            flush=True,
        )
        if options.out:
            write(options.out, runs, size, options.steps)
    rows = judge(runs)
    show(rows)
    print(f"{len(runs)} runs in {time.perf_counter() - begin:.0f} s")
    if far := [kind for kind, row in rows.items() if row["verdict"] == "beyond"]:
        sys.exit(f"beyond the limit: {', '.join(far)}")


if __name__ == "__main__":
    main()
