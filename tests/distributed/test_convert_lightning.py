"""Checkpoints of Lightning's own strategies, converted and resumed under ours."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
import torch.distributed.checkpoint as dcp
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy
from torch.distributed.fsdp import fully_shard

from megatron_lightning.checkpoint import (
    CheckpointError,
    list_tensors,
    load,
    load_metadata,
    load_objects,
)
from megatron_lightning.checkpoint.convert import Conversion, convert
from megatron_lightning.cli.main import main
from megatron_lightning.config import DataParallelConfig
from megatron_lightning.config.training import OptimizerConfig, SchedulerConfig
from megatron_lightning.models.gpt import GPTModel
from tests import tolerances
from tests.harness import run_ranks_fresh
from tests.layout_runs import Batches, Run, TokenBatches, make_strategy, tiny_config

STEPS, SAVED_AT = 6, 3
CONFIG = tiny_config(tie_word_embeddings=True)
RUN = Run(config=CONFIG, steps=STEPS, layout={})


class Sharded(GPTModel):
    """The GPT as a user runs it under FSDP2."""

    def configure_model(self) -> None:
        if self.network is None:
            super().configure_model()
            for layer in self.network.decoder.layers.values():  # type: ignore[union-attr]
                fully_shard(layer, mesh=self.device_mesh["data_parallel"])
            fully_shard(self.network, mesh=self.device_mesh["data_parallel"])


class Halves(Batches):
    """Every rank its slice, under strategies that do not say which."""

    def _loader(self, batches: int) -> TokenBatches:
        assert self.trainer is not None
        return TokenBatches(self.run, batches, self.trainer.global_rank, self.trainer.world_size)


class Losses(L.Callback):
    """The loss of each step on this rank."""

    def __init__(self) -> None:
        self.losses: list[float] = []

    def on_train_batch_end(
        self, trainer: L.Trainer, module: Any, outputs: Any, batch: Any, index: int
    ) -> None:
        self.losses.append(float(outputs["loss"]))


def train(
    rank: int, world_size: int, run: Run, kind: str, path: str, resume: str | None = None
) -> list[float]:
    """Training under a strategy of Lightning, saved at `SAVED_AT`, or a resumed one under ours."""
    cls = Sharded if kind == "fsdp2" else GPTModel
    model = cls(
        run.config,
        OptimizerConfig(lr=run.learning_rate),
        SchedulerConfig(lr_warmup_steps=2, lr_decay_steps=STEPS),
        loss_normalization="micro_batch",
    )
    strategies: dict[str, Callable[[], Any]] = {
        "ddp": lambda: DDPStrategy(process_group_backend="gloo"),
        "fsdp2": lambda: ModelParallelStrategy(
            data_parallel_size=world_size, tensor_parallel_size=1, process_group_backend="gloo"
        ),
        "ours": lambda: make_strategy(run.layout),
    }
    losses = Losses()
    callbacks: list[L.Callback] = [losses]
    if kind != "ours":
        callbacks.append(SaveAt(path))
    trainer = L.Trainer(
        strategy=strategies[kind](),
        accelerator="cpu",
        devices=world_size,
        max_steps=STEPS,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        limit_val_batches=0,
        use_distributed_sampler=False,
        callbacks=callbacks,
    )
    data = Batches(run) if kind == "ours" else Halves(run)
    trainer.fit(model, data, ckpt_path=resume)
    return losses.losses


class SaveAt(L.Callback):
    """Saves once."""

    def __init__(self, path: str) -> None:
        self.path = path

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        if trainer.global_step == SAVED_AT:
            trainer.save_checkpoint(self.path)


@pytest.fixture(scope="module", params=["ddp", "fsdp2"])
def lightning(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, list[float]]:
    """A checkpoint after three steps of two ranks, and the mean losses of all six steps."""
    path = tmp_path_factory.mktemp(request.param) / "a.ckpt"
    ranks = run_ranks_fresh(train, 2, RUN, request.param, str(path))
    return path, [sum(pair) / 2 for pair in zip(*ranks, strict=True)]


FULLY = dict(data_parallel=DataParallelConfig(sharding="fsdp"))


@pytest.mark.parametrize(
    "layout", [pytest.param({}, id="dp2"), pytest.param(FULLY, id="fsdp", marks=pytest.mark.slow)]
)
def test_training_goes_on(
    lightning: tuple[Path, list[float]], layout: dict[str, Any], tmp_path: Path
) -> None:
    """Weights, moments, schedule and place in the data come along."""
    path, wanted = lightning
    target = str(tmp_path / "native")
    with pytest.raises(SystemExit) as ended:
        main(["convert", str(path), target, "--allow-pickle"])
    assert ended.value.code == 0
    found = list_tensors(target)
    kinds = {name.partition(".network.")[0] for name in found}
    assert kinds == {"model"} | {f"optimizer.0.{key}" for key in ("exp_avg", "exp_avg_sq", "step")}
    shapes = GPTModel(CONFIG).global_shapes()  # tied head once, vocabulary without padding
    for name, shape in shapes.items():
        assert found[f"model.{name}"].shape == shape
        assert found[f"optimizer.0.exp_avg.{name}"].shape == shape
    assert sum(name.startswith("model.") for name in found) == len(shapes)
    run = replace(RUN, layout=layout)
    for losses in run_ranks_fresh(train, 2, run, "ours", "", target):
        assert len(losses) == STEPS - SAVED_AT
        for step, (got, want) in enumerate(zip(losses, wanted[SAVED_AT:], strict=True)):
            tolerances.assert_loss_close(got, want, SAVED_AT + step)


def test_the_opt_in_is_needed(
    lightning: tuple[Path, list[float]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["convert", str(lightning[0]), str(tmp_path / "native")])
    assert ended.value.code == 2
    assert "made of pickles: give --allow-pickle" in capsys.readouterr().err


def test_folder_of_fsdp1(tmp_path: Path) -> None:
    """`FSDPStrategy` writes weights under `model.` and optimizer state by name."""
    weights = {"a": torch.randn(3, 2), "b": torch.randn(2)}
    state = {
        name: {"step": torch.tensor(3.0), "exp_avg": torch.randn_like(value)}
        for name, value in weights.items()
    }
    groups = [{"lr": 0.1, "betas": (0.9, 0.95), "params": ["a", "b"]}]
    folder = tmp_path / "a.ckpt"
    optimizer = {"state": state, "param_groups": groups}
    dcp.save({"model": weights, "optimizer_0": optimizer}, checkpoint_id=folder)
    torch.save({"epoch": 1, "global_step": 3, "loops": {}}, folder / "meta.pt")
    convert(folder, tmp_path / "new", how=Conversion(allow_pickle=True))
    found = {
        name: torch.zeros(info.shape, dtype=info.dtype)
        for name, info in list_tensors(tmp_path / "new").items()
    }
    load(tmp_path / "new", found)
    assert torch.equal(found["model.a"], weights["a"])
    assert torch.equal(found["optimizer.0.exp_avg.b"], state["b"]["exp_avg"])
    assert found["optimizer.0.step.a"] == 3.0
    objects = load_objects(tmp_path / "new")
    assert objects["optimizer_param_groups"] == [[{"lr": 0.1, "betas": (0.9, 0.95)}]]
    assert load_metadata(tmp_path / "new")["global_step"] == 3


class Custom:
    """A class that only its own program knows."""


def test_unknown_classes_are_named(tmp_path: Path) -> None:
    torch.save({"state_dict": {"w": torch.ones(2)}, "extra": Custom()}, tmp_path / "a.ckpt")
    with pytest.raises(CheckpointError, match=r"a\.ckpt.*Custom"):
        convert(tmp_path / "a.ckpt", tmp_path / "new", how=Conversion(allow_pickle=True))


def test_optimizer_that_names_nothing(tmp_path: Path) -> None:
    """Groups that fit no order are an error; the weights alone can be had."""
    weights = {"b": torch.ones(2), "a": torch.ones(3)}
    state = {key: {"exp_avg": torch.ones(2)} for key in (0, 1)}
    groups = [{"lr": 1.0, "params": [0]}, {"lr": 1.0, "params": [1]}]
    checkpoint = {
        "state_dict": weights,
        "optimizer_states": [{"state": state, "param_groups": groups}],
    }
    torch.save(checkpoint, tmp_path / "a.ckpt")
    how = Conversion(allow_pickle=True)
    with pytest.raises(CheckpointError, match=r"parameter 0.*convert with --weights-only"):
        convert(tmp_path / "a.ckpt", tmp_path / "new", how=how)
    convert(tmp_path / "a.ckpt", tmp_path / "new", how=replace(how, weights_only=True))
    target = {"model.a": torch.zeros(3), "model.b": torch.zeros(2)}
    load(tmp_path / "new", target)
    assert torch.equal(target["model.a"], torch.ones(3))
