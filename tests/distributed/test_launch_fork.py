"""Ranks forked from this process, as in a notebook: what they leave behind looks as if the Trainer
had run here.
"""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lightning as L
import psutil
import pytest
import torch
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from torch import nn

from megatron_lightning.config import RuntimeConfig
from megatron_lightning.models.gpt import GPTModel
from megatron_lightning.strategies import MegatronStrategy
from tests.harness import run_ranks_fresh
from tests.launch_runs import forget_launcher
from tests.layout_runs import Batches, Run, global_batch, tiny_config

RUN = Run(config=tiny_config(num_layers=2), steps=3)


class Data(Batches):
    """With loaders for test and predict."""

    def test_dataloader(self) -> Any:
        return self._loader(2)

    def predict_dataloader(self) -> Any:
        return self._loader(3)


class Keep(L.Callback):
    """A user's callback with state, a reference to the Trainer, and something unpicklable."""

    def __init__(self) -> None:
        self.losses: list[torch.Tensor] = []
        self.seen: Any = None
        self.function = lambda: None

    def on_train_batch_end(self, trainer: L.Trainer, *args: Any) -> None:
        self.losses.append(trainer.callback_metrics["train_loss"])
        self.seen = trainer


def make_trainer(
    devices: int, callbacks: Sequence[L.Callback] = (), folder: str = "", **layout: Any
) -> L.Trainer:
    return L.Trainer(
        accelerator="cpu",
        devices=devices,
        max_steps=3,
        val_check_interval=3,
        logger=CSVLogger(folder) if folder else False,
        callbacks=list(callbacks),
        enable_checkpointing=any(isinstance(c, ModelCheckpoint) for c in callbacks),
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        strategy=MegatronStrategy(**layout, runtime=RuntimeConfig(launcher="fork")),
    )


def nothing_left() -> list[str]:
    """Children, listening ports and process groups of this process."""
    this = psutil.Process()
    found = [str(child) for child in this.children(recursive=True)]
    found += [str(c) for c in this.net_connections("inet") if c.status == psutil.CONN_LISTEN]
    return found + ["process group"] * torch.distributed.is_initialized()


def fit_here_and_look(rank: int, world_size: int, devices: int, folder: str) -> dict[str, Any]:
    forget_launcher()
    keep, best = Keep(), ModelCheckpoint(f"{folder}/best", monitor="val_loss", save_last=True)
    stop = EarlyStopping("val_loss", patience=7)
    trainer = make_trainer(devices, [keep, best, stop], folder, tensor_parallel_size=devices)
    model = GPTModel(RUN.config)
    trainer.fit(model, Data(RUN))
    found = {
        "metrics": {k: float(v) for k, v in trainer.callback_metrics.items()},
        "logged": sorted(trainer.logged_metrics),
        "losses": [float(loss) for loss in keep.losses],
        "seen": keep.seen is trainer,
        "best": Path(best.best_model_path).is_dir() and Path(best.last_model_path).is_dir(),
        "score": float(best.best_model_score),
        "stop": float(stop.best_score),
        "progress": (trainer.global_step, trainer.current_epoch, str(trainer.state.status)),
        "log": Path(trainer.logger.log_dir, "metrics.csv").exists(),
        "callbacks": trainer.callbacks[:1] == [keep] and len(trainer.callbacks) == 3,
        "left": nothing_left(),
    }
    tokens = global_batch(RUN, 0)["tokens"]
    found["validate"] = trainer.validate(model, Data(RUN))
    found["test"] = trainer.test(model, Data(RUN))
    found["best_test"] = trainer.test(datamodule=Data(RUN), ckpt_path="best")
    found["weights"] = model(tokens).sum().item()
    return found


def test_the_same_as_in_one_process(tmp_path: Path) -> None:
    (single,) = run_ranks_fresh(fit_here_and_look, 1, 1, str(tmp_path / "one"))
    (forked,) = run_ranks_fresh(fit_here_and_look, 1, 2, str(tmp_path / "two"))
    assert single["best"]
    assert single["log"]
    assert forked["left"] == single["left"] == []
    for key in ("logged", "seen", "best", "progress", "log", "callbacks"):
        assert forked[key] == single[key], key
    for key in ("metrics", "score", "stop", "losses", "weights"):
        assert forked[key] == pytest.approx(single[key], rel=1e-5), key
    for key in ("validate", "test", "best_test"):
        assert forked[key][0] == pytest.approx(single[key][0], rel=1e-5), key
    assert forked["validate"][0]["val_loss"] == pytest.approx(forked["metrics"]["val_loss"])


def several_runs(rank: int, world_size: int) -> dict[str, Any]:
    """One module through Trainers of several layouts, its weights growing all along."""
    forget_launcher()
    model, data = GPTModel(RUN.config), Data(RUN)
    found: dict[str, Any] = {}
    first = make_trainer(2, tensor_parallel_size=2)
    first.fit(model, data)
    found["first"] = float(first.callback_metrics["val_loss"])
    second = make_trainer(2, pipeline_parallel_size=2)
    (before,) = second.validate(model, data)
    found["before"] = before["val_loss"]
    second.fit(model, data)
    found["second"] = float(second.callback_metrics["val_loss"])
    second.fit(model, data)  # at its max_steps already, as in one process
    found["steps"] = second.global_step
    second.fit_loop.epoch_loop.max_steps = 5
    second.fit(model, data)
    found["more"] = second.global_step
    third = make_trainer(1)
    found["whole"] = third.validate(model, data)[0]["val_loss"]
    predictions = make_trainer(2).predict(model, data)
    found["predictions"] = [tuple(p.shape) for p in predictions]
    tokens = global_batch(RUN, 0)["tokens"]
    joined = torch.cat(predictions[:2])
    found["equal"] = torch.allclose(joined, model(tokens), atol=1e-5)
    found["left"] = nothing_left()
    found["variables"] = [name for name in ("LOCAL_RANK", "MASTER_PORT") if name in os.environ]
    return found


def test_fit_again_and_in_other_layouts() -> None:
    (found,) = run_ranks_fresh(several_runs, 1)
    assert found["before"] == pytest.approx(found["first"], rel=1e-5)
    assert found["second"] < found["first"]
    assert found["steps"] == 3
    assert found["more"] == 5
    assert found["whole"] < found["second"]
    assert found["predictions"] == [(4, 16, 257)] * 6
    assert found["equal"]
    assert found["left"] == []
    assert found["variables"] == []


class Fails(GPTModel):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if batch_idx == 1:
            raise LookupError("this model is bad")
        return super().training_step(batch, batch_idx)


class CountsExceptions(L.Callback):
    def __init__(self) -> None:
        self.calls = 0

    def on_exception(self, *args: Any) -> None:
        self.calls += 1


def fit_fail_fit(rank: int, world_size: int, devices: int) -> tuple[str, str, bool, int, list[str]]:
    forget_launcher()
    data, counts = Data(RUN), CountsExceptions()
    make_trainer(devices).fit(GPTModel(RUN.config), data)
    trainer = make_trainer(devices, [counts])
    try:
        trainer.fit(Fails(RUN.config), data)
    except LookupError as error:
        text, cause = str(error), str(error.__cause__)
    calls = counts.calls
    trainer.fit(GPTModel(RUN.config), data)
    assert trainer.callbacks[0] is counts
    return text, cause, trainer.state.finished, calls, nothing_left()


@pytest.mark.parametrize("devices", [1, 2])
def test_fit_fail_fit(devices: int) -> None:
    ((text, cause, finished, calls, left),) = run_ranks_fresh(fit_fail_fit, 1, devices)
    assert text == "this model is bad"
    assert finished
    assert calls == (1 if devices == 1 else 0)  # with two the hooks run in the ranks
    assert left == []
    if devices == 2:
        assert "[rank 0] LookupError: this model is bad" in cause.replace("[rank 1]", "[rank 0]")


class Plain(L.LightningModule):
    """A user's module, with a buffer, whose weights exist before the Trainer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.network = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 1))

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self.network(batch["tokens"].float()[:, :8] / 257).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.5)


def fit_plain(rank: int, world_size: int) -> tuple[dict[str, Any], dict[str, Any], str]:
    forget_launcher()
    module = Plain()
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    trainer = make_trainer(2)
    trainer.limit_val_batches = 0
    trainer.fit(module, Data(RUN))
    try:
        trainer.save_checkpoint("/nowhere/x.ckpt")
    except RuntimeError as error:
        return before, module.state_dict(), str(error)
    return before, module.state_dict(), ""


def test_weights_of_a_users_module() -> None:
    ((before, after, message),) = run_ranks_fresh(fit_plain, 1)
    assert not any(torch.equal(before[name], after[name]) for name in before)
    assert int(after["network.1.num_batches_tracked"]) == 3
    assert "ModelCheckpoint(save_last=True)" in message
