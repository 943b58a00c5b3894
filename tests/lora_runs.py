"""Fine-tuning runs with adapters: a small model in any layout, and recorded runs of `peft`."""

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import lightning as L
import torch
from torch import Tensor

from megatron_lightning.bridge import from_hf
from megatron_lightning.config import LoraConfig
from megatron_lightning.models import GPTModel
from tests.hf_models import Batches
from tests.layout_runs import make_strategy

DATA = Path(__file__).parent / "data"
RECORDED = DATA / "lora"
GOLDEN = Path(__file__).parents[2] / "shared" / "golden" / "models"
STEPS = 10
TOLERANCE = 1e-4
"""Of losses over ten steps, as the rounding of float32 asks for."""
LEARNING_RATE = 5e-3


class PlainAdamW(GPTModel):
    """The optimizer of the recorded runs, over what is trained."""

    def configure_optimizers(self) -> Any:
        trained = [p for p in self.parameters() if p.requires_grad]
        return torch.optim.AdamW(trained, lr=LEARNING_RATE, weight_decay=0.01)


class Losses(L.Callback):
    """The loss of every step."""

    def __init__(self) -> None:
        self.losses: list[float] = []

    def on_train_batch_end(
        self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self.losses.append(float(outputs["loss"]))


def batch_of(vocab_size: int, index: int) -> dict[str, Tensor]:
    """Four samples of 12 tokens; the first three of each are a prompt, without loss."""
    generator = torch.Generator().manual_seed(77 + index % 3)
    ids = torch.randint(0, vocab_size, (4, 12), generator=generator)
    labels = torch.full_like(ids, -100)
    labels[:, 2:-1] = ids[:, 3:]
    return {"tokens": ids, "labels": labels, "loss_mask": (labels >= 0).float()}


class Resumable(Batches):
    """Batches that know which one is next."""

    position = 0

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        start, self.position = self.position, 0
        for index in range(start, len(self.batches)):
            self.position = index + 1
            yield self.batches[index]

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.position = state["position"]


class Data(L.LightningDataModule):
    """Every data rank's samples of these batches. Not DataLoaders, so Lightning leaves them
    alone.
    """

    def __init__(self, vocab_size: int, batches: int) -> None:
        super().__init__()
        self.vocab_size, self.batches = vocab_size, batches

    def train_dataloader(self) -> Resumable:
        assert self.trainer is not None
        place = self.trainer.strategy.distributed_sampler_kwargs
        ranks, rank = place["num_replicas"], place["rank"]
        whole = [batch_of(self.vocab_size, index) for index in range(self.batches)]
        return Resumable(*({k: v.chunk(ranks)[rank] for k, v in b.items()} for b in whole))


@dataclass(frozen=True, kw_only=True)
class LoraRun:
    """One run. Travels to ranks by pickle."""

    base: Path
    adapters: Path | None = None
    """Folder of `peft` to begin from; else `lora`."""
    lora: LoraConfig = field(default_factory=LoraConfig)
    layout: dict[str, Any] = field(default_factory=dict)
    trainer: dict[str, Any] = field(default_factory=dict)
    steps: int = STEPS
    start: Path | None = None
    """Checkpoint to resume from."""
    save: Path | None = None
    """Where a checkpoint goes."""
    export: Path | None = None
    """Folder for the adapters and the merged model."""

    def module(self) -> GPTModel:
        model = from_hf(self.base, model_class=PlainAdamW)
        return (
            model.add_lora(self.lora)
            if self.adapters is None
            else model.load_adapters(self.adapters)
        )


def train(rank: int, world_size: int, run: LoraRun) -> dict[str, Any]:
    """Fit in this rank: losses, logits after it, and names that changed."""
    model, losses = run.module(), Losses()
    vocab = model.config.vocab_size
    accumulate = run.trainer.get("accumulate_grad_batches", 1)
    options = dict(
        accelerator="cpu",
        devices=world_size,
        max_steps=run.steps,
        gradient_clip_val=1.0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
    )
    trainer = L.Trainer(
        strategy=make_strategy(run.layout), callbacks=[losses], **{**options, **run.trainer}
    )
    trainer.fit(model, Data(vocab, run.steps * accumulate), ckpt_path=run.start)
    if run.save is not None:
        trainer.save_checkpoint(run.save)
    if run.export is not None:
        model.save_adapters(run.export / "adapters")
        model.save_hf(run.export / "merged", merge_adapters=True)
    (logits,) = trainer.predict(model, Batches(batch_of(vocab, 0)))  # type: ignore[misc]
    return {"losses": losses.losses, "logits": logits.cpu()}


def recorded(name: str) -> dict[str, Any]:
    """What `peft` computed: see `tests/data/lora/make.py`."""
    return json.loads((RECORDED / name / "run.json").read_text())
