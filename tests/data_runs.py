"""Whole Lightning runs over small corpora that record which samples each step trains on."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np

from megatron_lightning.callbacks import TokenLedger
from megatron_lightning.data import IndexedDatasetWriter, PretrainingDataModule
from megatron_lightning.data.account import ACCOUNT
from megatron_lightning.models.gpt import GPTModel
from tests.layout_runs import make_strategy, tiny_config

SEQUENCE = 16
EOD = 256


def write_corpus(prefix: Path, documents: int, seed: int) -> str:
    """Random documents of 3 to 40 tokens, each with an end-of-document token."""
    random = np.random.default_rng(seed)
    with IndexedDatasetWriter(prefix, "int32") as writer:
        for _ in range(documents):
            length = int(random.integers(3, 40))
            tokens = [*random.integers(0, EOD, length - 1).tolist(), EOD]
            writer.add_document(tokens, [length])
    return str(prefix)


@dataclass(frozen=True, kw_only=True)
class DataRun:
    """One run; travels to the ranks by pickle."""

    data: dict[str, Any]
    layout: dict[str, Any] = field(default_factory=dict)
    trainer: dict[str, Any] = field(default_factory=dict)
    resume_from: str | None = None
    save_to: str | None = None
    module: type[L.LightningDataModule] = PretrainingDataModule


class Watcher(L.Callback):
    """Keeps the sample ids of this rank's batches, with their epochs."""

    reads_parameters = False

    def __init__(self) -> None:
        self.batches: list[list[tuple[int, int]]] = []
        self.rates: list[float] = []

    def on_train_batch_start(self, trainer: L.Trainer, module: Any, batch: Any, index: int) -> None:
        account = batch[ACCOUNT]
        epoch = trainer.datamodule.state_dict()["loader"]["epoch"]
        self.batches.append([(epoch, sample) for sample in account.sample_id.tolist()])
        self.rates.append(trainer.optimizers[0].param_groups[0]["lr"])


def fit(rank: int, world_size: int, run: DataRun) -> dict[str, Any]:
    """Trains in this rank; returns what it read and counted."""
    watcher, ledger = Watcher(), TokenLedger(every_n_steps=2)
    options = dict(
        accelerator="cpu",
        devices=world_size,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        limit_val_batches=0,
    )
    trainer = L.Trainer(
        strategy=make_strategy(run.layout),
        callbacks=[watcher, ledger],
        **{**options, **run.trainer},
    )
    model = GPTModel(tiny_config(num_layers=2, hidden_size=32))
    data = run.module(**run.data)
    trainer.fit(model, datamodule=data, ckpt_path=run.resume_from)
    if run.save_to is not None:
        trainer.save_checkpoint(run.save_to)
    return {
        "batches": watcher.batches,
        "dp": trainer.strategy.mesh.dp.rank,
        "rates": watcher.rates,
        "ledger": ledger.state_dict(),
        "counts": ledger.counts,
        "step": trainer.global_step,
        "consumed": data.consumed_samples,
    }


def global_order(ranks: list[dict[str, Any]]) -> list[list[tuple[int, int]]]:
    """Samples of each step in the order of data-parallel ranks; the ranks of one model copy must
    have read the same.
    """
    copies: dict[int, list[list[tuple[int, int]]]] = {}
    for rank in ranks:
        assert copies.setdefault(rank["dp"], rank["batches"]) == rank["batches"]
    parts = [copies[number] for number in sorted(copies)]
    return [[sample for part in step for sample in part] for step in zip(*parts, strict=True)]
