"""Context parallelism pads samples that don't divide: padding takes no part in the experts' losses,
loads and capacity, so that training equals one process, which has none.
"""

import dataclasses
import functools
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_lightning.config import MoEConfig, RecomputeConfig
from tests.harness import run_ranks_fresh
from tests.layout_runs import Run, assert_same_training, global_batch, tiny_config, train
from tests.router_margins import assert_margins, smallest_margins

CONTEXT = dict(context_parallel_size=2)
MODELS: dict[str, MoEConfig] = {
    "losses_and_bias": MoEConfig(
        num_experts=4,
        ffn_hidden_size=48,
        router_score_function="sigmoid",
        load_balancing="seq_aux_loss",
        aux_loss_coeff=0.5,
        z_loss_coeff=0.05,
        expert_bias=True,
        expert_bias_update_rate=0.02,
        capacity_factor=0.5,
    ),
    "global_loss": MoEConfig(
        num_experts=4,
        ffn_hidden_size=48,
        load_balancing="global_aux_loss",
        aux_loss_coeff=0.5,
        capacity_factor=0.7,
        drop_policy="position",
        pad_to_capacity=True,
    ),
    "sinkhorn": MoEConfig(num_experts=4, ffn_hidden_size=48, load_balancing="sinkhorn"),
}


def odd(run: Run, index: int) -> dict[str, Tensor]:
    """Samples of another length in every batch, none a multiple of 2 x cp."""
    batch = global_batch(dataclasses.replace(run, make_batch=None), index)
    length = (15, 13, 11)[index % 3]
    return {key: value[:, :length] for key, value in batch.items()}


def packed(run: Run, index: int) -> dict[str, Tensor]:
    """Samples of documents that are padded each for itself, in other places."""
    batch = global_batch(dataclasses.replace(run, make_batch=None), index)
    ends = [[0, 3, 16, 16], [0, 8, 16, 16], [0, 5, 7, 16], [0, 16, 16, 16]]
    return batch | {"cu_seqlens": torch.tensor(ends).repeat(2, 1)}


MAKERS = {"odd": odd, "packed": packed}


def watched(rank: int, world_size: int, run: Run) -> dict[str, Any]:
    with smallest_margins() as margins:
        return train(rank, world_size, run) | {"margins": margins}


def run_of(model: str, batches: str, **layout: Any) -> Run:
    config = tiny_config(num_layers=2, moe=MODELS[model], init_method_std=0.1)
    return Run(
        config=config,
        layout={"micro_batch_size": 2, **layout},
        steps=3,
        keep_gradients=(0, 1, 2),
        make_batch=MAKERS[batches],
    )


@functools.cache
def single(model: str, batches: str) -> dict[str, Any]:
    (alone,) = run_ranks_fresh(watched, 1, run_of(model, batches))
    assert_margins(alone["margins"])
    return alone


FOLDED = dict(
    tensor_parallel_size=2,
    sequence_parallel=True,
    expert_parallel_size=2,
    expert_tensor_parallel_size=1,
)
RECOMPUTED = dict(
    pipeline_parallel_size=2, expert_parallel_size=2, recompute=RecomputeConfig(mode="full")
)


@pytest.mark.parametrize(
    ("model", "batches", "world_size", "layout"),
    [
        ("losses_and_bias", "odd", 2, {}),
        ("global_loss", "packed", 2, dict(expert_parallel_size=2)),
        pytest.param("sinkhorn", "odd", 2, {}, marks=pytest.mark.slow),
        pytest.param("global_loss", "odd", 4, FOLDED, marks=pytest.mark.slow),
        pytest.param("losses_and_bias", "packed", 4, FOLDED, marks=pytest.mark.slow),
        pytest.param("losses_and_bias", "odd", 4, RECOMPUTED, marks=pytest.mark.slow),
    ],
)
def test_padding_of_context_parallelism_counts_for_nothing(
    model: str, batches: str, world_size: int, layout: dict[str, Any]
) -> None:
    run = run_of(model, batches, **CONTEXT, **layout)
    assert_same_training(run_ranks_fresh(train, world_size, run), single(model, batches))
