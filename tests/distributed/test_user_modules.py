"""Users' own LightningModules over data, tensor and pipeline axes, against one process."""

import dataclasses
import functools
import logging
import math
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
from megatron_lightning.config import ParallelPlan, replicated
from megatron_lightning.runtime.batch import MicroBatches
from tests import tolerances
from tests.distributed.test_cases_loss import MaskedBatches, second_replica
from tests.harness import RankError, run_ranks_fresh
from tests.layout_runs import (
    Batches,
    Recorder,
    Run,
    assemble,
    assert_same_training,
    global_batch,
    results,
)
from tests.user_modules import (
    Classifier,
    Decoder,
    LateTransformer,
    OwnTransformer,
    SequentialModule,
    decoder_plan,
    fit_module,
    pairs,
    quiet_trainer,
    user_run,
)

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


@functools.cache
def alone(make: Any) -> dict[str, Any]:
    """The module in one process."""
    return run_ranks_fresh(fit_module, 1, make, user_run(layout=dict(plan=decoder_plan())))[0]


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


# ---------------------------------------------------------------- nn.Sequential and odd batches

SEQUENTIAL = ParallelPlan(splits={"*": replicated()})


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


def test_a_stage_without_parameters_is_refused() -> None:
    """Five modules, two of them without parameters, can't fill four stages."""
    run = user_run(layout=dict(pipeline_parallel_size=4, plan=SEQUENTIAL))
    with pytest.raises(RankError, match="rank [0-9] of the pipeline would hold no parameter"):
        run_ranks_fresh(fit_pairs, 4, SequentialModule, run, 8, 4)


# ---------------------------------------------------------------- batches


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


# ---------------------------------------------------------------- steps that can't be pipelined


class Twice(OwnTransformer):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.net(batch["tokens"])
        return super().training_step(batch, batch_idx)


class Never(OwnTransformer):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return {"loss": torch.zeros((), requires_grad=True), "num_tokens": 1}


@pytest.mark.parametrize(("make", "times"), [(Twice, 2), (Never, 0)])
def test_the_network_must_be_called_once(make: Any, times: int) -> None:
    run = user_run(layout=LAYOUTS["pp2"][1] | dict(plan=decoder_plan()))
    with pytest.raises(RankError, match=f"called the network {times} times"):
        run_ranks_fresh(fit_module, 2, make, run, timeout=60)


class OtherKeys(OwnTransformer):
    """Data ranks log different names."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.log(f"of_rank_{self.global_rank % 2}", 1.0)
        return super().training_step(batch, batch_idx)


def test_ranks_that_log_different_names() -> None:
    run = user_run(layout=dict(plan=decoder_plan()))
    with pytest.raises(RankError, match="ranks logged different keys") as caught:
        run_ranks_fresh(fit_module, 2, OtherKeys, run, timeout=60)
    assert str(caught.value).count("of_rank_1") >= 2  # every rank gets the message


class Raises(OwnTransformer):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.log("before", 1.0)
        result = super().training_step(batch, batch_idx)
        if self.trainer.global_step == 2:
            raise KeyError("from the last stage")
        return result


def test_an_exception_in_a_step_under_pipeline() -> None:
    run = user_run(layout=LAYOUTS["pp2"][1] | dict(plan=decoder_plan()))
    with pytest.raises(RankError, match="from the last stage") as caught:
        run_ranks_fresh(fit_module, 2, Raises, run, timeout=60)
    assert caught.value.rank == 1


class Gathers(OwnTransformer):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        result = super().training_step(batch, batch_idx)
        self.all_gather(result["loss"])
        return result


def test_collectives_inside_a_pipelined_step_are_refused() -> None:
    """Stages that unwind before would never take part."""
    run = user_run(layout=LAYOUTS["pp2"][1] | dict(plan=decoder_plan()))
    with pytest.raises(RankError, match="all_gather.*pipeline_parallel_size > 1"):
        run_ranks_fresh(fit_module, 2, Gathers, run, timeout=60)


# ---------------------------------------------------------------- evaluation and prediction


def evaluate(rank: int, world_size: int, run: Run) -> dict[str, Any]:
    seen: list[Any] = []

    class Outputs(L.Callback):
        def on_validation_batch_end(self, trainer: Any, module: Any, outputs: Any, *_: Any) -> None:
            seen.append(outputs)

    trainer = quiet_trainer(run, world_size, [Outputs()])
    module, data = OwnTransformer(), Batches(run)
    metrics = trainer.validate(module, data, verbose=False)
    batches = [global_batch(run, i) for i in range(2)]
    predictions = trainer.predict(module, DataLoader(batches, batch_size=None))  # type: ignore[arg-type]
    return {"metrics": metrics, "outputs": seen, "predictions": predictions}


def test_validation_outputs_and_predictions_under_pipeline() -> None:
    layout = LAYOUTS["pp2"][1] | dict(plan=decoder_plan())
    [single] = run_ranks_fresh(evaluate, 1, user_run(layout=dict(plan=decoder_plan())))
    ranks = run_ranks_fresh(evaluate, 2, user_run(layout=layout))
    for rank in ranks:
        assert rank["metrics"][0] == pytest.approx(single["metrics"][0], rel=1e-5)
        for got, want in zip(rank["predictions"], single["predictions"], strict=True):
            assert torch.equal(got["best"], want["best"])
            assert got["size"] == [2, 2, 2, 2]  # a list grows by micro-batches
    # only the last stage has outputs: one entry for each micro-batch
    assert ranks[0]["outputs"] == [None, None]
    assert [output["val"].shape for output in ranks[1]["outputs"]] == [(4,), (4,)]
    tokens = torch.stack([output["num_tokens"] for output in ranks[1]["outputs"]]).sum()
    assert tokens == sum(output["num_tokens"] for output in single["outputs"])


# ---------------------------------------------------------------- several fits in one process


def fit_again(rank: int, world_size: int, run: Run) -> list[Any]:
    """bf16 as a whole, then the same module in float32 over two chunks, then as a whole again."""
    module = OwnTransformer()
    losses = []
    for layout, precision in (
        ({}, "bf16-mixed"),
        (dict(virtual=2), "32-true"),
        ({}, "32-true"),
    ):
        part = user_run(
            layout=layout | dict(plan=decoder_plan()), trainer=dict(precision=precision)
        )
        recorder = Recorder(part)
        trainer = quiet_trainer(part, world_size, [recorder])
        try:
            trainer.fit(module, Batches(part))
        except ValueError as error:
            return [*losses, str(error)]
        losses.append((recorder.losses, next(module.parameters()).dtype))
    return losses


def test_fit_again_in_another_layout_and_precision() -> None:
    [(first, half), (second, whole), message] = run_ranks_fresh(fit_again, 1, user_run())[0]
    assert (half, whole) == (torch.bfloat16, torch.float32)
    assert len(first) == len(second) == 5
    assert second[0] < first[0]  # the weights were kept, not drawn again
    assert "was cut for" in message  # the chunks are not put together again


def fit_layouts(rank: int, world_size: int) -> list[list[float]]:
    """New modules in three layouts over the same two processes."""
    losses = []
    for layout in ("tp2_sp", "pp2", "dp2"):
        run = user_run(layout=LAYOUTS.get(layout, (2, {}))[1] | dict(plan=decoder_plan()))
        losses.append(fit_module(rank, world_size, OwnTransformer, run)["losses"])
    return losses


@SLOW
def test_other_layouts_in_the_same_processes() -> None:
    want = alone(OwnTransformer)["losses"]
    for rank in run_ranks_fresh(fit_layouts, 2):
        for losses in rank:
            assert losses == pytest.approx(want, rel=1e-5)


# ---------------------------------------------------------------- steps that give nothing


class SometimesNone(OwnTransformer):
    """Skips the second batch on data rank 1, everywhere the third; a mean over micro-batches."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss, _ = self.losses(batch)
        self.log("train_loss", loss)
        rank = self.trainer.distributed_sampler_kwargs["rank"]
        return None if batch_idx == 2 or (batch_idx == 1 and rank == 1) else loss


@pytest.mark.parametrize(
    ("size", "layout"), [(2, {}), pytest.param(4, dict(pipeline_parallel_size=2), marks=SLOW)]
)
def test_a_step_may_give_none_on_some_ranks(size: int, layout: dict[str, Any]) -> None:
    run = user_run(layout=layout | dict(plan=decoder_plan()), keep_gradients=(1, 2))
    ranks = run_ranks_fresh(fit_module, size, SometimesNone, run, timeout=60)
    for rank in ranks:
        assert rank["losses"] == ranks[0]["losses"]
        assert rank["losses"][2] == 0.0  # nothing, so nothing was learnt
        assert rank["norms"][1] > 0.0
        assert rank["norms"][2] == 0.0
        assert all(math.isfinite(loss) for loss in rank["losses"])
    assemble([rank["final"] for rank in ranks])  # replicas are still equal


class Branch(Classifier):
    """A part of the network that only one data rank uses in each step."""

    def __init__(self) -> None:
        super().__init__()
        self.extra = nn.Linear(8, 4)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        logits = self.body[0](x)[:, :4]
        if (batch_idx + self.global_rank) % 2:
            logits = logits + self.extra(x)
        loss = F.cross_entropy(logits, y)
        self.log("train_loss", loss)
        return loss


def test_a_part_that_one_replica_does_not_use() -> None:
    """Its gradient is the other's share, as with DDP(find_unused_parameters=True)."""
    run = user_run(steps=3)
    first, second = run_ranks_fresh(fit_pairs, 2, Branch, run, 24, 4, timeout=60)
    for name, value in first["final"].items():
        assert torch.equal(value, second["final"][name]), name
    untrained = dict(Branch().named_parameters())
    assert not torch.equal(first["final"]["body.0.weight"], untrained["body.0.weight"])


def fit_masked(rank: int, world_size: int, layout: dict[str, Any], only: int | None) -> Any:
    run = user_run(layout=layout | dict(plan=decoder_plan()), keep_gradients=(0,))
    recorder = Recorder(run)
    trainer = quiet_trainer(run, world_size, [recorder])
    trainer.fit(OwnTransformer(), MaskedBatches(run, second_replica, only))
    return results(trainer, recorder)


@pytest.mark.parametrize(
    ("size", "layout"), [(2, {}), pytest.param(4, dict(pipeline_parallel_size=2), marks=SLOW)]
)
def test_a_mean_over_no_tokens_is_left_out(size: int, layout: dict[str, Any]) -> None:
    """0/0 on data rank 1: its gradient would not be a number, and no token of it counts."""
    [single] = run_ranks_fresh(fit_masked, 1, {}, 0)
    for rank in run_ranks_fresh(fit_masked, size, layout, None):
        assert rank["losses"] == pytest.approx(single["losses"], rel=1e-5)


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


def fit_detached(rank: int, world_size: int) -> list[str]:
    class Detached(OwnTransformer):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return super().training_step(batch, batch_idx)["loss"].detach()

    messages: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("megatron_lightning").addHandler(handler)
    run = user_run(layout=dict(plan=decoder_plan()), steps=2)
    quiet_trainer(run, world_size, []).fit(Detached(), Batches(run))
    return [message for message in messages if "does not depend on any trainable" in message]


def test_a_loss_without_a_gradient_is_said() -> None:
    assert len(run_ranks_fresh(fit_detached, 1)[0]) == 1


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
