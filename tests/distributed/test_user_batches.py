"""Users' own LightningModules on batches that this package doesn't know: tuples, fields of other
names and dims, micro-batches of unequal size, lengths that change.
"""

from typing import Any

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader

from megatron_lightning.runtime.batch import MicroBatches
from tests.harness import RankError, run_ranks_fresh
from tests.layout_runs import (
    Batches,
    Recorder,
    Run,
    assert_same_training,
    global_batch,
    results,
)
from tests.user_modules import SEQUENTIAL, OwnTransformer, SequentialModule, decoder_plan, pairs
from tests.user_runs import LAYOUTS, fit_pairs, quiet_trainer, user_run

# ---------------------------------------------------------------- tuples


def whole_batch_training(rank: int, world_size: int, count: int, batch_size: int) -> dict[str, Any]:
    """Plain torch on the unsplit batches."""
    module = SequentialModule()
    optimizer = module.configure_optimizers()
    losses = []
    for x, y in DataLoader(pairs(count), batch_size=batch_size):
        optimizer.zero_grad()
        loss = F.cross_entropy(module.body(x), y)
        loss.backward()
        optimizer.step()
        losses.append(float(loss))
    return {"logged": losses, "final": dict(module.named_parameters())}


@pytest.mark.parametrize(
    ("size", "layout"),
    [
        (2, dict(pipeline_parallel_size=2)),
        (2, dict(pipeline_parallel_size=2, micro_batch_size=4)),
        (2, dict(pipeline_parallel_size=2, micro_batch_size=3, virtual=2)),
        (1, dict(micro_batch_size=4)),
    ],
)
def test_sequential_with_a_ragged_last_batch(size: int, layout: dict[str, Any]) -> None:
    """27 samples in batches of 10: micro-batches of unequal size weigh by their samples."""
    trainer = dict(max_epochs=1, use_distributed_sampler=size == 1)
    run = user_run(layout=layout | dict(plan=SEQUENTIAL), steps=-1, trainer=trainer)
    ranks = run_ranks_fresh(fit_pairs, size, SequentialModule, run, 27, 10)
    want = run_ranks_fresh(whole_batch_training, 1, 27, 10)[0]
    got = {name: value for rank in ranks for name, value in rank["final"].items()}
    assert got.keys() == want["final"].keys()
    for rank in ranks:
        assert rank["logged"] == pytest.approx(want["logged"], rel=1e-5)
    for name, value in want["final"].items():
        torch.testing.assert_close(got[name], value, rtol=1e-5, atol=1e-6)


# ---------------------------------------------------------------- fields


class FieldBatches(L.LightningModule):
    """Dict batches with fields that this package doesn't know; `hook` says how they are cut."""

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(7)
            self.body = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        assert len(batch["names"]) == len(batch["label"])  # texts are cut along
        loss = F.cross_entropy(self.body(batch["pixels"].t()), batch["label"])
        self.log("train_loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class WithHook(FieldBatches):
    def split_micro_batch(self, batch: Any, micro_batch_size: int | None) -> list[Any]:
        assert micro_batch_size == 2
        return [
            {
                "pixels": batch["pixels"][:, i : i + 2],
                "label": batch["label"][i : i + 2],
                "names": batch["names"][i : i + 2],
            }
            for i in range(0, len(batch["label"]), 2)
        ]


def collate(samples: list[tuple[Tensor, Tensor]]) -> dict[str, Any]:
    """Pixels have their samples along dim 1."""
    return {
        "pixels": torch.stack([x for x, _ in samples], 1),
        "label": torch.stack([y for _, y in samples]),
        "names": [f"sample {i}" for i in range(len(samples))],
    }


def collate_cut(samples: list[tuple[Tensor, Tensor]]) -> MicroBatches:
    """The loader cuts: micro-batches of one, then the rest."""
    return MicroBatches([collate(samples[:1]), collate(samples[1:])])


def fit_fields(
    rank: int, world_size: int, make: Any, run: Run, collate_fn: Any
) -> tuple[list[float], dict[str, Tensor]]:
    logged: list[float] = []

    class Keep(L.Callback):
        def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
            logged.append(float(trainer.callback_metrics["train_loss"]))

    trainer = quiet_trainer(run, world_size, [Keep()])
    trainer.fit(make(), DataLoader(pairs(12), batch_size=4, collate_fn=collate_fn))
    parameters = trainer.strategy.parallel_model.parameters
    return logged, {name: p.detach().clone() for name, p in parameters.items()}


CUTS: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "batch_dims": (FieldBatches, collate, dict(batch_dims={"pixels": 1, "label": 0})),
    "hook": (WithHook, collate, {}),
    "micro_batches": (FieldBatches, collate_cut, dict(batch_dims={"label": 0})),
}


@pytest.mark.parametrize("cut", CUTS)
def test_unknown_fields_under_pipeline(cut: str) -> None:
    make, collate_fn, options = CUTS[cut]
    trainer = dict(use_distributed_sampler=False)
    layout = dict(pipeline_parallel_size=2, micro_batch_size=2, plan=SEQUENTIAL) | options
    whole = user_run(steps=3, trainer=trainer)
    run = user_run(steps=3, trainer=trainer, layout=layout)
    [(losses, weights)] = run_ranks_fresh(fit_fields, 1, FieldBatches, whole, collate)
    ranks = run_ranks_fresh(fit_fields, 2, make, run, collate_fn)
    got = {name: value for _, held in ranks for name, value in held.items()}
    assert ranks[0][0] == ranks[1][0] == pytest.approx(losses, rel=1e-5)
    for name, value in weights.items():
        torch.testing.assert_close(got[name], value, rtol=1e-5, atol=1e-6)


def test_an_unknown_field_is_named() -> None:
    layout = dict(pipeline_parallel_size=2, plan=SEQUENTIAL)
    run = user_run(steps=3, trainer=dict(use_distributed_sampler=False), layout=layout)
    with pytest.raises(RankError, match=r"batch\['pixels'\].*batch_dims=\{'pixels': 0\}"):
        run_ranks_fresh(fit_fields, 2, FieldBatches, run, collate)


# ---------------------------------------------------------------- lengths


class Lengths(Batches):
    """Sequences of another length in every batch."""

    def train_dataloader(self) -> Any:
        lengths = (16, 9, 12, 16, 5)
        batches = [
            {key: value[:, :length] for key, value in global_batch(self.run, i).items()}
            for i, length in enumerate(lengths)
        ]
        return DataLoader(batches, batch_size=None)  # type: ignore[arg-type]


def fit_lengths(rank: int, world_size: int, run: Run) -> dict[str, Any]:
    recorder = Recorder(run)
    trainer = quiet_trainer(run, world_size, [recorder])
    trainer.fit(OwnTransformer(), Lengths(run))
    return results(trainer, recorder)


def test_sequence_length_changes_between_batches() -> None:
    trainer = dict(use_distributed_sampler=False)  # which would shuffle
    run = user_run(layout=LAYOUTS["pp2"][1] | dict(plan=decoder_plan()), trainer=trainer)
    single = run_ranks_fresh(fit_lengths, 1, user_run(layout=dict(plan=decoder_plan())))[0]
    assert_same_training(run_ranks_fresh(fit_lengths, 2, run), single)
