"""Reported cases on the loss, through whole runs: padded vocabulary, no tokens, logged values."""

import csv
import dataclasses
import functools
import logging
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor

import megatron_lightning.checkpoint as store
from megatron_lightning.config.training import OptimizerConfig, SchedulerConfig
from megatron_lightning.models import GPTModel, Sampling
from tests import tolerances
from tests.harness import run_ranks_fresh
from tests.layout_runs import (
    Batches,
    Recorder,
    Run,
    TokenBatches,
    assemble,
    assert_same_training,
    boxes,
    global_batch,
    make_strategy,
    tiny_config,
    train,
)


def quiet(run: Run, world_size: int, **options: Any) -> L.Trainer:
    """A Trainer for `run` that leaves no files behind unless told to."""
    values: dict[str, Any] = dict(
        strategy=make_strategy(run.layout),
        accelerator="cpu",
        devices=world_size,
        max_steps=run.steps,
        gradient_clip_val=1.0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        limit_val_batches=0,
    )
    return L.Trainer(**{**values, **run.trainer, **options})


# ---------------------------------------------------------------- C01


class ZeroHead(L.Callback):
    """Sets the output weights to zero before the first step."""

    def on_fit_start(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        with torch.no_grad():
            for name, parameter in trainer.strategy.parallel_model.parameters.items():
                if "output_layer" in name:
                    parameter.zero_()


def padded_vocabulary(rank: int, world_size: int, run: Run, folder: str) -> dict[str, Any]:
    recorder = Recorder(run)
    trainer = quiet(run, world_size, callbacks=[ZeroHead(), recorder])
    trainer.fit(GPTModel(run.config), Batches(run))
    trainer.save_checkpoint(folder)
    head = trainer.strategy.parallel_model.parameters["network.output_layer.weight"]
    info = trainer.strategy.parallel_model.table["network.output_layer.weight"]
    return {
        "loss": recorder.losses[0],
        "rows": head.shape[0],
        "padding": float(head.detach()[info.sizes[0] :].abs().sum()),
        "gradients": recorder.gradients[0]["network.output_layer.weight"][:3],
    }


def test_c01_padding_is_a_matter_of_storage(tmp_path: Path) -> None:
    """C01: ln 50257 = 10.824905; ln 50432 = 10.828381 would mean padding in the softmax."""
    config = tiny_config(
        vocab_size=50257, num_layers=1, hidden_size=16, make_vocab_size_divisible_by=128
    )
    run = Run(config=config, layout=dict(tensor_parallel_size=2), steps=1, keep_gradients=(0,))
    folder = str(tmp_path / "saved.ckpt")
    ranks = run_ranks_fresh(padded_vocabulary, 2, run, folder)
    for rank in ranks:
        assert rank["loss"] == pytest.approx(10.824905, abs=2e-6)
        assert 2 * rank["rows"] == 50432
        assert rank["padding"] == 0.0  # no gradient has reached it
        assert rank["gradients"][0] == (50257, 16)
    assert store.list_tensors(folder)["model.network.output_layer.weight"].shape == (50257, 16)
    model = GPTModel.load_from_checkpoint(folder)
    with torch.no_grad():  # all ids alike: each is drawn sooner or later
        model.network.output_layer.weight.zero_()
    generator = torch.Generator().manual_seed(1)
    ids = model.generate([1, 2], 60, Sampling(temperature=1.0), generator=generator)
    assert int(ids.max()) < 50257
    assert int(ids.max()) > 45000


# ---------------------------------------------------------------- C05


class MaskedBatches(Batches):
    """Batches in which `masked` says of (index, data rank) that no label counts; with `only` one
    process reads the share of that data rank.
    """

    def __init__(self, run: Run, masked: Any, only: int | None = None) -> None:
        super().__init__(run)
        self.masked, self.only = masked, only

    def train_dataloader(self) -> TokenBatches:
        module = self

        class Loader(TokenBatches):
            def __iter__(self) -> Iterator[dict[str, Tensor]]:
                for index, batch in enumerate(super().__iter__()):
                    if module.masked(index, self.rank):
                        batch["loss_mask"] = torch.zeros_like(batch["loss_mask"])
                    yield batch

        place = self.trainer.strategy.distributed_sampler_kwargs
        rank, size = (place["rank"], place["num_replicas"]) if self.only is None else (self.only, 2)
        batches = self.run.steps * self.run.trainer.get("accumulate_grad_batches", 1)
        return Loader(self.run, batches, rank, size)


class StepStates(L.Callback):
    """What this rank holds after each optimizer step: weights, masters, step count, rate."""

    def __init__(self) -> None:
        self.states: list[dict[str, Any]] = []
        self.logged: list[float] = []

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        self.logged.append(float(trainer.callback_metrics["train_loss"]))
        if trainer.global_step == len(self.states):
            return
        strategy = trainer.strategy
        held = {name: p.detach().clone() for name, p in strategy.parallel_model.parameters.items()}
        if strategy.masters is not None:
            masters = strategy.masters.named_masters()
            held |= {f"master {name}": p.detach().clone() for name, p in masters.items()}
        rate = trainer.optimizers[0].param_groups[0]["lr"]
        self.states.append({"held": held, "step": trainer.global_step, "rate": rate})


def second_replica(index: int, rank: int) -> bool:
    return rank == 1


def second_window(first: int, last: int, index: int, rank: int) -> bool:
    return first <= index <= last


def train_masked(
    rank: int, world_size: int, run: Run, masked: Any, only: int | None = None
) -> dict[str, Any]:
    model = GPTModel(
        run.config,
        OptimizerConfig(lr=run.learning_rate, weight_decay=0.1),
        SchedulerConfig(lr_warmup_steps=1, lr_decay_steps=4),
        loss_normalization=run.normalization,
    )
    messages: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("megatron_lightning").addHandler(handler)
    recorder, states = Recorder(run), StepStates()
    trainer = quiet(run, world_size, callbacks=[recorder, states])
    trainer.fit(model, MaskedBatches(run, masked, only))
    return {
        "losses": recorder.losses,
        "norms": recorder.norms,
        "gradients": recorder.gradients,
        "logged": states.logged,
        "states": states.states,
        "final": boxes(trainer, "value"),
        "warned": [message for message in messages if "No token" in message],
    }


@pytest.mark.parametrize(
    ("size", "layout"),
    [
        (2, {}),
        pytest.param(4, dict(tensor_parallel_size=2), marks=pytest.mark.slow),
        pytest.param(4, dict(pipeline_parallel_size=2), marks=pytest.mark.slow),
    ],
)
def test_c05_a_replica_without_tokens(size: int, layout: dict[str, Any]) -> None:
    """C05a: finite, and equal to training on the other replica's tokens alone."""
    trainer = dict(accumulate_grad_batches=2)
    run = Run(layout=layout, steps=3, trainer=trainer, keep_gradients=(0, 2))
    ranks = run_ranks_fresh(train_masked, size, run, second_replica)
    alone = Run(steps=3, trainer=trainer, keep_gradients=(0, 2))
    [single] = run_ranks_fresh(train_masked, 1, alone, second_replica, 0)
    for rank in ranks:
        assert rank["losses"] == ranks[0]["losses"]
        assert not rank["warned"]
    for step, want in enumerate(single["losses"]):
        tolerances.assert_loss_close(ranks[0]["losses"][step], want, step)
    for step in (0, 2):
        tolerances.assert_gradient_norm_close(ranks[0]["norms"][step], single["norms"][step], step)
        gradients = assemble([rank["gradients"][step] for rank in ranks])
        for name, want in assemble([single["gradients"][step]]).items():
            tolerances.assert_gradient_close(
                name, gradients[name], want, single["norms"][step], step
            )


@pytest.mark.parametrize(
    ("size", "layout", "precision"),
    [
        (2, {}, "32-true"),
        pytest.param(2, {}, "bf16-mixed", marks=pytest.mark.slow),
        (1, {}, "bf16-true"),
        (4, dict(tensor_parallel_size=2, pipeline_parallel_size=2), "bf16-mixed"),
    ],
)
def test_c05_no_tokens_at_all(size: int, layout: dict[str, Any], precision: str) -> None:
    """C05b: the second of four windows has no token. Nothing moves, weight decay included; it is
    said once; the step counts, also for the learning rate.
    """
    trainer = dict(accumulate_grad_batches=2, precision=precision)
    run = Run(layout=layout, steps=4, trainer=trainer, keep_gradients=())
    masked = functools.partial(second_window, 2, 3)
    for rank in run_ranks_fresh(train_masked, size, run, masked):
        assert all(math.isfinite(value) for value in (*rank["losses"], *rank["logged"]))
        assert [state["step"] for state in rank["states"]] == [1, 2, 3, 4]
        first, second, third, _ = (state["held"] for state in rank["states"])
        for name, value in first.items():
            assert torch.equal(second[name], value), name
        assert any(not torch.equal(third[name], value) for name, value in second.items())
        assert rank["norms"][1] == 0.0
        rates = [state["rate"] for state in rank["states"]]
        assert len(set(rates)) == 4  # the schedule went on
        assert rank["losses"][2:4] == [0.0, 0.0]


def test_c05_is_said_once() -> None:
    run = Run(steps=4, keep_gradients=())
    [rank] = run_ranks_fresh(train_masked, 1, run, functools.partial(second_window, 1, 2))
    [message] = rank["warned"]
    assert "leaves all parameters unchanged, weight decay included" in message
    assert "still counts as a step" in message


# ---------------------------------------------------------------- C10


def logged_rows(rank: int, world_size: int, run: Run, folder: str) -> dict[str, Any]:
    trainer = quiet(run, world_size, logger=CSVLogger(folder, version=0), log_every_n_steps=1)
    trainer.fit(GPTModel(run.config), Batches(run))
    return {key: float(value) for key, value in trainer.callback_metrics.items()}


def window_mean(run: Run) -> float:
    """Token mean over the first window, with the initial weights, in plain torch."""
    model = GPTModel(run.config)
    total = count = 0.0
    with torch.no_grad():
        for index in range(run.trainer["accumulate_grad_batches"]):
            batch = global_batch(run, index)
            losses = model(batch["tokens"], None, batch["labels"]).double()
            total += float((losses * batch["loss_mask"]).sum())
            count += float(batch["loss_mask"].sum())
    return total / count


def test_c10_the_logged_loss_is_the_windows_token_mean(tmp_path: Path) -> None:
    """C10: PP=2, DP=2, accumulation 4: one row a step, the same number on every rank."""
    trainer = dict(accumulate_grad_batches=4)
    run = Run(layout=dict(pipeline_parallel_size=2), steps=3, trainer=trainer)
    ranks = run_ranks_fresh(logged_rows, 4, run, str(tmp_path / "four"))
    alone = Run(steps=3, trainer=trainer)
    run_ranks_fresh(logged_rows, 1, alone, str(tmp_path / "one"))
    assert all(rank == ranks[0] for rank in ranks)

    def rows(name: str) -> list[float]:
        file = tmp_path / name / "lightning_logs" / "version_0" / "metrics.csv"
        with file.open() as lines:
            return [float(row["train_loss"]) for row in csv.DictReader(lines)]

    got, want = rows("four"), rows("one")
    assert len(got) == len(want) == 3
    assert got == pytest.approx(want, rel=1e-5)
    assert got[0] == pytest.approx(window_mean(run), rel=1e-5)
    assert got[-1] == pytest.approx(ranks[0]["train_loss"], rel=1e-6)


# ---------------------------------------------------------------- C06


def first_loss(run: Run) -> float:
    """The smoothed loss with the initial weights, by torch, over the true vocabulary."""
    model, batch = GPTModel(run.config), global_batch(run, 0)
    with torch.no_grad():
        logits = model(batch["tokens"]).flatten(0, 1)  # (B S, V)
        losses = torch.nn.functional.cross_entropy(
            logits, batch["labels"].flatten(), reduction="none", label_smoothing=0.1
        )
    mask = batch["loss_mask"].flatten()
    return float((losses * mask).sum() / mask.sum())


def test_c06_label_smoothing_is_that_of_the_whole_vocabulary() -> None:
    """C06: the same loss on both ranks, the unsharded formula, and the gradients of one process."""
    config = tiny_config(label_smoothing=0.1, make_vocab_size_divisible_by=128)
    run = Run(config=config, layout=dict(tensor_parallel_size=2), steps=3, keep_gradients=(0, 2))
    ranks = run_ranks_fresh(train, 2, run)
    [single] = run_ranks_fresh(train, 1, dataclasses.replace(run, layout={}))
    assert_same_training(ranks, single)
    assert ranks[0]["losses"][0] == pytest.approx(first_loss(run), rel=1e-5)
