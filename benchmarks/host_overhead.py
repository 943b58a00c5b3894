"""What do Lightning and the strategy add to a step, beside a bare loop over the same runtime?

In one process, on one model: first a loop that calls the runtime alone (micro-batches, reduction,
norm, clipping, optimizer step), then the same number of steps by the Trainer, then the loop again.
Steps are timed as users see them, without waiting for the device in between: the time of all steps
over their number.

    python benchmarks/host_overhead.py --shape a --compile --out results.json
"""

import argparse
import contextlib
import json
import time
from typing import Any

import lightning as L
import torch
from shapes import SHAPES, RandomTokens
from train_step import ceiling

from megatron_lightning.config import GPTConfig, RuntimeConfig
from megatron_lightning.config.training import OptimizerConfig, SchedulerConfig
from megatron_lightning.models import GPTModel
from megatron_lightning.strategies import MegatronStrategy
from megatron_lightning.utils.gradients import clip_factor


class Overhead(L.Callback):
    """Runs the bare loop before and after the Trainer's steps, and times both."""

    reads_gradients = reads_parameters = False

    def __init__(self, steps: int, warm: int) -> None:
        self.steps, self.warm = steps, warm
        self.bare: list[float] = []
        self.trainer_ms = 0.0
        self._start = 0.0

    def on_train_start(self, trainer: L.Trainer, module: Any) -> None:
        self.batches = list(trainer.datamodule)[:4]
        self._loop(trainer, self.warm)
        self.bare.append(self._loop(trainer, self.steps))

    def on_train_batch_start(self, trainer: L.Trainer, module: Any, batch: Any, index: int) -> None:
        if index == self.warm:
            torch.cuda.synchronize()
            self._start = time.perf_counter()

    def on_train_batch_end(
        self, trainer: L.Trainer, module: Any, outputs: Any, batch: Any, index: int
    ) -> None:
        if index == self.warm + self.steps - 1:
            torch.cuda.synchronize()
            self.trainer_ms = 1e3 * (time.perf_counter() - self._start) / self.steps
            self.bare.append(self._loop(trainer, self.steps))

    def _loop(self, trainer: L.Trainer, steps: int) -> float:
        """Milliseconds a step of the bare loop."""
        torch.cuda.synchronize()
        start = time.perf_counter()
        for index in range(steps):
            self._step(trainer, index)
        torch.cuda.synchronize()
        return 1e3 * (time.perf_counter() - start) / steps

    def _step(self, trainer: L.Trainer, index: int) -> None:
        strategy: Any = trainer.strategy
        update, optimizer = strategy.update, strategy.optimizers[0]
        batch = strategy.batch_to_device(self.batches[index % 4])
        update.open()
        update.begin_run()
        result = strategy._run(
            "training_step",
            batch,
            (index,),
            contextlib.nullcontext,
            training=True,
            reduce_now=True,
        )
        update.end_run()
        update.reduce(result.published.weight)
        update.fold(clip_factor(update.grad_norm(), 1.0))
        update.before_step()
        optimizer.step()
        update.finish_step(index + 1)


def main() -> None:
    """Measure and print one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", default="a", choices=sorted(SHAPES))
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--warm", type=int, default=4)
    parser.add_argument("--out", default="")
    args = parser.parse_args()
    shape = SHAPES[args.shape]
    config = GPTConfig(
        vocab_size=shape["vocab"],
        num_layers=shape["layers"],
        hidden_size=shape["hidden"],
        ffn_hidden_size=shape["ffn"],
        num_attention_heads=shape["heads"],
        num_query_groups=shape["groups"],
        max_position_embeddings=shape["seq"],
    )
    overhead = Overhead(args.steps, args.warm)
    trainer = L.Trainer(
        strategy=MegatronStrategy(runtime=RuntimeConfig(compile_layers=args.compile)),
        accelerator="gpu",
        devices=1,
        precision="bf16-mixed",
        max_steps=args.warm + args.steps,
        gradient_clip_val=1.0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[overhead],
    )
    model = GPTModel(config, OptimizerConfig(lr=1e-4), SchedulerConfig(lr_decay_style="constant"))
    trainer.fit(model, RandomTokens(shape, args.warm + args.steps))
    bare = sum(overhead.bare) / len(overhead.bare)
    result = {
        "shape": args.shape,
        "compile": args.compile,
        "bare_ms": [round(value, 2) for value in overhead.bare],
        "trainer_ms": round(overhead.trainer_ms, 2),
        "overhead": round(overhead.trainer_ms / bare - 1, 4),
        "ceiling_tflops": round(ceiling(), 1),
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "lightning": L.__version__,
    }
    print(json.dumps(result), flush=True)
    if args.out:
        with open(args.out, "a") as file:
            file.write(json.dumps(result) + "\n")


if __name__ == "__main__":
    main()
