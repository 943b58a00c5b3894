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
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from importlib.metadata import version
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist

SIZES = {"num_layers": 8, "hidden_size": 512, "num_attention_heads": 8, "vocab_size": 32000}
SIDES = ("ours", "torch-dcp", "megatron-dp_reshardable", "megatron-fully_reshardable")
RESHARDS = {"4 data ranks": (4, 1), "2 tensor ranks": (2, 2)}  # ranks, tensor size
TENSOR = ("ours", "megatron-fully_reshardable")


class Side(Protocol):
    """A trained model of one program in this rank."""

    def parameters(self) -> int:
        """Number of parameters of the whole model."""
        ...

    def save(self, path: str) -> None:
        """Complete when it returns."""
        ...

    def start(self, path: str) -> Callable[[], None]:
        """Save in the background; the result waits until it is complete."""
        ...

    def load(self, path: str) -> None:
        """Model and optimizer, in place."""
        ...


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


# ---------------------------------------------------------------------- in a rank


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
        with_ours(int(ranks), int(tensor_size), measure)
        return
    dist.init_process_group("gloo", timeout=timedelta(minutes=20))
    if side == "torch-dcp":
        measure(Fsdp2(int(ranks)))
    else:
        from checkpoint_megatron import Megatron

        measure(Megatron(side.removeprefix("megatron-"), SIZES, int(tensor_size)))
    dist.destroy_process_group()


def save_and_load(state: Side, folder: Path, repetitions: int) -> dict[str, Any]:
    saves = [
        timed(lambda i=i: state.save(str(folder / f"save{i}"))) for i in range(repetitions + 1)
    ]
    stalls, totals = [], []
    for i in range(repetitions + 1):
        finish: list[Callable[[], None]] = []
        path = str(folder / f"background{i}")
        begun = time.perf_counter()
        stalls.append(timed(lambda path=path, to=finish: to.append(state.start(path))))
        finish[0]()
        seconds = slowest(time.perf_counter() - begun)
        totals.append({"seconds": seconds, "cpu_seconds": 0.0, "memory_bytes": 0.0})
    loads = [timed(lambda: state.load(str(folder / "save0"))) for _ in range(repetitions + 1)]
    files = [file for file in (folder / "save0").rglob("*") if file.is_file()]
    return {
        "parameters": state.parameters(),
        "bytes": sum(file.stat().st_size for file in files),
        "save": summary(saves),
        "stall": summary(stalls),
        "background save complete": summary(totals),
        "load": summary(loads),
    }


def load_only(state: Side, folder: Path, repetitions: int) -> dict[str, Any]:
    loads = [timed(lambda: state.load(str(folder / "save0"))) for _ in range(repetitions + 1)]
    return {"load": summary(loads)}


def timed(function: Callable[[], Any]) -> dict[str, float]:
    """Seconds, CPU seconds and growth of the peak of memory, each where it is largest."""
    dist.barrier()
    Path("/proc/self/clear_refs").write_text("5")
    before, cpu, begun = peak_memory(), cpu_seconds(), time.perf_counter()
    function()
    seconds = time.perf_counter() - begun
    return {
        "seconds": slowest(seconds),
        "cpu_seconds": slowest(cpu_seconds() - cpu),
        "memory_bytes": slowest(peak_memory() - before),
    }


def cpu_seconds() -> float:
    """Of this process, its threads, and the children that have ended."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


def slowest(value: float) -> float:
    tensor = torch.tensor([value], dtype=torch.float64)
    dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
    return float(tensor)


def peak_memory() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("VmHWM")).split()[1]) * 1024


def summary(samples: list[dict[str, float]]) -> dict[str, Any]:
    counted = samples[1:]
    seconds = [sample["seconds"] for sample in counted]
    return {
        "seconds": round(statistics.median(seconds), 3),
        "all_seconds": [round(value, 3) for value in seconds],
        "first_seconds": round(samples[0]["seconds"], 3),
        "cpu_seconds": round(statistics.median(sample["cpu_seconds"] for sample in counted), 3),
        "memory_mib": round(max(sample["memory_bytes"] for sample in samples) / 2**20),
    }


# ---------------------------------------------------------------------- torch DCP of FSDP2


def gpt_config() -> Any:
    from megatron_lightning.config import GPTConfig

    return GPTConfig(
        **SIZES,
        max_position_embeddings=64,
        gated_linear_unit=False,
        activation="gelu",
        norm="layernorm",
        add_bias_linear=True,
        position_embedding="learned",
        tie_word_embeddings=True,
    )


class Fsdp2:
    """The same network under `fully_shard`, saved by torch's own functions."""

    def __init__(self, ranks: int) -> None:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        from megatron_lightning.models import GPTModel

        network = GPTModel(gpt_config()).built_network()
        mesh = init_device_mesh("cpu", (ranks,))
        for layer in network.decoder.layers.values():
            fully_shard(layer, mesh=mesh)
        fully_shard(network, mesh=mesh)
        self.network = network
        self.background = dist.new_group(backend="gloo")  # async_save talks from its own thread
        self.optimizer = torch.optim.AdamW(network.parameters(), lr=1e-3)
        tokens = torch.randint(0, SIZES["vocab_size"], (1, 16))
        network(tokens, labels=tokens).mean().backward()
        self.optimizer.step()

    def parameters(self) -> int:
        return sum(parameter.numel() for parameter in self.network.parameters())

    def _state(self) -> dict[str, Any]:
        from torch.distributed.checkpoint.state_dict import get_state_dict

        model, optimizer = get_state_dict(self.network, self.optimizer)
        return {"model": model, "optimizer": optimizer}

    def save(self, path: str) -> None:
        import torch.distributed.checkpoint as dcp

        dcp.save(self._state(), checkpoint_id=path)

    def start(self, path: str) -> Callable[[], None]:
        import torch.distributed.checkpoint as dcp

        done: Any = dcp.async_save(self._state(), checkpoint_id=path, process_group=self.background)
        return lambda: done.result() and None

    def load(self, path: str) -> None:
        import torch.distributed.checkpoint as dcp
        from torch.distributed.checkpoint.state_dict import set_state_dict

        state = self._state()
        dcp.load(state, checkpoint_id=path)
        set_state_dict(
            self.network,
            self.optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
        )


# ---------------------------------------------------------------------- this package


def with_ours(ranks: int, tensor_size: int, measure: Callable[[Side], None]) -> None:
    """One step under the Trainer, then the measurement inside of it."""
    import lightning as L

    from megatron_lightning import MegatronStrategy
    from megatron_lightning.cli.verify_source import SyntheticTokens
    from megatron_lightning.config import CheckpointConfig, DataParallelConfig
    from megatron_lightning.models import GPTModel

    class Measure(L.Callback):
        def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
            measure(Ours(trainer))

    sharding = "none" if ranks == tensor_size else "optimizer"
    trainer = L.Trainer(
        strategy=MegatronStrategy(
            tensor_parallel_size=tensor_size,
            data_parallel=DataParallelConfig(sharding=sharding, overlap_param_gather=False),
            checkpoint=CheckpointConfig(asynchronous=True),
        ),
        accelerator="cpu",
        devices=ranks,
        precision="bf16-mixed",
        max_steps=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        limit_val_batches=0,
        callbacks=[Measure()],
    )
    trainer.fit(GPTModel(gpt_config()), SyntheticTokens(SIZES["vocab_size"], 16, 1, 4))


class Ours:
    """The state of a Trainer under `MegatronStrategy`."""

    def __init__(self, trainer: Any) -> None:
        self.trainer = trainer
        self.saves = trainer.strategy.saves

    def parameters(self) -> int:
        shapes = self.trainer.lightning_module.global_shapes()
        return sum(torch.Size(shape).numel() for shape in shapes.values())

    def save(self, path: str) -> None:
        self._save(path, background=False)

    def start(self, path: str) -> Callable[[], None]:
        self._save(path, background=True)
        return self.saves.finish

    def _save(self, path: str, *, background: bool) -> None:
        self.saves._config = replace(self.saves._config, asynchronous=background)
        self.saves.state_changes()  # else the second save of a state only gets another name
        self.trainer.save_checkpoint(path)

    def load(self, path: str) -> None:
        self.trainer.strategy.load_checkpoint(path)


if __name__ == "__main__":
    main()
