"""How much memory and time do import and export of a Hugging Face model take, beside a plain copy?

Held fixed: a Llama-shaped model of 1.2 billion parameters in bfloat16 (2.4 GB in two files; its
embedding alone has 656 MB), random values, CPU ranks of one machine, files in the page cache.
Import is the set-up of a `Trainer.predict` with `bf16-true`, in which each rank reads its boxes;
export is `save_hf`, with everything on the disk at the end. Memory is the anonymous memory
(`RssAnon`) of a rank above that before the call, at its peak; the copy is `shutil.copyfile` of the
same bytes and `fsync`, right before and after.

    python benchmarks/hf_bridge.py --folder /tmp/hf-bridge
"""

import argparse
import filecmp
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import date
from pathlib import Path
from typing import Any

import lightning as L
import torch

from megatron_lightning.bridge import from_hf
from megatron_lightning.bridge.hf import FAMILIES
from megatron_lightning.bridge.mapping import apply_rules
from megatron_lightning.bridge.placing import plan_files, write_json
from megatron_lightning.bridge.safetensors_files import write_box
from megatron_lightning.checkpoint import Box
from megatron_lightning.config import GPTConfig
from megatron_lightning.models import GPTModel
from megatron_lightning.strategies import MegatronStrategy

CONFIG = GPTConfig(
    vocab_size=128256,
    num_layers=8,
    hidden_size=2560,
    num_attention_heads=20,
    num_query_groups=4,
    ffn_hidden_size=6912,
    max_position_embeddings=4096,
    make_vocab_size_divisible_by=64,
)
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "single": (1, {}),
    "tp2": (2, dict(tensor_parallel_size=2)),
    "pp2": (2, dict(pipeline_parallel_size=2)),
}
MIB = 2**20
SHARD_BYTES = 13 * 10**8


class Batch:
    """One small batch."""

    def __len__(self) -> int:
        return 1

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        return iter([{"tokens": torch.ones(2, 2, dtype=torch.int64)}])


class Peak(L.Callback):
    """Time and memory of the set-up."""

    def __init__(self) -> None:
        self.seconds = self.mib = 0.0

    def setup(self, trainer: Any, module: Any, stage: str) -> None:
        self._context = watched(self)
        self._context.__enter__()

    def on_predict_start(self, trainer: Any, module: Any) -> None:
        self._context.__exit__(None, None, None)


def anonymous() -> int:
    text = Path("/proc/self/status").read_text()
    return int(text.split("RssAnon:")[1].split()[0]) * 1024


@contextmanager
def watched(into: Any) -> Iterator[None]:
    """Note wall seconds and the peak of anonymous memory above the level before."""
    before, peak, stop = anonymous(), [0], threading.Event()

    def sample() -> None:
        while not stop.wait(0.002):
            peak[0] = max(peak[0], anonymous() - before)

    thread = threading.Thread(target=sample)
    thread.start()
    begin = time.perf_counter()
    try:
        yield
    finally:
        into.seconds = time.perf_counter() - begin
        stop.set()
        thread.join()
        into.mib = max(peak[0], anonymous() - before) / MIB


def make(folder: Path) -> None:
    """Write the model, a block of random values after the other."""
    folder.mkdir(parents=True)
    family = FAMILIES["llama"]
    shapes = {n.removeprefix("network."): s for n, s in GPTModel(CONFIG).global_shapes().items()}
    table = apply_rules(family.rules(CONFIG), shapes)
    files = plan_files(
        folder, {n: (torch.bfloat16, s) for n, s in table.theirs.items()}, 13 * 10**8
    )
    files.create()
    files.write_index()
    with files.opened() as descriptor_of:
        for stored in files.tensors.values():
            for box in Box.whole(stored.shape).cut(40):
                values = torch.randn(box.sizes).mul_(0.02).bfloat16()
                write_box(descriptor_of(stored.file), stored, box, values)
    write_json(folder / "config.json", {**family.config_json(CONFIG), "torch_dtype": "bfloat16"})


def rank(source: str, target: str, layout: str) -> None:
    """One rank: import, export, and what they took as a line of JSON."""
    world_size, options = LAYOUTS[layout]
    model, peak, out = from_hf(source), Peak(), Peak()
    trainer = L.Trainer(
        strategy=MegatronStrategy(**options),
        accelerator="cpu",
        devices=world_size,
        precision="bf16-true",
        callbacks=[peak],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.predict(model, Batch())  # type: ignore[arg-type]
    shard = sum(p.numel() * p.element_size() for p in model.parameters()) / MIB
    with watched(out):
        model.save_hf(target, max_shard_bytes=SHARD_BYTES)
    found = {
        "shard_mib": shard,
        "import": {"seconds": peak.seconds, "peak_mib": peak.mib},
        "export": {"seconds": out.seconds, "peak_mib": out.mib},
    }
    Path(f"{target}.{trainer.global_rank}.json").write_text(json.dumps(found))


def copy_seconds(source: Path, target: Path) -> float:
    """Time of a plain copy that has reached the disk."""
    target.mkdir()
    begin = time.perf_counter()
    for file in source.glob("*.safetensors"):
        shutil.copyfile(file, target / file.name)
        descriptor = os.open(target / file.name, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)
    seconds = time.perf_counter() - begin
    shutil.rmtree(target)
    return seconds


def run(folder: Path, layout: str) -> dict[str, Any]:
    """One layout in fresh processes, with copies before and after."""
    source, target = folder / "source", folder / layout
    copies = [copy_seconds(source, folder / "copy")]
    command = [sys.executable, __file__, "--rank", str(source), str(target), layout]
    subprocess.run(command, check=True)
    copies.append(copy_seconds(source, folder / "copy"))
    ranks = [json.loads(p.read_text()) for p in sorted(folder.glob(f"{layout}.*.json"))]
    written = sorted(target.glob("*.safetensors"))
    same = len(written) == 2 and all(
        filecmp.cmp(source / f.name, f, shallow=False) for f in written
    )
    shutil.rmtree(target)
    size = sum(f.stat().st_size for f in source.glob("*.safetensors"))
    return {"bytes": size, "same": same, "copy_seconds": copies, "ranks": ranks}


def main() -> None:
    """Measure all layouts and write the result."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, default=Path("runs/hf-bridge"))
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--rank", nargs=3)
    options = parser.parse_args()
    if options.rank:
        rank(*options.rank)
        return
    folder: Path = options.folder
    if not (folder / "source").is_dir():
        make(folder / "source")
    commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True).stdout
    result = {
        "torch": torch.__version__,
        "lightning": L.__version__,
        "device": f"{os.cpu_count()} cores, {platform.machine()}",
        "commit": commit.strip(),
        "parameters": CONFIG.num_parameters(),
        "layouts": {n: [run(folder, n) for _ in range(options.repeat)] for n in LAYOUTS},
    }
    text = json.dumps(result, indent=1)
    for name, runs in result["layouts"].items():
        ranks = [rank for one in runs for rank in one["ranks"]]
        copy = statistics.median(s for one in runs for s in one["copy_seconds"])
        for what in ("import", "export"):
            seconds = statistics.median(rank[what]["seconds"] for rank in ranks)
            above = max(rank[what]["peak_mib"] - rank["shard_mib"] for rank in ranks)
            peak = max(rank[what]["peak_mib"] for rank in ranks)
            print(
                f"{name} {what}: {copy / seconds:.2f} of a copy's rate, {seconds:.1f} s;"
                f" peak {peak:.0f} MiB, {above:.0f} above the shard"
            )
    (Path(__file__).parent / "results" / f"hf-bridge-{date.today()}.json").write_text(text + "\n")
    shutil.rmtree(folder)


if __name__ == "__main__":
    main()
