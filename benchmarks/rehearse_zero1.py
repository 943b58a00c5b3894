"""What do ZeRO-1's collectives cost a step of shape (a) on two GPUs, rehearsed on one?

    python benchmarks/rehearse_zero1.py --out results.json

One GPU takes the part of one of two: half of the optimizer's work, and in place of NCCL's kernels
some that hold `--multiprocessors` for as long as a bucket needs at `--bandwidth` (bytes that leave
a rank, a second). What they lack are NCCL's own traffic and the other rank, which may be late;
the weights of the other half are never updated. Variants take turns step by step, so that all see
the same device: medians in milliseconds, the device synchronised around each step.
"""

import argparse
import gc
import json
import statistics
import time
from dataclasses import dataclass, replace
from typing import Any

import lightning as L
import torch
from products_beside import hold
from shapes import SHAPES, RandomTokens
from torch import Tensor

from megatron_lightning.config import DataParallelConfig, GPTConfig, RuntimeConfig
from megatron_lightning.config.training import OptimizerConfig, SchedulerConfig
from megatron_lightning.models import GPTModel
from megatron_lightning.optim import clip, shards
from megatron_lightning.parallel import flat
from megatron_lightning.parallel.data import GradientBuckets
from megatron_lightning.parallel.mesh import MeshAxis, ParallelMesh
from megatron_lightning.strategies import MegatronStrategy


@dataclass(frozen=True, kw_only=True)
class Variant:
    """What happens beside a step."""

    reduces: bool = False
    gathers: bool = False
    by_stages: bool = True
    """Gather a bucket as soon as it is updated; False: all after the whole step."""
    at_attention: bool = False
    """Reduce what is ready when the backward pass comes to a layer's attention; False: at once."""
    priority: int = 0
    multiprocessors: int = 0
    """Not `--multiprocessors`."""


VARIANTS = {
    "alone": Variant(),
    "reductions": Variant(reduces=True),
    "gathers": Variant(gathers=True),
    "gathers at the end": Variant(gathers=True, by_stages=False),
    "both": Variant(reduces=True, gathers=True),
    "both, 32 multiprocessors": Variant(reduces=True, gathers=True, multiprocessors=32),
    "both, high priority": Variant(reduces=True, gathers=True, priority=-1),
    "reductions at attention": Variant(reduces=True, at_attention=True),
    "reductions at attention, high priority": Variant(reduces=True, at_attention=True, priority=-1),
}


class Work:
    """In place of NCCL's."""

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self.done = torch.cuda.Event()
        self.done.record(stream)

    def wait(self) -> None:
        torch.cuda.current_stream().wait_event(self.done)


class Rehearsal:
    """Stands in for the collectives, and knows the variant of the present step."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.variant = Variant()
        self.streams = {p: torch.cuda.Stream(priority=p) for p in (0, -1)}
        self.attentions = 0

    def take_over(self) -> None:
        """Put everything in place, before the mesh is made."""
        single = ParallelMesh.single

        def two(device: Any = "cpu") -> ParallelMesh:
            mesh = single(device)
            pair = MeshAxis(name="dp_shard", size=2, ranks=(0, 1), group=object())
            return replace(mesh, axes={**mesh.axes, "dp_shard": pair})

        changed: Any = ParallelMesh
        changed.single = two
        flat.reduce_scatter_single = self.reduce
        shards.all_gather_single = self.gather
        clip.all_reduce_ = lambda value, axis, op="sum": value
        self._order_stages()
        self._delay_reductions()

    def reduce(self, own: Tensor, data: Tensor, **options: Any) -> Work:
        return self._beside(data, self.variant.reduces)

    def gather(self, data: Tensor, own: Tensor, **options: Any) -> Work:
        return self._beside(data, self.variant.gathers)

    def _beside(self, data: Tensor, wanted: bool) -> Work:
        variant = self.variant
        stream = self.streams[variant.priority]
        stream.wait_stream(torch.cuda.current_stream())
        if wanted:
            milliseconds = data.nbytes / 2 / self.args.bandwidth / 1e6
            with torch.cuda.stream(stream):
                hold(variant.multiprocessors or self.args.multiprocessors, milliseconds)
        return Work(stream)

    def _order_stages(self) -> None:
        before: Any = shards.ParameterShards.stages

        def stages(held: Any) -> Any:
            return before(held) if self.variant.by_stages else []

        changed: Any = shards.ParameterShards
        changed.stages = stages

    def _delay_reductions(self) -> None:
        """Let buckets that are full wait for the next attention, unless the last has come."""
        layers = SHAPES[self.args.shape]["layers"]
        buckets: Any = GradientBuckets
        slot: Any = flat.Slot
        arm, launch, add = buckets.arm, buckets._launch_ready, slot.add_product
        armed: list[Any] = []

        def arm_and_count(held: Any, *args: Any) -> None:
            self.attentions = 0
            armed[:] = [held]
            arm(held, *args)

        def launch_or_wait(held: Any) -> None:
            if not self.variant.at_attention or self.attentions >= layers:
                launch(held)

        def add_and_tell(held: Any, *args: Any) -> None:
            add(held, *args)
            if "linear_proj" in held.name and held.bucket.armed:
                self.attentions += 1
                launch(armed[0])

        buckets.arm, buckets._launch_ready, slot.add_product = (
            arm_and_count,
            launch_or_wait,
            add_and_tell,
        )


class Turns(L.Callback):
    """Times steps, each of the next variant."""

    reads_gradients = reads_parameters = False

    def __init__(self, rehearsal: Rehearsal, warm: int) -> None:
        self.rehearsal, self.warm = rehearsal, warm
        self.milliseconds: dict[str, list[float]] = {name: [] for name in VARIANTS}
        self.name, self.start = "alone", 0.0

    def on_fit_start(self, trainer: L.Trainer, module: Any) -> None:
        gc.disable()

    def on_train_batch_start(self, trainer: L.Trainer, module: Any, batch: Any, index: int) -> None:
        self.name = list(VARIANTS)[index % len(VARIANTS)]
        self.rehearsal.variant = VARIANTS[self.name]
        torch.cuda.synchronize()
        self.start = time.perf_counter()

    def on_train_batch_end(
        self, trainer: L.Trainer, module: Any, outputs: Any, batch: Any, index: int
    ) -> None:
        torch.cuda.synchronize()
        if index >= self.warm:
            self.milliseconds[self.name].append(1e3 * (time.perf_counter() - self.start))


def main() -> None:
    """Train, and print a line a variant."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", default="a", choices=sorted(SHAPES))
    parser.add_argument("--multiprocessors", type=int, default=16)
    parser.add_argument("--bandwidth", type=float, default=235.0, help="GB/s")
    parser.add_argument("--rounds", type=int, default=12, help="steps of each variant")
    parser.add_argument("--out", default="")
    args = parser.parse_args()
    shape = SHAPES[args.shape]
    rehearsal = Rehearsal(args)
    rehearsal.take_over()
    warm = len(VARIANTS)
    steps = warm + args.rounds * len(VARIANTS)
    turns = Turns(rehearsal, warm)
    trainer = L.Trainer(
        strategy=MegatronStrategy(
            data_parallel=DataParallelConfig(sharding="optimizer"),
            runtime=RuntimeConfig(compile_layers=True),
        ),
        accelerator="gpu",
        devices=1,
        precision="bf16-mixed",
        max_steps=steps,
        gradient_clip_val=1.0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[turns],
    )
    config = GPTConfig(
        vocab_size=shape["vocab"],
        num_layers=shape["layers"],
        hidden_size=shape["hidden"],
        ffn_hidden_size=shape["ffn"],
        num_attention_heads=shape["heads"],
        num_query_groups=shape["groups"],
        max_position_embeddings=shape["seq"],
    )
    schedule = SchedulerConfig(lr_decay_style="constant")
    trainer.fit(GPTModel(config, OptimizerConfig(lr=1e-4), schedule), RandomTokens(shape, steps))
    rows = {
        name: {"ms": round(statistics.median(times), 2), "least": round(min(times), 2)}
        for name, times in turns.milliseconds.items()
    }
    for name, row in rows.items():
        print(f"{name:40} {row['ms']:8.2f} ms, least {row['least']:8.2f}", flush=True)
    if args.out:
        options = vars(args) | {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__}
        with open(args.out, "w") as file:
            json.dump({"options": options, "rows": rows}, file, indent=1)


if __name__ == "__main__":
    main()
