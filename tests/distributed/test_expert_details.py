"""Expert parallelism at its edges: idle experts and ranks, schedules, recomputation, checks."""

import dataclasses
import functools
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelSummary
from torch import Tensor, nn

from megatron_lightning.config import (
    DataParallelConfig,
    ExpertConfig,
    MoEConfig,
    PipelineConfig,
    RuntimeConfig,
)
from megatron_lightning.config.plan import ParameterInfo, experts, replicated
from megatron_lightning.config.recompute import RecomputeConfig
from megatron_lightning.config.validate import ConfigurationError
from megatron_lightning.layers.moe.router import Router
from megatron_lightning.models.gpt import GPTModel
from megatron_lightning.parallel.data import GradientBuckets
from megatron_lightning.parallel.mesh import ParallelMesh
from megatron_lightning.strategies import adjust
from tests.distributed import test_resume, test_sanity, test_step_mistakes
from tests.distributed.test_bad_input import trainer
from tests.harness import run_ranks, run_ranks_fresh
from tests.layout_runs import (
    Batches,
    Run,
    assemble,
    assert_same_training,
    boxes,
    tiny_config,
    train,
)

MOE = MoEConfig(num_experts=4, ffn_hidden_size=32, shared_expert_ffn_hidden_size=16)
SMALL = dict(num_layers=2, ffn_hidden_size=48, add_bias_linear=True)
CONFIG = tiny_config(**SMALL, moe=MOE)
FOLDED = dict(tensor_parallel_size=2, expert_parallel_size=2, expert_tensor_parallel_size=1)


def send_all_to_first_half() -> None:
    """From now on, in this rank: routers choose among the first half of the experts."""
    selection = Router.selection

    def biased(self: Router, logits: Tensor, padding: Tensor | None = None) -> Tensor:
        values = selection(self, logits, padding)
        late = torch.arange(values.shape[1], device=values.device) >= 2
        return values.masked_fill(late, -torch.inf)

    Router.selection = biased


def idle_train(rank: int, world_size: int, run: Run) -> dict[str, Any]:
    send_all_to_first_half()
    return train(rank, world_size, run)


def idle_fit(rank: int, world_size: int, *arguments: Any) -> dict[str, Any]:
    send_all_to_first_half()
    return test_resume.fit(rank, world_size, *arguments)


def run_of(layout: dict[str, Any], **changes: Any) -> Run:
    options = dict(config=CONFIG, steps=3, keep_gradients=(0, 1, 2), layout=layout)
    return Run(**{**options, **changes})


@functools.cache
def alone(target: Callable[..., Any] = train) -> dict[str, Any]:
    return run_ranks_fresh(target, 1, run_of({}))[0]


IDLE: dict[str, tuple[int, dict[str, Any]]] = {
    "ep2": (2, dict(expert_parallel_size=2)),
    "ep2_gather": (2, dict(expert_parallel_size=2, expert=ExpertConfig(dispatcher="all_gather"))),
    "tp2_ep2": (2, FOLDED),
    "ep2_etp2_zero": (
        4,
        dict(
            tensor_parallel_size=2,
            expert_parallel_size=2,
            sequence_parallel=True,
            data_parallel=DataParallelConfig(sharding="optimizer"),
        ),
    ),
    "ep4_fsdp": (
        4,
        dict(expert_parallel_size=4, data_parallel=DataParallelConfig(sharding="fsdp")),
    ),
}


@pytest.mark.parametrize(
    "layout", [n if n == "tp2_ep2" else pytest.param(n, marks=pytest.mark.slow) for n in IDLE]
)
def test_experts_and_ranks_without_a_token(layout: str) -> None:
    """Their gradients are zero, not missing: AdamW decays them as in one process."""
    world_size, options = IDLE[layout]
    ranks = run_ranks_fresh(idle_train, world_size, run_of(options))
    assert_same_training(ranks, alone(idle_train))
    gradients = assemble([rank["gradients"][0] for rank in ranks])
    for name, gradient in gradients.items():
        assert ".experts." not in name or not gradient[2:].any(), name


@pytest.mark.slow
def test_idle_ranks_go_on_bitwise(tmp_path: Path) -> None:
    run = run_of(dict(expert_parallel_size=2), steps=test_resume.STEPS, learning_rate=1e-4)
    fit = functools.partial(run_ranks_fresh, idle_fit, 2, run)
    whole = fit(str(tmp_path / "whole"), test_resume.STEPS, None)
    last = str(tmp_path / "half" / "last.ckpt")
    fit(str(tmp_path / "half"), test_resume.SAVED_AT, None)
    rest = fit(str(tmp_path / "half"), test_resume.STEPS, last)
    for one, other in zip(whole, rest, strict=True):
        assert other["losses"] == one["losses"][test_resume.SAVED_AT :]
        for name, (_, _, _, value) in one["final"].items():
            assert torch.equal(other["final"][name][3], value), name
        for name, state in one["moments"].items():
            assert all(torch.equal(other["moments"][name][k], v) for k, v in state.items()), name


def train_sparse(rank: int, world_size: int, run: Run, mean: bool) -> Any:
    """Final weights; with `mean`, the silent rank's samples are masked in place of left out."""
    model = test_step_mistakes.Sparse(run.config)
    if mean:
        model.silent_rank = -1
    trainer = test_step_mistakes.trainer_of(run, world_size)
    trainer.fit(model, Batches(run))
    return boxes(trainer, "value")


@pytest.mark.parametrize("pipeline", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_rank_whose_step_has_no_loss(pipeline: int) -> None:
    """Others wait for its backward pass, through which their tokens' gradients go."""
    layout: dict[str, Any] = dict(expert_parallel_size=2)
    if pipeline > 1:
        layout |= dict(pipeline_parallel_size=pipeline, micro_batch_size=2)
    expected = run_of(layout, make_batch=test_step_mistakes.masked)
    got = run_ranks_fresh(train_sparse, 2 * pipeline, run_of(layout), False)
    want = run_ranks_fresh(train_sparse, 2 * pipeline, expected, True)
    whole = assemble(got)
    for name, value in assemble(want).items():
        torch.testing.assert_close(whole[name], value, rtol=0, atol=0)


VARIANTS: dict[str, tuple[int, dict[str, Any]]] = {
    "zero_bubble": (
        4,
        dict(
            pipeline_parallel_size=2,
            expert_parallel_size=2,
            micro_batch_size=2,
            pipeline=PipelineConfig(schedule="zb-h1"),
        ),
    ),
    "interleaved_ep2_zero": (
        4,
        dict(
            pipeline_parallel_size=2,
            expert_parallel_size=2,
            micro_batch_size=2,
            virtual=2,
            data_parallel=DataParallelConfig(sharding="optimizer", bucket_size=2000),
        ),
    ),
    "recomputed": (2, dict(expert_parallel_size=2, recompute=RecomputeConfig(mode="full"))),
    "recomputed_folded": (
        2,
        FOLDED
        | dict(
            sequence_parallel=True,
            recompute=RecomputeConfig(mode="selective", modules=("*.mlp",)),
        ),
    ),
    "order": (
        4,
        dict(
            pipeline_parallel_size=2,
            expert_parallel_size=2,
            micro_batch_size=2,
            runtime=RuntimeConfig(axis_order=("tp", "cp", "dp", "pp")),
        ),
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("variant", VARIANTS)
def test_schedules_and_recomputation(variant: str) -> None:
    world_size, options = VARIANTS[variant]
    assert_same_training(run_ranks_fresh(train, world_size, run_of(options)), alone())


# ---- groups and buckets


def groups(rank: int, world_size: int) -> list[bool]:
    """Whether groups are shared by what must not wait for one another."""
    cpu = torch.device("cpu")
    data = ParallelMesh.build(device=cpu, expert=2)
    folded = ParallelMesh.build(device=cpu, tensor=2)
    return [
        data.axis("ep").group is data.dp_cp.group,
        data.axis("ep_etp").group is data.dp_cp.group,
        data.axis("dp_cp_tp").group is data.dp_cp.group,
        folded.axis("edp").group is folded.tp.group,
        data.axis("ep").ranks != data.dp_cp.ranks,
        folded.axis("edp").ranks != folded.tp.ranks,
    ]


def test_collectives_in_layers_share_no_group_with_gradients() -> None:
    assert run_ranks(groups, 2) == [[False] * 6] * 2


def overlapped(rank: int, world_size: int) -> tuple[int, float, float]:
    mesh = ParallelMesh.build(device=torch.device("cpu"), tensor=2)  # edp spans the tensor ranks
    parameters = {name: nn.Parameter(torch.zeros(2)) for name in ("dense", "expert")}
    table = {
        name: ParameterInfo(
            name=name,
            global_shape=(2,),
            offsets=(0,),
            sizes=(2,),
            split=split,
            expert=name == "expert",
        )
        for name, split in (("dense", replicated()), ("expert", experts()))
    }
    buckets = GradientBuckets(parameters, table, mesh, sequence_parallel=False)
    buckets.reset()
    buckets.arm()
    sum((p * (rank + 1)).sum() for p in parameters.values()).backward()
    launched = buckets.num_launched
    buckets.finish(1)
    return launched, *(float(buckets.main_grad(n)[0]) for n in parameters)


def test_experts_are_reduced_during_the_backward_pass() -> None:
    assert run_ranks(overlapped, 2) == [(2, 1.0, 3.0), (2, 2.0, 3.0)]


# ---- what is refused

REFUSED: dict[str, tuple[int, dict[str, Any], GPTModel, str]] = {
    "experts": (
        3,
        dict(expert_parallel_size=3),
        GPTModel(CONFIG),
        r"expert_parallel_size=3 does not divide the 4 experts of .*; use one of \[1, 2, 4\]",
    ),
    "dense": (
        2,
        dict(expert_parallel_size=2),
        GPTModel(tiny_config()),
        r"expert_parallel_size=2: the network has no experts .*; set it to 1",
    ),
    "columns": (
        2,
        dict(expert_tensor_parallel_size=2),
        GPTModel(tiny_config(**SMALL, moe=dataclasses.replace(MOE, ffn_hidden_size=33))),
        r"expert_tensor_parallel_size=2 does not divide the 33 columns of an expert of .*",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_model_that_does_not_fit(case: str) -> None:
    devices, layout, model, message = REFUSED[case]
    with pytest.raises(ConfigurationError) as caught:
        trainer(devices, layout).fit(model, Batches(run_of({})))
    found = [text for text in caught.value.problems if re.search(message, text)]
    assert len(found) == 1
    assert len(caught.value.problems) == 1


@pytest.mark.parametrize(
    ("devices", "layout", "message"),
    [
        (
            2,
            dict(tensor_parallel_size=2, expert_parallel_size=2),
            r"expert_parallel_size=2 x expert_tensor_parallel_size=2 x .* = 4 does not divide it;"
            r" set expert_tensor_parallel_size=1",
        ),
        (
            6,
            dict(pipeline_parallel_size=3, expert_parallel_size=4),
            r"= 12 does not divide it; use expert_parallel_size of \[1, 2\]",
        ),
        (2, dict(expert_parallel_size=0), "expert_parallel_size=0: it must be a whole number"),
        (
            2,
            dict(expert=ExpertConfig(dispatcher="broadcast")),  # type: ignore[arg-type]
            r"expert.dispatcher='broadcast': choose one of",
        ),
        (
            2,
            dict(
                expert=ExpertConfig(overlap_shared_experts=True),
                data_parallel=DataParallelConfig(sharding="fsdp"),
            ),
            r"overlap_shared_experts=True with data_parallel.sharding='fsdp'",
        ),
    ],
)
def test_sizes_that_do_not_fit(devices: int, layout: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        trainer(devices, layout)


# ---- what looks at parameters

BIAS = "network.decoder.layers.1.mlp.experts.linear_fc2.bias"
WEIGHT = "network.decoder.layers.1.mlp.experts.linear_fc1.weight"
PLANTS: dict[str, tuple[int, dict[str, Any], Any, tuple[int, ...]]] = {
    "clean": (2, FOLDED, None, ()),
    "replica": (
        4,
        dict(expert_parallel_size=2),
        test_sanity.Plant(2, WEIGHT, test_sanity.drift, grad=False),
        (2,),
    ),
    "bias_of_columns": (
        2,
        dict(tensor_parallel_size=2),
        test_sanity.Plant(1, BIAS, test_sanity.drift, grad=False),
        (1,),
    ),
}


@pytest.mark.parametrize("case", PLANTS)
def test_sanity_checks_know_the_replicas_of_experts(case: str) -> None:
    world_size, layout, plant, at_fault = PLANTS[case]
    run = run_of(layout)
    for found in run_ranks_fresh(test_sanity.fit, world_size, run, plant, Batches(run)):
        if plant is None:
            assert found == run.steps
        else:
            assert isinstance(found, tuple)
            assert found[:2] == ("replicas", (plant.name, at_fault))


def announced(rank: int, world_size: int, layout: dict[str, Any]) -> list[str]:
    """What is said of the number of parameters."""
    said: list[str] = []
    adjust.rank_zero_info = said.append  # type: ignore[assignment]
    run = run_of(layout)
    options = dict(accelerator="cpu", devices=world_size, max_steps=1, logger=False)
    L.Trainer(
        strategy=test_sanity.make_strategy(layout),
        callbacks=[ModelSummary()],
        enable_checkpointing=False,
        enable_progress_bar=False,
        limit_val_batches=0,
        **options,
    ).fit(GPTModel(CONFIG), Batches(run))
    return said


def test_the_summary_counts_every_expert_once() -> None:
    [said, _] = run_ranks_fresh(announced, 2, FOLDED)
    assert f"{CONFIG.num_parameters():,} parameters" in said[0]
    assert "tp=2 ep=2 etp=1" in said[0]
