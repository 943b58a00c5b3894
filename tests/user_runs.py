"""Whole runs of users' LightningModules (`user_modules.py`) in any layout."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import lightning as L
from torch.utils.data import DataLoader

from tests.harness import run_ranks_fresh
from tests.layout_runs import Batches, Recorder, Run, make_strategy, results, tiny_config
from tests.user_modules import VOCABULARY, decoder_plan, pairs

LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "tp2": (2, dict(tensor_parallel_size=2)),
    "tp2_sp": (2, dict(tensor_parallel_size=2, sequence_parallel=True)),
    "pp2": (2, dict(pipeline_parallel_size=2, micro_batch_size=2)),
    "tp2_sp_pp2": (
        4,
        dict(
            tensor_parallel_size=2,
            pipeline_parallel_size=2,
            micro_batch_size=2,
            sequence_parallel=True,
        ),
    ),
}
"""Ranks, and options of the strategy."""


def user_run(**changes: Any) -> Run:
    """A run on batches of this vocabulary, five steps long."""
    values: dict[str, Any] = dict(
        config=tiny_config(vocab_size=VOCABULARY), steps=5, keep_gradients=(0, 1, 4)
    )
    return Run(**{**values, **changes})


def quiet_trainer(run: Run, world_size: int, callbacks: Sequence[L.Callback]) -> L.Trainer:
    """A Trainer without files and output on CPU ranks."""
    options: dict[str, Any] = dict(
        accelerator="cpu",
        devices=world_size,
        max_steps=run.steps,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        strategy=make_strategy(run.layout),
        callbacks=list(callbacks),
    )
    return L.Trainer(**{**options, **run.trainer})


def fit_module(
    rank: int, world_size: int, make: Callable[[], L.LightningModule], run: Run
) -> dict[str, Any]:
    """Fit a module on the token batches of `run`; what this rank saw (see `layout_runs.train`)."""
    recorder = Recorder(run)
    trainer = quiet_trainer(run, world_size, [recorder])
    trainer.fit(make(), Batches(run))
    return results(trainer, recorder)


@functools.cache
def alone(make: Any) -> dict[str, Any]:
    """The module in one process."""
    return run_ranks_fresh(fit_module, 1, make, user_run(layout=dict(plan=decoder_plan())))[0]


def fit_pairs(
    rank: int, world_size: int, make: Any, run: Run, count: int, batch_size: int
) -> dict[str, Any]:
    """Fit on tuple batches; the losses logged, and what this rank holds in the end."""
    logged: list[float] = []

    class Keep(L.Callback):
        def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
            logged.append(float(trainer.callback_metrics["train_loss"]))

    trainer = quiet_trainer(run, world_size, [Keep()])
    trainer.fit(make(), DataLoader(pairs(count), batch_size=batch_size))
    model = trainer.strategy.parallel_model
    return {
        "logged": logged,
        "final": {name: p.detach().clone() for name, p in model.parameters.items()},
    }
