"""Bytes that one rank sends in a step, for each dimension of the layout.

Counted for ring algorithms, which send the least: an all-gather or reduce-scatter whose whole is n
bytes sends (k - 1) / k n on each of k ranks, an all-reduce twice that.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from megatron_lightning.cli.plan_request import PlanRequest
from megatron_lightning.config.model_states import StateDtypes
from megatron_lightning.parallel.pipeline import StageLayout


@dataclass(frozen=True, kw_only=True)
class Traffic:
    """Bytes sent by one rank of a pipeline rank in one step."""

    tensor: float
    pipeline: float
    context: float
    data: float
    expert: float
    """Rows of experts and back, balanced, both ways."""


def traffic_of(
    request: PlanRequest,
    layout: StageLayout,
    pipeline_rank: int,
    *,
    parameters: int,
    experts: int,
    dtypes: StateDtypes,
) -> Traffic:
    """Traffic of one rank, which holds `parameters` dense parameters and `experts` of experts."""
    chunks = layout.chunks(pipeline_rank)
    layers = [layer for chunk in chunks for layer in chunk.layers]
    forwards = request.num_microbatches
    ends = sum(chunk.has_embedding for chunk in chunks), sum(chunk.has_head for chunk in chunks)
    config = request.parallel
    element = dtypes.parameters
    tokens = request.micro_batch_size * request.seq_length / config.context_parallel_size
    hidden = tokens * request.model.hidden_size * element
    crossing = hidden / (config.tensor_parallel_size if config.sequence_parallel else 1)
    stages = len(layout.stages)
    hops = sum((chunk.stage > 0) + (chunk.stage < stages - 1) for chunk in chunks)
    if config.pipeline_parallel_size == 1:
        hops = 0
    return Traffic(
        tensor=forwards * _tensor(request, len(layers), ends, hidden),
        pipeline=forwards * hops * crossing,
        context=forwards * len(layers) * _context(request, tokens * element),
        data=_data(request, parameters, dtypes, config.context_parallel_size)
        + _data(request, experts, dtypes, None),
        expert=forwards * _expert(request, layers, tokens * element),
    )


def _expert(request: PlanRequest, layers: Sequence[int], element_tokens: float) -> float:
    """Rows forth and back, in the forward and in the backward pass (once more forth and back where
    layers are recomputed).
    """
    config, moe = request.parallel, request.model.moe
    ranks = config.expert_parallel_size * config.expert_tensor_size
    if moe is None or ranks == 1:
        return 0.0
    count = sum(moe.is_moe_layer(layer) for layer in layers)
    width = moe.latent_size or request.model.hidden_size
    own = element_tokens / config.tensor_parallel_size * width
    if config.expert.dispatcher == "all_gather":
        moved = (ranks - 1) * own
    else:
        moved = _ring(ranks) * config.expert_tensor_size * moe.router_topk * own
    return count * moved * (6 if config.recompute.mode == "full" else 4)


def _ring(size: int) -> float:
    return (size - 1) / size


def _tensor(request: PlanRequest, layers: int, ends: tuple[int, int], hidden: float) -> float:
    """Each product pair: whole input forth and back, summed output forth and back. With sequence
    parallelism all four are gathers or scatters and the input is gathered once more for the
    weight's gradient; without it two are all-reduces.
    """
    config = request.parallel
    embeddings, heads = ends
    once = _ring(config.tensor_parallel_size) * hidden
    again = config.recompute.mode == "full"
    if config.sequence_parallel:
        layer = 2 * (5 + 2 * again)
        return once * (layers * layer + 2 * embeddings + 3 * heads)
    return once * 2 * (layers * (4 + 2 * again) + embeddings + heads)


def _context(request: PlanRequest, element_tokens: float) -> float:
    """Of one layer, forward and backward. `element_tokens`: local tokens times bytes an element."""
    config, model = request.parallel, request.model
    size = config.context_parallel_size
    if size == 1:
        return 0.0
    share = element_tokens / config.tensor_parallel_size
    sizes = model.head_dim + model.value_dim
    keys_values = model.num_query_groups * sizes * share
    # Queries, keys and values in, and the output back.
    exchanged = 2 * (model.num_attention_heads * sizes * share + keys_values)
    form, inner = config.context.form, config.context.inner_of(size)
    if form == "all_to_all":
        return exchanged * _ring(size)
    if form == "hierarchical":
        outer = size // inner
        return exchanged * _ring(inner) + 3 * (outer - 1) * keys_values
    return 3 * (size - 1) * keys_values  # forth; again for backward, with their gradients


def _data(request: PlanRequest, parameters: int, dtypes: StateDtypes, context: int | None) -> float:
    """Of dense parameters, which context ranks share too, or (None) of experts."""
    config = request.parallel
    ranks = request.expert_data_size if context is None else request.data_parallel_size * context
    gradients, weights = parameters * dtypes.main_gradients, parameters * dtypes.parameters
    if config.data_parallel.sharding == "none":
        return 2 * _ring(ranks) * gradients
    replicas = math.gcd(ranks, config.data_parallel.replicas)
    shards = ranks // replicas
    between = 2 * _ring(replicas) * gradients / shards
    if config.data_parallel.sharding == "optimizer":
        return _ring(shards) * (gradients + weights) + between
    options, forwards = config.data_parallel, request.num_microbatches
    gathers = forwards * (2 if options.reshard_after_forward else 1)
    reductions = forwards if options.reduce_each_micro_batch else 1
    return _ring(shards) * (gathers * weights + reductions * gradients) + between
