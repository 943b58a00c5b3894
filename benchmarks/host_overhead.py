"""What do Lightning and the strategy add to a step, beside a bare loop over the same runtime?

In one process, on one model, turn about: a block of steps that call the runtime alone
(micro-batches, reduction, norm, clipping, optimizer step), the same number of steps by the Trainer,
the loop again, and so on. Each block of the Trainer is compared with the mean of its two
neighbours, so that a device that slows down while it gets warm cancels out; the result is the
median over the blocks. Steps are timed as users see them, without waiting for the device in
between: the time of a block's steps over their number.

    python benchmarks/host_overhead.py --shape a --compile --out results.json
    python benchmarks/host_overhead.py --shape tiny     # anywhere: does it run?
"""

import argparse
import contextlib
import gc
import json
import statistics
import time
from typing import Any

import lightning as L
import torch
from shapes import SHAPES, RandomTokens, synchronize

from megatron_lightning.config import GPTConfig, RuntimeConfig
from megatron_lightning.config.training import OptimizerConfig, SchedulerConfig
from megatron_lightning.models import GPTModel
from megatron_lightning.strategies import MegatronStrategy
from megatron_lightning.utils.gradients import clip_factor


class Overhead(L.Callback):
    """Runs blocks of the bare loop between blocks of the Trainer's steps, and times both."""

    reads_gradients = reads_parameters = False

    def __init__(self, batches: RandomTokens, *, warm: int, steps: int) -> None:
        self.batches = list(batches)[:4]
        self.warm, self.steps = warm, steps
        self.bare: list[float] = []
        self.trainer: list[float] = []
        self._start = 0.0

    def on_train_start(self, trainer: L.Trainer, module: Any) -> None:
        gc.collect()
        gc.disable()
        self._loop(trainer, self.warm)

    def on_train_batch_end(
        self, trainer: L.Trainer, module: Any, outputs: Any, batch: Any, index: int
    ) -> None:
        done = index + 1 - self.warm
        if done < 0 or done % self.steps:
            return
        if done:
            synchronize()
            self.trainer.append(1e3 * (time.perf_counter() - self._start) / self.steps)
        self.bare.append(self._loop(trainer, self.steps))
        self._start = time.perf_counter()

    def on_train_end(self, trainer: L.Trainer, module: Any) -> None:
        gc.enable()

    def overheads(self) -> list[float]:
        """Of each of the Trainer's blocks: its time over that of the bare loops beside it, - 1."""
        neighbours = zip(self.bare, self.bare[1:], strict=False)
        return [
            ours / statistics.mean(pair) - 1
            for ours, pair in zip(self.trainer, neighbours, strict=True)
        ]

    def _loop(self, trainer: L.Trainer, steps: int) -> float:
        """Milliseconds a step of the bare loop."""
        synchronize()
        start = time.perf_counter()
        for index in range(steps):
            self._step(trainer, index)
        synchronize()
        return 1e3 * (time.perf_counter() - start) / steps

    def _step(self, trainer: L.Trainer, index: int) -> None:
        strategy: Any = trainer.strategy
        update, optimizer = strategy.update, strategy.optimizers[0]
        batch = strategy.batch_to_device(self.batches[index % 4])
        update.open()
        update.begin_run()
        result = strategy.steps.train(batch, (index,), contextlib.nullcontext, reduce_now=True)
        update.end_run()
        update.reduce(result.published.weight)
        update.fold(clip_factor(update.grad_norm(), 1.0))
        update.before_step()
        optimizer.step()
        update.finish_step(index + 1)


def measure(shape: dict[str, Any], args: argparse.Namespace) -> Overhead:
    """Train `--warm` steps and `--rounds` blocks of `--steps` steps."""
    config = GPTConfig(
        vocab_size=shape["vocab"],
        num_layers=shape["layers"],
        hidden_size=shape["hidden"],
        ffn_hidden_size=shape["ffn"],
        num_attention_heads=shape["heads"],
        num_query_groups=shape["groups"],
        max_position_embeddings=shape["seq"],
    )
    total = args.warm + args.rounds * args.steps
    batches = RandomTokens(shape, total)
    overhead = Overhead(batches, warm=args.warm, steps=args.steps)
    trainer = L.Trainer(
        strategy=MegatronStrategy(runtime=RuntimeConfig(compile_layers=args.compile)),
        accelerator="gpu" if torch.cuda.is_available() else "cpu",
        devices=1,
        precision="bf16-mixed",
        max_steps=total,
        gradient_clip_val=1.0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[overhead],
    )
    model = GPTModel(config, OptimizerConfig(lr=1e-4), SchedulerConfig(lr_decay_style="constant"))
    trainer.fit(model, batches)
    return overhead


def main() -> None:
    """Measure and print one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", default="a", choices=sorted(SHAPES))
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--rounds", type=int, default=5, help="blocks of the Trainer's steps")
    parser.add_argument("--steps", type=int, default=6, help="steps of a block")
    parser.add_argument("--warm", type=int, default=4)
    parser.add_argument("--out", default="")
    args = parser.parse_args()
    overhead = measure(SHAPES[args.shape], args)
    found = overhead.overheads()
    result = {
        "shape": args.shape,
        "compile": args.compile,
        "bare_ms": [round(value, 2) for value in overhead.bare],
        "trainer_ms": [round(value, 2) for value in overhead.trainer],
        "overheads": [round(value, 5) for value in found],
        "overhead": round(statistics.median(found), 5),
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        "torch": torch.__version__,
        "lightning": L.__version__,
        "date": time.strftime("%Y-%m-%d"),
    }
    print(json.dumps(result), flush=True)
    if args.out:
        with open(args.out, "a") as file:
            file.write(json.dumps(result) + "\n")


if __name__ == "__main__":
    main()
