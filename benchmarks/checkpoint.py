"""What does a checkpoint cost, beside torch DCP of FSDP2 state and Megatron-Core's formats?

    python benchmarks/checkpoint.py --megatron-python VENV/bin/python --out results.json

VENV is a virtual environment with torch and the public package megatron-core. Everything runs on
CPUs of one machine, gloo ranks with one thread each; no GPU is needed and none is used.

Fixed: one GPT (8 layers, width 512, 32000 tokens, tied) after one optimizer step, its optimizer
state shared out over 2 data ranks; bfloat16 weights with float32 masters and moments (14 bytes a
parameter) in this package and Megatron-Core, float32 weights and moments (12 bytes) under FSDP2.
Each number is the median over the repetitions of the slowest rank, after one that is not counted:

- save: blocking, from a barrier until the checkpoint is complete;
- stall: time for which a background save holds up its caller, and until it is complete;
- load: into the same layout; reshard: into 4 data ranks, and into 2 tensor ranks where it can be
  (under FSDP2 it would be another program). Files are in the page cache of the machine;
- memory: growth of the largest resident size of a rank during the operation, the largest of all
  repetitions (the first one, which allocates, included). Processes beside the ranks are not in it.

Megatron-Core's formats are `dp_reshardable` (fast, data ranks only) and `fully_reshardable`, which
gathers to a rank; `fully_sharded_model_space` can't be saved by the versions that have these.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import socket
import subprocess
import sys
import tempfile
from datetime import timedelta
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from checkpoint_measures import Side, load_only, save_and_load

SIZES = {"num_layers": 8, "hidden_size": 512, "num_attention_heads": 8, "vocab_size": 32000}
SIDES = ("ours", "torch-dcp", "megatron-dp_reshardable", "megatron-fully_reshardable")
RESHARDS = {"4 data ranks": (4, 1), "2 tensor ranks": (2, 2)}  # ranks, tensor size
TENSOR = ("ours", "megatron-fully_reshardable")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--megatron-python", help="Python with megatron-core; left out: without it")
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--folder", type=Path, help="where checkpoints go (default: temporary)")
    parser.add_argument("--sides", nargs="+", choices=SIDES, default=SIDES)
    parser.add_argument("--rank-of", nargs=4, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank_of:
        rank_main(*options.rank_of, options.folder, options.repetitions)
        return
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        for side in options.sides:
            python = sys.executable
            if side.startswith("megatron"):
                python = options.megatron_python
            if python is None:
                continue
            results[side] = run_side(python, side, Path(folder) / side, options.repetitions)
            print(side, json.dumps(results[side]), flush=True)
            shutil.rmtree(Path(folder) / side)
    report = {"what": __doc__.splitlines()[0], "machine": machine(), "sizes": SIZES}
    report |= {"repetitions": options.repetitions, "results": results}
    if options.megatron_python:
        report["megatron_core"] = version_there(options.megatron_python)
    if options.out:
        options.out.write_text(json.dumps(report, indent=1) + "\n")


def machine() -> dict[str, Any]:
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False
    )
    return {
        "cores": os.cpu_count(),
        "processor": platform.processor() or platform.machine(),
        "load_average": os.getloadavg()[0],
        "torch": torch.__version__,
        "lightning": version("lightning"),
        "commit": commit.stdout.strip(),
    }


def version_there(python: str) -> str:
    code = "from importlib.metadata import version; print(version('megatron-core'))"
    done = subprocess.run([python, "-c", code], capture_output=True, text=True, check=True)
    return done.stdout.strip()


def run_side(python: str, side: str, folder: Path, repetitions: int) -> dict[str, Any]:
    """Save and load with 2 data ranks, then load in other layouts."""
    folder.mkdir(parents=True)
    found = run_ranks(python, side, "save", 2, 1, folder, repetitions)
    for name, (ranks, tensor_size) in RESHARDS.items():
        if tensor_size == 1 or side in TENSOR:
            loaded = run_ranks(python, side, "load", ranks, tensor_size, folder, repetitions)
            found[f"reshard to {name}"] = loaded["load"]
    return found


def run_ranks(
    python: str, side: str, task: str, ranks: int, tensor_size: int, folder: Path, repetitions: int
) -> dict[str, Any]:
    """Start the ranks of one side; what rank 0 says."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [python, __file__, "--folder", str(folder), "--repetitions", str(repetitions)]
    command += ["--rank-of", side, task, str(ranks), str(tensor_size)]
    processes = []
    for rank in range(ranks):
        environment = {
            **os.environ,
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(ranks),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "OMP_NUM_THREADS": "1",
            "CUDA_DEVICE_MAX_CONNECTIONS": "1",
            "PYTHONPATH": str(Path(__file__).resolve().parents[1]),
        }
        with open(folder / f"{task}-{ranks}-{tensor_size}-{rank}.log", "w") as log:
            processes.append(
                subprocess.Popen(command, env=environment, stdout=log, stderr=subprocess.STDOUT)
            )
    try:
        codes = [process.wait(timeout=900) for process in processes]
    finally:
        for process in processes:
            process.kill()
    if any(codes):
        log = (
            folder / f"{task}-{ranks}-{tensor_size}-{[i for i, c in enumerate(codes) if c][0]}.log"
        )
        raise SystemExit(f"{side}, {task}: a rank failed\n{log.read_text()[-3000:]}")
    return json.loads((folder / f"{task}-{ranks}-{tensor_size}.json").read_text())


def rank_main(
    side: str, task: str, ranks: str, tensor_size: str, folder: Path, repetitions: int
) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)

    def measure(state: Side) -> None:
        found = (save_and_load if task == "save" else load_only)(state, folder, repetitions)
        if dist.get_rank() == 0:
            (folder / f"{task}-{ranks}-{tensor_size}.json").write_text(json.dumps(found))
        dist.barrier()

    if side == "ours":
        from checkpoint_sides import with_ours

        with_ours(SIZES, int(ranks), int(tensor_size), measure)
        return
    dist.init_process_group("gloo", timeout=timedelta(minutes=20))
    if side == "torch-dcp":
        from checkpoint_sides import Fsdp2

        measure(Fsdp2(SIZES, int(ranks)))
    else:
        from checkpoint_megatron import Megatron

        measure(Megatron(side.removeprefix("megatron-"), SIZES, int(tensor_size)))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
