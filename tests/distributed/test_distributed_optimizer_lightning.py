"""Sharded optimizer state and parameters under Lightning: what hooks see, who waits, users' own
modules.
"""

import functools
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import (
    Callback,
    EarlyStopping,
    LearningRateMonitor,
    ModelCheckpoint,
    WeightAveraging,
)
from torch import Tensor, nn

from megatron_lightning.config import DataParallelConfig, PipelineConfig
from megatron_lightning.config.validate import ConfigurationError
from megatron_lightning.optim.shards import ParameterBucket
from megatron_lightning.parallel.collectives import all_gather_single
from megatron_lightning.strategies.readers import readers
from tests import layout_runs
from tests.harness import run_ranks_fresh
from tests.layout_runs import Recorder, Run, assert_same_training, tiny_config, train
from tests.user_modules import OwnTransformer, SequentialModule, decoder_plan
from tests.user_runs import fit_module, quiet_trainer, user_run

SHARDED = DataParallelConfig(sharding="optimizer", bucket_size=20_000)
FULL = DataParallelConfig(sharding="fsdp")

# ---------------------------------------------------------------- users' modules


@functools.cache
def alone(planned: bool) -> dict[str, Any]:
    layout = dict(plan=decoder_plan()) if planned else {}
    return run_ranks_fresh(fit_module, 1, OwnTransformer, user_run(layout=layout))[0]


@pytest.mark.parametrize("data_parallel", [SHARDED, FULL], ids=["optimizer", "fsdp"])
def test_a_module_without_a_plan(data_parallel: DataParallelConfig) -> None:
    run = user_run(layout=dict(data_parallel=data_parallel))
    ranks = run_ranks_fresh(fit_module, 2, OwnTransformer, run)
    assert_same_training(ranks, alone(False))


@pytest.mark.slow
@pytest.mark.parametrize("data_parallel", [SHARDED, FULL], ids=["optimizer", "fsdp"])
def test_a_users_network_with_a_plan(data_parallel: DataParallelConfig) -> None:
    layout = dict(
        plan=decoder_plan(),
        data_parallel=data_parallel,
        tensor_parallel_size=2,
        pipeline_parallel_size=2,
        micro_batch_size=2,
    )
    ranks = run_ranks_fresh(fit_module, 8, OwnTransformer, user_run(layout=layout))
    assert_same_training(ranks, alone(True))


class Loose(L.LightningModule):
    """Parameters in places that no forward gathers."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(2))
        self.table = nn.ParameterList([torch.ones(3)])
        self.blocks = nn.ModuleList([nn.ModuleList([nn.Linear(2, 2)])])


def test_modules_that_can_not_be_sharded_are_refused_before_a_start() -> None:
    run = Run(layout=dict(data_parallel=FULL))
    trainer = quiet_trainer(run, 2, [])
    with pytest.raises(ConfigurationError) as caught:
        trainer.fit(Loose(), layout_runs.Batches(run))
    first, second = caught.value.problems
    assert "Loose holds parameters itself (['scale'])" in first
    assert "Loose.table (ParameterList)" in second


class Manual(SequentialModule):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False


@pytest.mark.parametrize("data_parallel", [SHARDED, FULL], ids=["optimizer", "fsdp"])
def test_manual_optimization_is_refused(data_parallel: DataParallelConfig) -> None:
    trainer = quiet_trainer(Run(layout=dict(data_parallel=data_parallel)), 2, [])
    with pytest.raises(ConfigurationError, match="automatic_optimization=False"):
        trainer.fit(Manual())


def test_weight_averaging_with_sharded_parameters_is_refused() -> None:
    trainer = quiet_trainer(Run(layout=dict(data_parallel=FULL)), 2, [WeightAveraging()])
    with pytest.raises(ConfigurationError, match="WeightAveraging with data_parallel.sharding"):
        trainer.fit(SequentialModule())


# ---------------------------------------------------------------- hooks and clipping


class Probe(Callback):
    """What a user's hook sees before the optimizer step."""

    reads_parameters = False

    def __init__(self) -> None:
        self.seen: list[dict[str, Any]] = []

    def on_before_optimizer_step(self, trainer: Any, module: Any, optimizer: Any) -> None:
        parts = [p for group in optimizer.param_groups for p in group["params"]]
        self.seen.append(
            {
                "module_grads": [p.grad is not None for p in module.parameters()],
                "part_dims": {p.dim() for p in parts},
                "dtypes": {p.dtype for p in parts} | {p.grad.dtype for p in parts},
                "group_names": [group["name"] for group in optimizer.param_groups],
                "numel": sum(p.numel() for p in parts),
                "total": sum(p.numel() for p in module.parameters()),
            }
        )


def probe(rank: int, world_size: int, run: Run) -> list[dict[str, Any]]:
    model = layout_runs.GPTModel(run.config)
    callback = Probe()
    trainer = quiet_trainer(run, world_size, [callback])
    trainer.fit(model, layout_runs.Batches(run))
    return callback.seen


def test_hooks_see_parts_on_the_optimizer() -> None:
    run = Run(
        layout=dict(data_parallel=SHARDED),
        steps=2,
        trainer=dict(precision="bf16-mixed", limit_val_batches=0),
    )
    ranks = run_ranks_fresh(probe, 2, run)
    for seen in (seen for rank in ranks for seen in rank):
        assert not any(seen["module_grads"])
        assert seen["part_dims"] == {1}
        assert seen["dtypes"] == {torch.float32}
        assert seen["group_names"] == ["decay", "no_decay"]
    assert sum(rank[0]["numel"] for rank in ranks) == ranks[0][0]["total"]


@pytest.mark.slow
@pytest.mark.parametrize("data_parallel", [SHARDED, FULL], ids=["optimizer", "fsdp"])
def test_clipping_by_value(data_parallel: DataParallelConfig) -> None:
    trainer = dict(gradient_clip_val=1e-3, gradient_clip_algorithm="value")
    single = run_ranks_fresh(train, 1, Run(trainer=trainer, steps=4, keep_gradients=(0,)))[0]
    run = Run(
        trainer=trainer, steps=4, keep_gradients=(0,), layout=dict(data_parallel=data_parallel)
    )
    assert_same_training(run_ranks_fresh(train, 2, run), single)


# ---------------------------------------------------------------- the gather under way


class Late:
    """A gather that begins when somebody waits for it; until then foreign parts are NaN."""

    waits = 0

    def __init__(self, made: ParameterBucket) -> None:
        own = made.own.clone()
        made.data.fill_(torch.nan)
        made.own.copy_(own)
        self.made = made

    def wait(self) -> None:
        type(self).waits += 1
        all_gather_single(self.made.data, self.made.own, group=self.made.shard.group)


def _begin_late(made: ParameterBucket, *, rounded: bool = False) -> None:
    with torch.no_grad():
        if made.has_copies and not rounded:
            made.own.copy_(made.masters)
        made.work = Late(made) if made.shard.size > 1 else None


def train_late(rank: int, world_size: int, run: Run) -> tuple[dict[str, Any], int]:
    ParameterBucket.begin_gather = _begin_late  # type: ignore[method-assign]  (a process of its own)
    return train(rank, world_size, run), Late.waits


LATE: dict[str, tuple[int, dict[str, Any], dict[str, Any]]] = {
    "dp2": (2, {}, {}),
    "dp2_tied": (2, dict(tie_word_embeddings=True), {}),
    "pp2_interleaved_dp2": (
        4,
        {},
        dict(
            pipeline_parallel_size=2,
            micro_batch_size=2,
            pipeline=PipelineConfig(virtual_pipeline_size=2),
        ),
    ),
}


@pytest.mark.parametrize(
    "case", ["dp2", *(pytest.param(n, marks=pytest.mark.slow) for n in LATE if n != "dp2")]
)
def test_every_reader_waits_for_the_gather(case: str) -> None:
    """Forward passes, validation and the final weights read nothing that is not there yet."""
    size, changes, layout = LATE[case]
    data_parallel = DataParallelConfig(sharding="optimizer", bucket_size=5_000)
    run = Run(
        config=tiny_config(**changes),
        layout=layout | {"data_parallel": data_parallel},
        steps=4,
        keep_gradients=(0, 3),
        trainer=dict(val_check_interval=2),
    )
    found = run_ranks_fresh(train_late, size, run)
    at_once = DataParallelConfig(
        sharding="optimizer", bucket_size=5_000, overlap_param_gather=False
    )
    plain = run_ranks_fresh(
        train, size, Run(**{**vars(run), "layout": layout | {"data_parallel": at_once}})
    )
    for (got, waits), want in zip(found, plain, strict=True):
        assert waits > 4 * 5  # several buckets a step
        assert got["losses"] == want["losses"]
        assert got["metrics"] == want["metrics"]
        for name, box in want["final"].items():
            assert torch.equal(got["final"][name][3], box[3]), name


class Reads(Callback):
    def on_train_batch_end(self, *args: Any, **kwargs: Any) -> None:
        """Might look at a weight."""


class ReadsNone(Reads):
    reads_parameters = False


class Hooked(SequentialModule):
    def optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        super().optimizer_step(*args, **kwargs)


def test_readers_between_a_step_and_the_next_forward_pass_are_known() -> None:
    def found(*callbacks: Callback, module: L.LightningModule | None = None) -> list[str]:
        trainer = L.Trainer(callbacks=list(callbacks), logger=False, accelerator="cpu")
        trainer.strategy.connect(module or SequentialModule())
        return readers(trainer)

    assert found() == []
    assert found(EarlyStopping("x"), ModelCheckpoint(), LearningRateMonitor(), ReadsNone()) == []
    assert found(Reads()) == ["Reads"]
    assert found(WeightAveraging()) == ["WeightAveraging"]
    assert found(module=Hooked()) == ["Hooked"]


# ---------------------------------------------------------------- freezing


class Thaws(Callback):
    """Unfreezes the blocks at the second step and gives them to the optimizer, as BaseFinetuning
    does.
    """

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, index: int) -> None:
        if index == 1:
            for parameter in module.net.blocks.parameters():
                parameter.requires_grad_(True)
            trainer.optimizers[0].add_param_group({"params": list(module.net.blocks.parameters())})


class Frozen(OwnTransformer):
    def __init__(self) -> None:
        super().__init__()
        self.net.blocks.requires_grad_(False)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        trained = [p for p in self.parameters() if p.requires_grad]
        return torch.optim.SGD(trained, lr=0.1, momentum=0.9)


def thaw(rank: int, world_size: int, run: Run) -> dict[str, Tensor]:
    module = Frozen()
    trainer = quiet_trainer(run, world_size, [Thaws()])
    trainer.fit(module, layout_runs.Batches(run))
    names = trainer.strategy.parallel_model.parameters
    assert all(state for state in trainer.optimizers[0].state.values())
    values = {n: getattr(p, "full_tensor", lambda p=p: p)() for n, p in names.items()}
    return {name: value.detach().clone() for name, value in values.items()}


@pytest.mark.slow
@pytest.mark.parametrize("data_parallel", [SHARDED, FULL], ids=["optimizer", "fsdp"])
def test_layers_may_be_unfrozen_during_training(data_parallel: DataParallelConfig) -> None:
    single = run_ranks_fresh(thaw, 1, user_run(trainer=dict(limit_val_batches=0)))[0]
    run = user_run(layout=dict(data_parallel=data_parallel), trainer=dict(limit_val_batches=0))
    for found in run_ranks_fresh(thaw, 2, run):
        for name, value in single.items():
            torch.testing.assert_close(found[name], value, rtol=1e-4, atol=1e-5)


# ---------------------------------------------------------------- again and again


class Fails(OwnTransformer):
    """Fails in the forward or the backward pass of its second batch, on every rank."""

    def __init__(self, where: str) -> None:
        super().__init__()
        self.where = where

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Any:
        result = super().training_step(batch, batch_idx)
        if batch_idx == 1 and self.where == "forward":
            raise FloatingPointError("planned")
        if batch_idx == 1 and self.where == "backward":
            result["loss"].register_hook(self._fail)
        return result

    def _fail(self, grad: Tensor) -> None:
        raise FloatingPointError("planned")


def fail_and_fit_again(rank: int, world_size: int, run: Run, where: str) -> dict[str, Any]:
    """A run that fails in its second step; with the same Trainer others, and evaluation."""
    module, recorder = Fails(where), Recorder(run)
    trainer = quiet_trainer(run, world_size, [recorder])
    with pytest.raises(FloatingPointError):
        trainer.fit(module, layout_runs.Batches(run))
    module.where = ""
    trainer.fit(module, layout_runs.Batches(run))
    trainer.validate(module, layout_runs.Batches(run), verbose=False)
    trainer.fit_loop.epoch_loop.max_steps += 2
    trainer.fit_loop.max_epochs = 2
    trainer.fit(module, layout_runs.Batches(run))
    return {"losses": recorder.losses, "norms": recorder.norms}


@pytest.mark.slow
@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize("data_parallel", [SHARDED, FULL], ids=["optimizer", "fsdp"])
def test_fit_fail_and_fit_again(data_parallel: DataParallelConfig, where: str) -> None:
    want = run_ranks_fresh(fail_and_fit_again, 2, user_run(), where)[0]
    assert len(want["losses"]) > 6
    run = user_run(layout=dict(data_parallel=data_parallel))
    for got in run_ranks_fresh(fail_and_fit_again, 2, run, where):
        assert got["losses"] == pytest.approx(want["losses"], rel=1e-5)
        assert got["norms"] == pytest.approx(want["norms"], rel=1e-4)
