"""One run of `low_precision.py`: a GPT trained in one precision on the text of the Python
installation, and its loss on text that was held out.

Whatever is the same for all precisions stands here: text, batches, model, learning rate, and the
measurement in float32.
"""

import os
import tempfile
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from statistics import fmean
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
