"""Lightning's built-in callbacks in every layout, against Lightning's own single process."""

import io
import logging
from contextlib import redirect_stdout
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import (
    BackboneFinetuning,
    BaseFinetuning,
    BasePredictionWriter,
    DeviceStatsMonitor,
    EarlyStopping,
    EMAWeightAveraging,
    LambdaCallback,
    LearningRateFinder,
    LearningRateMonitor,
    ModelCheckpoint,
    ModelPruning,
    ModelSummary,
    RichModelSummary,
    RichProgressBar,
    SpikeDetection,
    StochasticWeightAveraging,
    ThroughputMonitor,
    Timer,
    TQDMProgressBar,
    WeightAveraging,
)
from lightning.pytorch.tuner import Tuner
from torch import nn

from tests.harness import RankError, run_ranks_fresh
from tests.lightning_cases import (
    LAYOUTS,
    SOME,
    Case,
    Net,
    Rows,
    assert_same,
    cases_of,
    numbers,
    run_all,
)

# ---------------------------------------------------------------------- saving and stopping


class Told(Net):
    """Logs the validation losses that it is told, one an epoch."""

    def __init__(self, values: list[float]) -> None:
        super().__init__()
        self.values = values

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.loss(batch)
        self.log("val_loss", self.values[self.current_epoch])


def files(case: Case) -> list[str]:
    """Names of checkpoints, on rank 0, which may still be deleting one while others look; those of
    this package are folders.
    """
    if case.rank > 0:
        return []
    return sorted(path.name for path in (case.folder / case.layout).glob("**/*.ckpt"))


def best_and_last(case: Case) -> dict[str, Any]:
    """Metrics that tie, and one that is no number (C53)."""
    saver = ModelCheckpoint(
        case.folder / case.layout,
        filename="{epoch}",
        monitor="val_loss",
        save_top_k=2,
        save_last=True,
    )
    stop = EarlyStopping("val_loss", patience=2, check_finite=False)
    values = [1.0, 0.5, 0.5, float("nan"), 0.5, 0.25, 0.25]
    facts = case.fit(
        saver, stop, module=Told(values), max_epochs=7, enable_checkpointing=True, logger=False
    )
    return {
        "epoch": facts["epoch"],
        "losses": facts["losses"],
        "stopped": stop.stopped_epoch,
        "best": saver.best_model_path.rpartition("/")[2],
        "score": saver.best_model_score,
        "kept": {path.rpartition("/")[2]: v for path, v in saver.best_k_models.items()},
        "rank0": {"files": files(case)},
    }


def not_finite(case: Case) -> dict[str, Any]:
    stop = EarlyStopping("val_loss", patience=5)
    facts = case.fit(stop, module=Told([1.0, float("nan"), 0.5]), max_epochs=3)
    return {"epoch": facts["epoch"], "stopped": stop.stopped_epoch}


def when_to_save(case: Case) -> dict[str, Any]:
    folder = case.folder / case.layout
    savers = [
        ModelCheckpoint(folder / "steps", every_n_train_steps=2, save_top_k=-1),
        ModelCheckpoint(folder / "time", train_time_interval=timedelta(seconds=0), save_top_k=-1),
        ModelCheckpoint(folder / "epochs", every_n_epochs=2, save_top_k=-1),
        ModelCheckpoint(folder / "weights", save_weights_only=True, filename="w-{epoch}"),
        ModelCheckpoint(
            folder / "train",
            filename="t-{step}",
            monitor="train_loss",
            every_n_train_steps=3,
            save_top_k=1,
        ),
    ]
    case.fit(*savers, max_epochs=2, enable_checkpointing=True)
    return {"rank0": {"files": files(case)}}


def resume(case: Case) -> dict[str, Any]:
    """`ckpt_path` of `fit`, `validate`, `test` and `predict`, and `save_checkpoint`."""
    folder = case.folder / case.layout
    first = case.trainer(max_epochs=1)
    first.fit(Net(), case.train_loader())
    first.save_checkpoint(folder / "a.ckpt")
    module = Net()
    trainer = case.trainer(max_epochs=2)
    trainer.fit(module, case.train_loader(), ckpt_path=folder / "a.ckpt")
    loader = case.loader(2, seed=6)
    return {
        "step": trainer.global_step,
        "weights": case.weights(trainer),
        "validated": case.trainer().validate(Net(), loader, ckpt_path=folder / "a.ckpt"),
        "tested": case.trainer().test(Net(), loader, ckpt_path=folder / "a.ckpt"),
        "predicted": case.own_part(
            torch.cat(case.trainer().predict(Net(), loader, ckpt_path=folder / "a.ckpt"))
        ),
    }


# ---------------------------------------------------------------------- watching


def monitors(case: Case) -> dict[str, Any]:
    timer = Timer()
    facts = case.fit(
        LearningRateMonitor("step", log_momentum=True),
        DeviceStatsMonitor(),
        timer,
        log_every_n_steps=2,
    )
    rows = facts["rank0"]["rows"]
    stats = [key for row in rows for key in row if "DeviceStats" in key]
    assert timer.time_elapsed("train") > 0
    return {
        "stats": bool(stats) if case.rank == 0 else True,
        "rank0": {"rates": [row["lr-SGD"] for row in rows if "lr-SGD" in row]},
    }


def bars(case: Case) -> dict[str, Any]:
    """Progress bars write on rank 0 alone, with the logged numbers."""
    found = []
    for bar in (TQDMProgressBar(), RichProgressBar()):
        module = Net()
        with redirect_stdout(io.StringIO()) as text:
            trainer = case.trainer(bar, enable_progress_bar=True)
            trainer.fit(module, case.train_loader(), case.loader(2, seed=6))
        found.append(("Epoch 0" in text.getvalue()) == (case.rank == 0))
        found.append(sorted(trainer.progress_bar_metrics))
    return {"found": found}


def lambda_callback(case: Case) -> dict[str, Any]:
    seen: list[str] = []
    callback = LambdaCallback(
        on_train_epoch_start=lambda trainer, module: seen.append("epoch"),
        on_before_zero_grad=lambda trainer, module, optimizer: seen.append("zero"),
    )
    case.fit(callback)
    return {"seen": seen}


class Writer(BasePredictionWriter):
    def __init__(self, interval: str) -> None:
        super().__init__(interval)
        self.seen: list[Any] = []

    def write_on_batch_end(
        self, trainer: Any, module: Any, prediction: Any, indices: Any, *rest: Any
    ) -> None:
        self.seen.append((list(indices), prediction))

    def write_on_epoch_end(self, trainer: Any, module: Any, predictions: Any, indices: Any) -> None:
        self.seen.append(([i for batch in indices[0] for i in batch], torch.cat(predictions)))


def prediction_writer(case: Case) -> dict[str, Any]:
    """Each data-parallel rank writes its own samples; the ranks of a copy have the same ones."""
    found = {}
    for interval in ("batch", "epoch"):
        writer = Writer(interval)
        case.trainer(writer).predict(Net(), case.loader(2, seed=6))
        indices = [i for each, _ in writer.seen for i in each]
        found[f"indices_{interval}"] = case.own_part(torch.tensor(indices))
        found[interval] = case.own_part(torch.cat([rows for _, rows in writer.seen]))
    return found


# ---------------------------------------------------------------------- changing the training


class Thaw(BaseFinetuning):
    """The first layer is frozen for an epoch."""

    def freeze_before_training(self, module: Any) -> None:
        self.freeze(module.network[0])

    def finetune_function(self, module: Any, epoch: int, optimizer: Any) -> None:
        if epoch == 1:
            self.unfreeze_and_add_param_group(module.network[0], optimizer, lr=0.02)


class Partly(Net):
    def configure_optimizers(self) -> Any:
        trained = [p for p in self.parameters() if p.requires_grad]
        return torch.optim.SGD(trained, lr=self.lr, momentum=0.5)


def finetuning(case: Case) -> dict[str, Any]:
    return case.fit(Thaw(), module=Partly(), max_epochs=3, gradient_clip_val=1.0)


class WithBackbone(Net):
    @property
    def backbone(self) -> nn.Module:
        return self.network[0]

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=self.lr)
        return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)]


def backbone_finetuning(case: Case) -> dict[str, Any]:
    callback = BackboneFinetuning(unfreeze_backbone_at_epoch=1, train_bn=False)
    return case.fit(callback, module=WithBackbone(), max_epochs=3)


def lr_finder(case: Case) -> dict[str, Any]:
    finder = LearningRateFinder(num_training_steps=24, min_lr=1e-4, max_lr=1.0)
    module = Net()
    facts = case.fit(finder, module=module)
    assert finder.optimal_lr is not None
    return {"lr": module.lr, **facts, "results": finder.optimal_lr.results}


def tuner(case: Case) -> dict[str, Any]:
    trainer, module = case.trainer(max_epochs=2), Net()
    found = Tuner(trainer).lr_find(
        module, case.train_loader(), num_training=24, min_lr=1e-4, max_lr=1.0
    )
    assert found is not None
    return {"lr": module.lr, "results": found.results}


class Kept(ModelSummary):
    """Keeps what it would show."""

    shown: Any = None

    def summarize(self, data: Any, total: int, trainable: int, *rest: Any, **more: Any) -> None:  # type: ignore[override]
        self.shown = total, trainable


def summary(case: Case) -> dict[str, Any]:
    """The numbers under data parallelism; a part, which is said, under model parallelism."""
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("lightning.pytorch.utilities.rank_zero")
    logger.addHandler(handler)
    callback, module = Kept(), Net()
    with redirect_stdout(io.StringIO()) as text:
        case.fit(callback, module=module)
        case.fit(RichModelSummary(), module=Net())
    logger.removeHandler(handler)
    whole = sum(p.numel() for p in Net().parameters())
    announced = [line for line in said if line.startswith("The model has")]
    if case.rank > 0:
        return {"rank0": {}}
    assert "Trainable params" in text.getvalue()
    if case.layout in ("one", "dp"):
        assert not announced
        return {"rank0": {"shown": callback.shown}}
    assert callback.shown[0] < whole
    assert f"has {whole} parameters; the summary shows the {callback.shown[0]} of" in announced[0]
    return {"rank0": {"shown": (whole, whole)}}


class Spike(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return super().training_step(batch, batch_idx) * (1000 if batch_idx == 3 else 1)


def spike(case: Case) -> dict[str, Any]:
    return case.fit(SpikeDetection(rtol=20.0), module=Spike())


def averages(case: Case) -> dict[str, Any]:
    found = {}
    for name, callback in {
        "mean": WeightAveraging(),
        "ema": EMAWeightAveraging(decay=0.7, update_every_n_steps=2),
    }.items():
        facts = case.fit(callback, max_epochs=2)
        found[name] = facts["metrics"]
        found[f"weights_{name}"] = facts["weights"]
    return found


def averages_saved(case: Case) -> dict[str, Any]:
    """A checkpoint holds the average, and what is needed to go on."""
    folder = case.folder / case.layout
    saver = ModelCheckpoint(folder, filename="a", every_n_epochs=1)
    case.fit(EMAWeightAveraging(decay=0.7), saver, max_epochs=1, enable_checkpointing=True)
    loader = case.loader(2, seed=6)
    tested = case.trainer().test(Net(), loader, ckpt_path=folder / "a.ckpt")
    trainer = case.trainer(EMAWeightAveraging(decay=0.7), max_epochs=2)
    trainer.fit(Net(), case.train_loader(), ckpt_path=folder / "a.ckpt")
    return {"tested": tested, "weights": case.weights(trainer)}


def swa(case: Case) -> dict[str, Any]:
    return case.fit(StochasticWeightAveraging(swa_lrs=0.05, swa_epoch_start=2), max_epochs=4)


def pruning(case: Case) -> dict[str, Any]:
    callback = ModelPruning("l1_unstructured", amount=0.5, make_pruning_permanent=True)
    module = Net()
    facts = case.fit(callback, module=module, max_epochs=2)
    zeros = [int((p == 0).sum()) for p in module.parameters()]
    return {"zeros": zeros, "losses": facts["losses"], "metrics": facts["metrics"]}


def throughput(case: Case) -> dict[str, Any]:
    monitor = ThroughputMonitor(batch_size_fn=lambda batch: len(batch[0]), window_size=2)
    rows = Rows()
    trainer = case.trainer(monitor, logger=rows, log_every_n_steps=2)
    trainer.fit(Net(), case.train_loader())
    samples = [v for row in rows.rows for k, v in numbers(row).items() if k == "train|samples"]
    return {"rank0": {"samples": samples}}


GENERAL = [
    summary,
    tuner,
    best_and_last,
    not_finite,
    when_to_save,
    resume,
    monitors,
    bars,
    lambda_callback,
    prediction_writer,
    lr_finder,
]
WITHOUT_PIPELINE = [finetuning, backbone_finetuning]
REPLICATED = [averages, averages_saved, swa, pruning, throughput]


GROUPS = [
    (("dp", "tp", "pp"), GENERAL),
    (("tp_pp",), [best_and_last]),
    (("dp", "tp"), WITHOUT_PIPELINE),
    (("dp",), REPLICATED),
]


@pytest.mark.parametrize(("scenario", "layout", "group"), cases_of(GROUPS))
def test_same_meaning(scenario: Any, layout: str, group: Any) -> None:
    assert_same(scenario, layout, group)


@pytest.mark.parametrize("layout", SOME)
def test_a_spike_ends_training_on_every_rank(layout: str, tmp_path: Path) -> None:
    with pytest.raises(RankError, match="Training spike detected in batch 3"):
        run_ranks_fresh(run_all, LAYOUTS[layout][0], layout, [spike], str(tmp_path), timeout=60)
