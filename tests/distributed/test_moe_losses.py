"""Routers' own losses, balance and noise: the same training in every layout and accumulation, as in
one process with the same micro-batches.
"""

import dataclasses
import functools
from typing import Any

import lightning as L
import pytest
import torch
from torch import nn

from megatron_lightning.config import MoEConfig, PipelineConfig, RecomputeConfig, RuntimeConfig
from megatron_lightning.layers.moe import Router
from megatron_lightning.models import GPTModel
from tests import tolerances
from tests.harness import run_ranks_fresh
from tests.layout_runs import (
    Batches,
    Run,
    assemble,
    assert_same_training,
    global_batch,
    make_strategy,
    tiny_config,
    train,
)
from tests.router_margins import assert_margins, smallest_margins

STEPS = 3
EXACT = RuntimeConfig(exact_dropout=True)
MODELS: dict[str, MoEConfig] = {
    "losses": MoEConfig(num_experts=4, ffn_hidden_size=48, aux_loss_coeff=0.5, z_loss_coeff=0.05),
    "sequence_loss_and_bias": MoEConfig(
        num_experts=8,
        ffn_hidden_size=48,
        router_score_function="sigmoid",
        router_num_groups=4,
        router_group_topk=2,
        load_balancing="seq_aux_loss",
        aux_loss_coeff=0.5,
        expert_bias=True,
        expert_bias_update_rate=0.02,
        layer_pattern="ED",
    ),
    "global_loss_and_capacity": MoEConfig(
        num_experts=4,
        ffn_hidden_size=48,
        load_balancing="global_aux_loss",
        aux_loss_coeff=0.5,
        capacity_factor=1.0,
        input_jitter=0.1,
        first_dense_layers=1,
    ),
    "sinkhorn": MoEConfig(
        num_experts=4,
        ffn_hidden_size=48,
        load_balancing="sinkhorn",
        capacity_factor=1.0,
        drop_policy="position",
    ),
}
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "dp2": (2, {}),
    "pp2_interleaved": (2, dict(pipeline_parallel_size=2, virtual=2)),
    "zero_bubble": (
        2,
        dict(pipeline_parallel_size=2, pipeline=PipelineConfig(schedule="zb-h1")),
    ),
    "cp2": (2, dict(context_parallel_size=2)),
    "tp2": (2, dict(tensor_parallel_size=2)),
    "tp2_sp": (2, dict(tensor_parallel_size=2, sequence_parallel=True)),
    "ep2": (2, dict(expert_parallel_size=2)),
    "tp2_sp_cp2_ep2": (
        4,
        dict(
            tensor_parallel_size=2,
            context_parallel_size=2,
            sequence_parallel=True,
            expert_parallel_size=2,
            expert_tensor_parallel_size=1,
        ),
    ),
    "recompute": (1, dict(recompute=RecomputeConfig(mode="full"))),
}


def routers(network: nn.Module) -> list[Router]:
    return [module for module in network.modules() if isinstance(module, Router)]


def watched(rank: int, world_size: int, run: Run) -> dict[str, Any]:
    """A run, and how near its routers came to other choices."""
    with smallest_margins() as margins:
        return train(rank, world_size, run) | {"margins": margins}


def run_of(model: str, normalization: str, **options: Any) -> Run:
    config = tiny_config(moe=MODELS[model], init_method_std=0.1)
    layout = {"micro_batch_size": 2, "runtime": EXACT} | options.pop("layout", {})
    return Run(
        config=config,
        normalization=normalization,
        layout=layout,
        steps=STEPS,
        keep_gradients=(0, 1, 2),
        **options,
    )


@functools.cache
def single(model: str, normalization: str = "token") -> dict[str, Any]:
    alone = run_ranks_fresh(watched, 1, run_of(model, normalization))[0]
    assert_margins(alone["margins"])
    return alone


QUICK = (
    ("losses", "dp2"),
    ("losses", "tp2_sp_cp2_ep2"),
    ("sequence_loss_and_bias", "zero_bubble"),
    ("global_loss_and_capacity", "tp2_sp"),
)
SLOW = (
    ("sinkhorn", "cp2"),
    ("losses", "tp2"),
    ("losses", "recompute"),
    ("sequence_loss_and_bias", "pp2_interleaved"),
    ("sequence_loss_and_bias", "tp2_sp_cp2_ep2"),
    ("global_loss_and_capacity", "dp2"),
    ("global_loss_and_capacity", "cp2"),
    ("global_loss_and_capacity", "recompute"),
    ("sinkhorn", "tp2_sp_cp2_ep2"),
    ("sinkhorn", "ep2"),
)


@pytest.mark.parametrize(
    ("model", "layout"), [*QUICK, *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW)]
)
def test_training_equals_one_process(model: str, layout: str) -> None:
    world_size, options = LAYOUTS[layout]
    run = run_of(model, "token", layout=options)
    assert_same_training(run_ranks_fresh(train, world_size, run), single(model))


@pytest.mark.slow
def test_plain_means_of_micro_batches() -> None:
    world_size, options = LAYOUTS["dp2"]
    run = run_of("losses", "micro_batch", layout=options)
    ranks = run_ranks_fresh(train, world_size, run)
    assert_same_training(ranks, single("losses", "micro_batch"))


@pytest.mark.parametrize("normalization", ["token", "micro_batch"])
def test_gradient_is_that_of_mean_loss_and_mean_auxiliary_loss(normalization: str) -> None:
    """Over a window of two batches in two micro-batches each, on two ranks: what plain torch gives
    for the weighted mean of (loss + losses of routers) of the eight micro-batches.
    """
    trainer = dict(accumulate_grad_batches=2, val_check_interval=1.0)
    run = run_of("losses", normalization, trainer=trainer)
    run = dataclasses.replace(run, steps=1, keep_gradients=(0,))
    ranks = run_ranks_fresh(train, 2, run)
    gradients = assemble([rank["gradients"][0] for rank in ranks])
    model = GPTModel(run.config)
    weights = torch.zeros(())
    for index in range(2):
        batch = global_batch(run, index)
        for begin in range(0, run.global_batch_size, 2):
            part = {key: value[begin : begin + 2] for key, value in batch.items()}
            network = model.built_network()
            tokens = part["loss_mask"].sum()
            weight = tokens if normalization == "token" else torch.ones(())
            for router in routers(network):
                router.weight_of_losses.value = weight
            losses = network(part["tokens"], labels=part["labels"])
            total = (losses * part["loss_mask"]).sum() / tokens
            (total * weight).backward()
            weights += weight
    assert len(gradients) == len(list(model.parameters()))
    norm = ranks[0]["norms"][0]
    for name, parameter in model.canonical_parameters().items():
        assert parameter.grad is not None
        got = gradients[name]
        want = parameter.grad[tuple(slice(0, size) for size in got.shape)] / weights
        tolerances.assert_gradient_close(name, got, want, norm)


class Untold(GPTModel):
    """Its step says that its loss is a mean over tokens, its other method doesn't."""

    def num_loss_tokens(self, batch: dict[str, torch.Tensor]) -> None:
        return None


class ByHand(GPTModel):
    """Manual optimization."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.automatic_optimization = False

    def training_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> None:
        optimizer: Any = self.optimizers()
        loss, _ = self.token_losses(batch)
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()


def small_fit(rank: int, world_size: int, kind: type[GPTModel], model: str) -> list[Any]:
    """Three steps; the first router's bias and its loads of the last step."""
    run = run_of(model, "token")
    module = kind(run.config)
    trainer = L.Trainer(
        strategy=make_strategy({}),
        accelerator="cpu",
        devices=world_size,
        max_steps=3,
        limit_val_batches=0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, Batches(run))
    router = routers(module)[0]
    return [router.expert_bias, router.statistics.tokens.clone()]


def test_a_step_that_contradicts_what_it_told_is_an_error() -> None:
    with pytest.raises(Exception, match=r"num_loss_tokens\(batch\) gives None"):
        run_ranks_fresh(small_fit, 1, Untold, "losses")


def test_bias_and_loads_under_manual_optimization() -> None:
    for bias, tokens in run_ranks_fresh(small_fit, 2, ByHand, "sequence_loss_and_bias"):
        assert int(tokens.sum()) == 4 * 16 * 2  # this rank's last batch: samples, tokens, experts
        moved = (bias / MODELS["sequence_loss_and_bias"].expert_bias_update_rate).round()
        assert moved.abs().max() <= 3
        assert moved.abs().max() >= 1
