"""Configs of context parallelism: what is refused, by which words, before anything starts."""

import re
from typing import Any

import pytest
from torch import nn

from megatron_lightning.config import ContextConfig, RuntimeConfig
from megatron_lightning.config.parallel import ParallelConfig
from megatron_lightning.config.validate import check_layout, check_world
from megatron_lightning.layers import TorchBackend
from megatron_lightning.models import GPTModel
from megatron_lightning.models.gpt_network import GPTNetwork
from megatron_lightning.parallel.context.apply import check_context_parallel
from megatron_lightning.parallel.ranks import context_rank_lists, mesh_sizes
from tests.layout_runs import tiny_config


def config(size: int, runtime: dict[str, Any] | None = None, **context: Any) -> ParallelConfig:
    return ParallelConfig(
        context_parallel_size=size,
        context=ContextConfig(**context),
        runtime=RuntimeConfig(**(runtime or {})),
    )


@pytest.mark.parametrize(
    ("layout", "message"),
    [
        (config(0), "context_parallel_size=0: it must be a whole number of at least 1"),
        (config(2, form="star"), "context.form='star': choose one of"),
        (config(2, layer_forms=("ring", "moon")), "context.form='moon'"),
        (config(2, form="hierarchical"), "no two factors above 1"),
        (config(2, form="all_to_all", head_groups=0), "head_groups=0: it must be at least 1"),
        (config(2, form="ring", head_groups=2), "only all_to_all alone deals heads"),
        (config(2, form="ring", peer_memory=True), "only all_to_all alone exchanges heads"),
        (config(8, form="hierarchical", inner_size=3), r"inner_size=3.* use one of \[2, 4\]"),
    ],
)
def test_layouts_refused(layout: ParallelConfig, message: str) -> None:
    [problem] = check_layout(layout)
    assert re.search(message, problem), problem


def test_the_world_must_divide() -> None:
    [problem] = check_world(config(4), 6)
    assert "context_parallel_size=4 = 4 does not divide it; use 4 or 8 ranks" in problem


def test_form_of_a_layer() -> None:
    by_layer = ContextConfig(layer_forms=("all_gather", "ring"))
    assert [by_layer.form_of(layer) for layer in range(3)] == ["all_gather", "ring", "all_gather"]
    assert ContextConfig(form="all_to_all").form_of(7) == "all_to_all"


@pytest.mark.parametrize("form", ["ring", "hierarchical"])
def test_attention_dropout_needs_a_form_that_drops(form: Any) -> None:
    network = GPTNetwork(tiny_config(attention_dropout=0.1), device="meta")
    [problem] = check_context_parallel(network, config(4, form=form))
    assert f"attention_dropout=0.1 with the context form {form!r}" in problem
    assert check_context_parallel(network, config(4, form="all_gather")) == []


def test_exact_attention_dropout_needs_gathered_keys() -> None:
    backend = TorchBackend(attention="reference")
    network = GPTNetwork(tiny_config(attention_dropout=0.1), backend, device="meta")
    [problem] = check_context_parallel(
        network, config(2, {"exact_dropout": True}, form="all_to_all")
    )
    assert "masks by global position need form='all_gather'" in problem


def test_a_network_without_cores() -> None:
    [problem] = check_context_parallel(nn.Linear(2, 2), config(2))
    assert "Linear holds no CoreAttention" in problem
    assert "layers.FusedAttention, and take positions from the batch's position_ids" in problem


@pytest.mark.parametrize(("tensor", "size"), [(1, 4), (2, 2)])
def test_heads_must_divide_for_all_to_all(tensor: int, size: int) -> None:
    model = GPTModel(tiny_config())  # 4 query heads, 2 groups
    layout = ParallelConfig(
        tensor_parallel_size=tensor,
        context_parallel_size=size,
        context=ContextConfig(form="all_to_all"),
    )
    [problem] = model.check_parallel(layout)
    assert f"all_to_all over {size} ranks" in problem
    assert "num_query_groups=2" in problem


def test_hierarchical_needs_heads_for_the_inner_ranks_only() -> None:
    layout = ParallelConfig(
        context_parallel_size=8, context=ContextConfig(form="hierarchical", inner_size=2)
    )
    assert GPTModel(tiny_config()).check_parallel(layout) == []


def test_inner_ranks_are_neighbours() -> None:
    sizes = mesh_sizes(16, tensor=2, context=4)
    lists = context_rank_lists(sizes, ("pp", "dp", "cp", "tp"), 2)
    assert lists["cp_inner"][:2] == [(0, 2), (1, 3)]
    assert lists["cp_outer"][0] == (0, 4)
    assert sorted(rank for ranks in lists["cp_outer"] for rank in ranks) == list(range(16))
