"""`self.log` with every option, loggers and metrics: equal on all ranks and to one process."""

import csv
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.loggers import CSVLogger
from torchmetrics import MeanMetric, SumMetric

from tests.lightning_cases import (
    Case,
    Net,
    Probe,
    Rows,
    assert_same,
    cases_of,
    numbers,
)


class Logging(Net):
    """Logs one number in every way there is."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        x = batch[0]
        self.log("step", loss, on_step=True, on_epoch=False)
        self.log("epoch", loss, on_step=False, on_epoch=True)
        self.log("both", loss, on_step=True, on_epoch=True, prog_bar=True)
        self.log("sum", float(len(x)), reduce_fx="sum", on_epoch=True, sync_dist=True)
        self.log("max", x.max(), reduce_fx="max", on_step=True, on_epoch=True)
        self.log("min", x.min(), reduce_fx=torch.min, on_step=False, on_epoch=True)
        self.log("weighted", loss, batch_size=len(x) * (1 + batch_idx), on_epoch=True)
        self.log("quiet", loss, logger=False)
        self.log_dict({"a/one": loss, "a/two": 2 * loss}, on_step=True, on_epoch=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        loss = self.loss(batch)
        self.log("val", loss)
        self.log("val_both", loss, on_step=True, on_epoch=True)
        self.log("val_together", loss, add_dataloader_idx=False) if dataloader_idx == 0 else None
        self.log("val_max", batch[0].max(), reduce_fx="max")

    def on_train_epoch_end(self) -> None:
        self.log("in_hook", float(self.current_epoch), sync_dist=True)
        self.log("summed_in_hook", 3.0 / ranks_of(self), reduce_fx="sum", sync_dist=True)
        if self.trainer.is_global_zero:
            self.log("of_rank_zero", 2.0, rank_zero_only=True)


def ranks_of(module: L.LightningModule) -> int:
    """Data-parallel ranks: what a sum in a hook runs over."""
    strategy = module.trainer.strategy
    mesh = getattr(strategy, "mesh", None)
    return 1 if mesh is None else mesh.dp.size


def log_options(case: Case) -> dict[str, Any]:
    probe, rows = Probe(), Rows()
    trainer = case.trainer(probe, logger=rows, max_epochs=2, log_every_n_steps=2)
    trainer.fit(Logging(), case.train_loader(), [case.loader(2, seed=6), case.loader(3, seed=7)])
    metrics = numbers(trainer.callback_metrics)
    assert ("of_rank_zero" in metrics) == (case.rank == 0)
    metrics.pop("of_rank_zero", None)
    return {
        "callback": metrics,
        "progress_bar": numbers(trainer.progress_bar_metrics),
        "rank0": {"rows": [numbers(row) for row in rows.rows]},
    }


def csv_logger(case: Case) -> dict[str, Any]:
    """The file of the logger, written by rank 0 alone, with the hyper-parameters."""

    class Saved(Net):
        def __init__(self, lr: float = 0.1, name: str = "net") -> None:
            super().__init__(lr)
            self.save_hyperparameters()

    trainer = case.trainer(logger=CSVLogger(case.folder / case.layout), log_every_n_steps=1)
    trainer.fit(Saved(name="mine"), case.train_loader(), case.loader(2, seed=6))
    trainer.strategy.barrier()
    [folder] = list((case.folder / case.layout).rglob("version_*"))
    return {"rows": read_csv(folder), "hyper_parameters": (folder / "hparams.yaml").read_text()}


def read_csv(folder: Path) -> list[dict[str, float]]:
    with (folder / "metrics.csv").open() as file:
        rows = list(csv.DictReader(file))
    return [{key: float(value) for key, value in row.items() if value} for row in rows]


class Measured(Net):
    """Logs torchmetrics objects, and what it computes from them."""

    def __init__(self) -> None:
        super().__init__()
        self.mean, self.total, self.seen = MeanMetric(), SumMetric(), SumMetric()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        loss = self.loss(batch)
        self.mean.update(loss, len(batch[0]))
        self.total.update(len(batch[0]))
        self.seen.update(len(batch[0]))
        self.log("mean", self.mean)
        self.log("total", self.total, on_epoch=True)

    def on_validation_epoch_end(self) -> None:
        self.log("seen", self.seen.compute())
        self.seen.reset()


def defaults(case: Case) -> dict[str, Any]:
    """The default logger and checkpoint, under `default_root_dir`; hyper-parameters on and off."""
    root = case.folder / case.layout
    trainer = case.trainer(logger=True, enable_checkpointing=True, default_root_dir=str(root))
    trainer.fit(Net(), case.train_loader(2))
    found = sorted(
        path.relative_to(root).as_posix().replace(path.name, path.suffix or path.name)
        for path in root.glob("*/*/*")
    )
    hyper_parameters = []
    for on in (True, False):
        rows, module = Rows(), Net()
        module.save_hyperparameters({"width": 8})
        trainer = case.trainer(logger=rows, enable_autolog_hparams=on)
        trainer.fit(module, case.train_loader(1))
        hyper_parameters.append(rows.hyper_parameters)
    return {"rank0": {"found": found, "hyper_parameters": hyper_parameters}}


def accumulated(case: Case) -> dict[str, Any]:
    """One row for each optimizer step, its value the mean of the whole window (C10)."""
    path = case.folder / case.layout
    probe = Probe()
    logger = CSVLogger(path)
    trainer = case.trainer(probe, logger=logger, accumulate_grad_batches=4, log_every_n_steps=1)
    trainer.fit(Net(), case.train_loader(8))
    trainer.strategy.barrier()
    [folder] = list(path.rglob("version_*"))
    rows = [row for row in read_csv(folder) if "train_loss_step" in row]
    # Lightning alone logs the last batch of a window; a batch's loss is a quarter of the window's
    windows = [sum(probe.losses[0:4]), sum(probe.losses[4:8])]
    logged = windows if case.alone else [row["train_loss_step"] for row in rows]
    return {
        "logged": logged,
        "steps": [row["step"] for row in rows],
        "epoch": float(trainer.callback_metrics["train_loss_epoch"]),
    }


def metric_objects(case: Case) -> dict[str, Any]:
    return {"metrics": case.fit(module=Measured())["metrics"]}


SCENARIOS = [log_options, csv_logger, accumulated, defaults]


GROUPS = [
    (("dp", "tp", "pp"), SCENARIOS),
    (("dp", "tp"), [metric_objects]),
    (("pp_dp",), [accumulated]),
]


@pytest.mark.parametrize(("scenario", "layout", "group"), cases_of(GROUPS))
def test_same_meaning(scenario: Any, layout: str, group: Any) -> None:
    assert_same(scenario, layout, group)
