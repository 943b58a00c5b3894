"""Do low precisions train? The same GPT on the same real text in each of them, losses side by side.

Text: the documentation and sources that every Python installation has, as bytes. Each precision
starts from the same weights and sees the same batches in the same order, the learning rate falls to
zero; what is compared is the mean training loss of the last sixth of the steps, over that of
bfloat16:

    python benchmarks/low_precision.py                      # on a GPU: 300 steps, 100M parameters
    python benchmarks/low_precision.py --size tiny --steps 100   # anywhere, minutes on a CPU

Limits: float16 within 0.5 % of bfloat16, FP8 within 1 %, simulated NVFP4 within 2 %; the exit
status is 1 where one is exceeded. Small differences grow over the steps, so bfloat16 is trained
twice: `bf16_again` cuts the batch into twice as many micro-batches, which changes nothing but the
order of sums. Its ratio is the spread that must be expected of any kind; the mean of both runs is
what the others are compared with. The limits hold as they stand, whatever the spread: one that is
smaller than it can't be judged by one run, in either direction. FP8 runs on the device's own units
on CUDA (compute capability 8.9 or newer), simulated elsewhere.
"""

import argparse
import json
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
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

LIMITS = {"fp32": 0.01, "fp16": 0.005, "nvfp4": 0.02}
FP8_LIMIT = 0.01
KINDS = (
    "bf16",
    "bf16_again",
    "fp16",
    "fp8_tensorwise",
    "fp8_delayed",
    "nvfp4",
    "fp8_rowwise",
    "mxfp8",
    "fp8_blockwise",
    "fp32",
)
SIZES: dict[str, dict[str, int]] = {
    "tiny": dict(layers=4, hidden=64, ffn=192, heads=4, sequence=64, batch=8, micro=8),
    "small": dict(layers=8, hidden=512, ffn=1408, heads=8, sequence=512, batch=64, micro=64),
    "medium": dict(layers=12, hidden=768, ffn=2048, heads=12, sequence=1024, batch=32, micro=16),
}


def corpus(max_bytes: int = 12 << 20) -> Tensor:
    """Bytes of the language reference and of the standard library's sources, in a fixed order."""
    parts = [text.encode() for text in python_help_texts()]
    folder = Path(os.__file__).parent
    for path in sorted(folder.glob("*.py")) + sorted(folder.glob("[a-z]*/*.py")):
        if "site-packages" not in path.parts and "test" not in path.parts:
            parts.append(path.read_bytes())
    joined = b"\n\n".join(parts)[:max_bytes]
    return torch.frombuffer(bytearray(joined), dtype=torch.uint8)


class TextBatches:
    """Windows at random places, the same for every precision. Not a DataLoader."""

    def __init__(self, text: Tensor, size: dict[str, int], steps: int) -> None:
        self.text, self.size, self.steps = text, size, steps

    def __len__(self) -> int:
        return self.steps

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        length = self.size["sequence"] + 1
        for step in range(self.steps):
            generator = torch.Generator().manual_seed(step)
            starts = torch.randint(
                len(self.text) - length, (self.size["batch"],), generator=generator
            )
            tokens = torch.stack([self.text[s : s + length] for s in starts.tolist()]).long()
            mask = torch.ones(tokens.shape[0], length - 1)
            yield {"tokens": tokens[:, :-1], "labels": tokens[:, 1:], "loss_mask": mask}


class Losses(L.Callback):
    """Keeps the loss of every step on the device."""

    def __init__(self) -> None:
        self.values: list[Tensor] = []

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, *_: Any) -> None:
        self.values.append(outputs["loss"].detach().float())


def train(kind: str, size: dict[str, int], text: Tensor, steps: int, device: str) -> list[float]:
    """Losses of all steps in one precision."""
    quantization, options = None, {}
    if kind == "fp32":
        options["precision"] = "32-true"
    elif kind == "fp16" and device == "cpu":
        options["plugins"] = [MegatronPrecision(MixedPrecision("16-mixed", "cpu"))]
    else:
        options["precision"] = "16-mixed" if kind == "fp16" else "bf16-mixed"
    if kind not in ("fp32", "bf16", "bf16_again", "fp16"):
        runs = kind in REAL_RECIPES and device_problem(torch.device(device)) is None
        quantization = QuantizationConfig(recipe=kind, simulate=not runs)  # type: ignore[arg-type]
    config = GPTConfig(
        vocab_size=256,
        num_layers=size["layers"],
        hidden_size=size["hidden"],
        ffn_hidden_size=size["ffn"],
        num_attention_heads=size["heads"],
        max_position_embeddings=size["sequence"],
    )
    model = GPTModel(
        config,
        OptimizerConfig(lr=1e-3),
        SchedulerConfig(lr_warmup_steps=max(1, steps // 10), lr_decay_steps=steps, min_lr=0.0),
        loss_normalization="micro_batch",  # a mean: the usual range of loss scales
    )
    losses = Losses()
    trainer = L.Trainer(
        strategy=MegatronStrategy(
            micro_batch_size=size["micro"] // (2 if kind == "bf16_again" else 1),
            quantization=quantization,
            loss_scale=LossScaleConfig(growth_interval=100),
        ),
        accelerator="gpu" if device == "cuda" else "cpu",
        devices=1,
        max_steps=steps,
        gradient_clip_val=1.0,
        logger=False,
        callbacks=[losses],
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        limit_val_batches=0,
        **options,
    )
    L.seed_everything(1, verbose=False)
    trainer.fit(model, TextBatches(text, size, steps))  # type: ignore[arg-type]
    return [float(value) for value in losses.values]


def limit_of(kind: str) -> float:
    """Largest relative distance from bfloat16's loss."""
    return LIMITS.get(kind, FP8_LIMIT)


def compare(
    kinds: list[str], size: dict[str, int], steps: int, device: str, out: str = ""
) -> dict[str, dict[str, float]]:
    """Final loss, ratio to bfloat16's and seconds by precision; bfloat16 comes first, and then
    again where that is asked for. The file `out` is written anew after each.
    """
    text = corpus()
    rows: dict[str, dict[str, float]] = {}
    again = ("bf16_again",) if "bf16_again" in kinds else ()
    for kind in dict.fromkeys(("bf16", *again, *kinds)):
        begin = time.perf_counter()
        losses = train(kind, size, text, steps, device)
        last = losses[-max(1, steps // 6) :]
        loss = sum(last) / len(last)
        plain = [row["loss"] for name, row in rows.items() if name in ("bf16", "bf16_again")]
        ratio = loss * len(plain) / sum(plain) if plain else 1.0
        rows[kind] = {
            "loss": loss,
            "ratio": ratio,
            "first_loss": losses[0],
            "seconds": time.perf_counter() - begin,
        }
        print(
            f"{kind:<15} loss {losses[0]:.4f} -> {loss:.4f}  ratio to bf16 {ratio:.4f}"
            f"  (limit {limit_of(kind):.3f})  {rows[kind]['seconds']:.0f} s",
            flush=True,
        )
        if out:
            write(out, rows, size, steps, device)
    return rows


def write(
    out: str, rows: dict[str, dict[str, float]], size: dict[str, int], steps: int, device: str
) -> None:
    """The numbers so far, with what they were measured on."""
    record = {
        "size": size,
        "steps": steps,
        "device": torch.cuda.get_device_name() if device == "cuda" else "cpu",
        "torch": torch.__version__,
        "lightning": L.__version__,
        "date": time.strftime("%Y-%m-%d"),
        "limits": {kind: limit_of(kind) for kind in rows if not kind.startswith("bf16")},
        "rows": rows,
    }
    Path(out).write_text(json.dumps(record, indent=1) + "\n")


def main() -> None:
    """Command line."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--size", choices=SIZES, default="medium" if device == "cuda" else "tiny")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--out", default="", help="JSON file for the numbers")
    options = parser.parse_args()
    rows = compare(options.kinds, SIZES[options.size], options.steps, device, options.out)
    judged = {kind: row for kind, row in rows.items() if kind != "bf16_again"}
    far = [kind for kind, row in judged.items() if not abs(row["ratio"] - 1) <= limit_of(kind)]
    if far:
        sys.exit(f"outside of its limit: {', '.join(far)}")


if __name__ == "__main__":
    main()
