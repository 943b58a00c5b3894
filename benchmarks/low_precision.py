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
import os
import signal
import socket
import sys
import time
import warnings
from collections.abc import Iterable, Iterator
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import lightning as L
import torch
from low_precision_run import KINDS, SIZES, train
from low_precision_verdicts import judge, show


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
