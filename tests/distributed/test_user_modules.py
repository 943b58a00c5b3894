"""Users' own LightningModules over data, tensor and pipeline axes, against one process."""

import dataclasses
import functools
import re
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader

from megatron_lightning import MegatronStrategy
from megatron_lightning.config import ParallelPlan
from tests import tolerances
from tests.harness import RankError, run_ranks_fresh
from tests.layout_runs import Run, assert_same_training, global_batch
from tests.user_modules import (
    SEQUENTIAL,
    Classifier,
    Decoder,
    LateTransformer,
    OwnTransformer,
    SequentialModule,
    decoder_plan,
    pairs,
)
from tests.user_runs import LAYOUTS, alone, fit_module, fit_pairs, user_run

SLOW = pytest.mark.slow

# ---------------------------------------------------------------- without a plan


def train_classifier(rank: int, world_size: int, strategy: str, precision: str) -> dict[str, Any]:
    """Three epochs on pairs from plain DataLoaders."""
    module = Classifier()
    trainer = L.Trainer(
        strategy=MegatronStrategy() if strategy == "megatron" else strategy,
        accelerator="cpu",
        devices=world_size,
        precision=precision,
        max_epochs=3,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, DataLoader(pairs(32), batch_size=4), DataLoader(pairs(16, 5), batch_size=4))
    metrics = {key: float(value) for key, value in trainer.callback_metrics.items()}
    return {"state": {k: v.clone() for k, v in module.state_dict().items()}, "metrics": metrics}


@pytest.mark.parametrize(
    "precision", ["32-true", pytest.param("bf16-mixed", marks=SLOW), "64-true"]
)
def test_an_ordinary_module_equals_ddp(precision: str) -> None:
    """Weights and batch norm's statistics bitwise; metrics are summed in another precision."""
    ddp = run_ranks_fresh(train_classifier, 2, "ddp", precision)
    ours = run_ranks_fresh(train_classifier, 2, "megatron", precision)
    for name, value in ddp[0]["state"].items():
        assert torch.equal(ours[0]["state"][name], value), name
    assert ours[0]["metrics"] == ours[1]["metrics"]
    for key, value in ddp[0]["metrics"].items():
        assert ours[0]["metrics"][key] == pytest.approx(value, rel=1e-6), key
    for name, value in ours[1]["state"].items():
        if "running" not in name:
            assert torch.equal(value, ours[0]["state"][name]), name


# ---------------------------------------------------------------- with a plan


@pytest.mark.parametrize(
    "layout",
    [pytest.param("tp2", marks=SLOW), "tp2_sp", pytest.param("pp2", marks=SLOW), "tp2_sp_pp2"],
)
def test_own_transformer_equals_one_process(layout: str) -> None:
    size, options = LAYOUTS[layout]
    run = user_run(layout=options | dict(plan=decoder_plan()))
    ranks = run_ranks_fresh(fit_module, size, OwnTransformer, run)
    assert_same_training(ranks, alone(OwnTransformer))


def test_network_built_on_meta_in_configure_model() -> None:
    size, options = LAYOUTS["tp2_sp_pp2"]
    run = user_run(layout=options | dict(plan=decoder_plan()))
    assert_same_training(
        run_ranks_fresh(fit_module, size, LateTransformer, run), alone(LateTransformer)
    )


def plain_losses(rank: int, world_size: int) -> list[float]:
    """The losses of `OwnTransformer` in a plain loop on the same batches."""
    module, run = OwnTransformer(), user_run()
    optimizer = module.configure_optimizers()
    losses = []
    for index in range(run.steps):
        loss, _ = module.losses(global_batch(run, index))
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(module.parameters(), 1.0)
        optimizer.step()
        losses.append(float(loss))
    return losses


def test_one_process_equals_a_plain_loop() -> None:
    run = user_run(layout=dict(plan=decoder_plan()), trainer=dict(gradient_clip_val=1.0))
    got = run_ranks_fresh(fit_module, 1, OwnTransformer, run)[0]["losses"]
    for step, want in enumerate(run_ranks_fresh(plain_losses, 1)[0]):
        tolerances.assert_loss_close(got[step], want, step)


class TiedTransformer(OwnTransformer):
    def __init__(self) -> None:
        super().__init__(functools.partial(Decoder, tied=True))


@pytest.mark.parametrize(
    "layout", [pytest.param("pp2", marks=SLOW), pytest.param("tp2", marks=SLOW), "tp2_pp2"]
)
def test_tied_weights_of_a_users_network(layout: str) -> None:
    tp = dict(tensor_parallel_size=2) if "tp2" in layout else {}
    pp = dict(pipeline_parallel_size=2, micro_batch_size=2) if "pp2" in layout else {}
    plan = decoder_plan(tied=True)
    size = (2 if tp else 1) * (2 if pp else 1)
    single = run_ranks_fresh(fit_module, 1, TiedTransformer, user_run(layout=dict(plan=plan)))[0]
    run = user_run(layout=tp | pp | dict(plan=plan))
    ranks = run_ranks_fresh(fit_module, size, TiedTransformer, run)
    assert "net.head.weight" not in single["final"]
    assert_same_training(ranks, single)


def test_ties_that_the_plan_does_not_name() -> None:
    """They would silently come apart on two stages."""
    plan = decoder_plan(tied=True)
    unsaid = ParallelPlan(
        splits=plan.splits, layers=plan.layers, first=plan.first, last=plan.last, sequence_dim=1
    )
    run = user_run(layout=LAYOUTS["pp2"][1] | dict(plan=unsaid))
    with pytest.raises(RankError, match=r"words\.weight.*head\.weight.*plan\.tied"):
        run_ranks_fresh(fit_module, 2, TiedTransformer, run)


class StrayParameter(OwnTransformer):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))


def test_parameters_outside_of_the_network() -> None:
    run = user_run(layout=dict(plan=decoder_plan()))
    with pytest.raises(RankError, match=r"outside of 'net'.*\['scale'\]"):
        run_ranks_fresh(fit_module, 1, StrayParameter, run)


def test_a_stage_without_parameters_is_refused() -> None:
    """Five modules, two of them without parameters, can't fill four stages."""
    run = user_run(layout=dict(pipeline_parallel_size=4, plan=SEQUENTIAL))
    with pytest.raises(RankError, match="rank [0-9] of the pipeline would hold no parameter"):
        run_ranks_fresh(fit_pairs, 4, SequentialModule, run, 8, 4)


# ---------------------------------------------------------------- names, and odd parameters


class ByName(OwnTransformer):
    """Parameter groups by name, as one writes them for a whole network."""

    def configure_optimizers(self) -> torch.optim.Optimizer:
        named = dict(self.named_parameters())
        fast = [p for n, p in named.items() if n.startswith(("net.head", "net.blocks.3"))]
        slow = [p for n, p in named.items() if not n.startswith(("net.head", "net.blocks.3"))]
        groups = [dict(params=slow, lr=1e-4), dict(params=fast, lr=1e-3)]
        return torch.optim.AdamW([group for group in groups if group["params"]])


@pytest.mark.parametrize("layout", [LAYOUTS["pp2"][1], dict(pipeline_parallel_size=2, virtual=2)])
def test_names_are_those_of_the_whole_network(layout: dict[str, Any]) -> None:
    [single] = run_ranks_fresh(fit_module, 1, ByName, user_run(layout=dict(plan=decoder_plan())))
    run = user_run(layout=layout | dict(plan=decoder_plan()))
    ranks = run_ranks_fresh(fit_module, 2, ByName, run)
    assert ranks[0]["losses"] == pytest.approx(single["losses"], rel=1e-5)


class Convolution(L.LightningModule):
    """Channels-last weights (not contiguous), a list of modules called `chunks`."""

    def __init__(self) -> None:
        super().__init__()
        self.chunks = nn.ModuleList([nn.Conv2d(1, 4, 2), nn.Conv2d(4, 2, 2)])
        self.to(memory_format=torch.channels_last)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        for layer in self.chunks:
            x = torch.tanh(layer(x.view(len(x), -1, 4, 2) if x.dim() == 2 else x[:, :, :, :]))
            x = F.pad(x, (0, 1, 0, 1))
        loss = F.cross_entropy(x.mean((2, 3)), y % 2)
        self.log("train_loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def test_strided_weights_and_a_list_called_chunks() -> None:
    run = user_run(steps=4)
    first, second = run_ranks_fresh(fit_pairs, 2, Convolution, run, 32, 4)
    assert set(first["final"]) == {f"chunks.{i}.{n}" for i in (0, 1) for n in ("weight", "bias")}
    for name, value in first["final"].items():
        assert torch.equal(value, second["final"][name]), name


# ---------------------------------------------------------------- the page on own modules


def fit_example(rank: int, world_size: int, run: Run) -> dict[str, Any]:
    text = (Path(__file__).parents[2] / "docs" / "own_modules.md").read_text()
    names: dict[str, Any] = {"__name__": "example"}
    exec(re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL)[0], names)
    L.seed_everything(3)
    plan = dict(plan=names["PLAN"])
    return fit_module(
        rank, world_size, names["Model"], dataclasses.replace(run, layout=run.layout | plan)
    )


def test_the_example_of_the_page_trains_alike() -> None:
    [single] = run_ranks_fresh(fit_example, 1, user_run())
    ranks = run_ranks_fresh(fit_example, 4, user_run(layout=LAYOUTS["tp2_sp_pp2"][1]))
    assert ranks[3]["losses"] == pytest.approx(single["losses"], rel=1e-5)
    assert single["losses"][-1] != single["losses"][0]
