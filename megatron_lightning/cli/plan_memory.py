"""Parameters and memory of each pipeline rank.

Parameters are counted on the network itself, built on the meta device and split by its plan table,
so that padding and tied copies are in. Memory is what torch's allocator holds at its peak: a walk
along the schedule adds what forwards keep and what a backward works with.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass

from megatron_lightning.cli.plan_activations import (
    ChunkActivations,
    activation_sizes,
    chunk_activations,
)
from megatron_lightning.cli.plan_quantized import quantized_layers
from megatron_lightning.cli.plan_request import PlanRequest
from megatron_lightning.cli.plan_traffic import Traffic, traffic_of
from megatron_lightning.config.model import GPTConfig
from megatron_lightning.config.model_states import StateBytes, StateDtypes, state_bytes
from megatron_lightning.models.gpt import GPTModel
from megatron_lightning.parallel.axes import MeshAxis
from megatron_lightning.parallel.pipeline import StageLayout
from megatron_lightning.parallel.schedules.actions import Action, Kind, by_memory
from megatron_lightning.parallel.tensor import ExpertAxes, apply_tensor_parallel
from megatron_lightning.precision.policy import policy_for
from megatron_lightning.runtime.stage_messages import StageMessages

WORKSPACE_BYTES = 64 << 20
"""Of matrix products and small things."""


@dataclass(frozen=True, kw_only=True)
class UnitParameters:
    """Local parameters of each unit of the model on tensor rank 0, which holds the most."""

    embedding: int
    layers: tuple[int, ...]
    head: int
    tied_copy: int
    """What the last stage holds besides when it ties its head to an embedding on another stage."""
    total: int
    """Of the whole model, in one process, a tied head once and without padding."""
    experts: tuple[int, ...]
    """Of each layer's parameters those that are experts."""


@dataclass(frozen=True, kw_only=True)
class RankMemory:
    """Bytes on one rank of a pipeline rank."""

    parameters: int
    gradients: int
    optimizer: int
    rounded: int
    """Copies of weights in eight or four bits, which stay from step to step, and histories."""
    activations: int
    """Kept for backward, at the peak."""
    buffers: int
    """What is worked with at the peak: logits' gradients, recomputed layers, messages, workspaces.
    """
    host: int
    """In CPU memory: offloaded optimizer state and activations."""

    @property
    def peak(self) -> int:
        """Most that torch's allocator holds at once."""
        states = self.parameters + self.gradients + self.optimizer + self.rounded
        return states + self.activations + self.buffers


@dataclass(frozen=True, kw_only=True)
class PipelineRank:
    """One pipeline rank: what it holds and needs. All its tensor, context and data ranks alike."""

    rank: int
    chunks: tuple[str, ...]
    """Each chunk in the notation of layouts: E embedding, t a layer, L head."""
    num_layers: int
    num_parameters: int
    """On one tensor rank."""
    peak_live: int
    """Most (micro-batch, chunk) pairs whose activations are kept at once."""
    memory: RankMemory
    traffic: Traffic


@functools.lru_cache(maxsize=64)
def unit_parameters(
    model: GPTConfig, tensor_parallel_size: int, expert_size: int = 1, expert_tensor_size: int = 1
) -> UnitParameters:
    """Count what each unit holds on the first tensor rank, padding included."""
    module = GPTModel(model)
    network, plan = module.build_network("meta"), module.parallel_plan()
    axis = MeshAxis(name="tp", size=tensor_parallel_size)
    axes = ExpertAxes(
        expert=MeshAxis(name="ep", size=expert_size),
        tensor=MeshAxis(name="etp", size=expert_tensor_size),
    )
    table = apply_tensor_parallel(network, plan, axis, experts=axes)
    parameters = dict(network.named_parameters())
    counts = {name: parameter.numel() for name, parameter in parameters.items()}
    prefix = f"{plan.layers}."
    layers, experts = [0] * model.num_layers, [0] * model.num_layers
    for name, count in counts.items():
        if name.startswith(prefix):
            number = int(name.removeprefix(prefix).split(".")[0])
            layers[number] += count
            experts[number] += count * table[name].expert

    def under(paths: Sequence[str]) -> int:
        return sum(
            count
            for name, count in counts.items()
            if any(name == path or name.startswith(f"{path}.") for path in paths)
        )

    tied = {owner for owner, _ in plan.tied}
    return UnitParameters(
        embedding=under(plan.first),
        layers=tuple(layers),
        head=under(plan.last),
        tied_copy=sum(counts[name] for name in tied),
        total=sum(math.prod(row.global_shape) for row in table.values()),
        experts=tuple(experts),
    )


def state_dtypes(request: PlanRequest) -> StateDtypes:
    """Bytes of each kind of state under the request's precision and optimizer."""
    policy = policy_for(request.precision)
    config = request.parallel.data_parallel
    narrow = config.sharding != "none" and config.moments_dtype == "bfloat16"
    return StateDtypes(
        parameters=policy.params_dtype.itemsize,
        main_parameters=policy.main_params_dtype.itemsize,
        main_gradients=policy.main_grads_dtype.itemsize,
        moments=2 if narrow else policy.main_params_dtype.itemsize,
        num_moments=1 if request.optimizer == "sgd" else 2,
    )


def pipeline_rank(
    request: PlanRequest,
    layout: StageLayout,
    units: UnitParameters,
    rank: int,
    actions: Sequence[Action],
) -> PipelineRank:
    """Estimate one pipeline rank that executes `actions`."""
    dtypes = state_dtypes(request)
    chunks = layout.chunks(rank)
    layers = [layer for chunk in chunks for layer in chunk.layers]
    embedding = any(chunk.has_embedding for chunk in chunks)
    head = any(chunk.has_head for chunk in chunks)
    count = sum(units.layers[layer] for layer in layers)
    count += units.embedding * embedding + units.head * head
    count += units.tied_copy * (head and not embedding)
    each = [chunk_activations(request, chunk) for chunk in chunks]
    kept, working, host = walk(actions, each)
    config = request.parallel.data_parallel
    shards = request.data_parallel_size * request.parallel.context_parallel_size
    experts = sum(units.experts[layer] for layer in layers)
    states = _states(request, dtypes, count - experts, experts)
    low = [quantized_layers(request)[layer] for layer in layers]
    rounded, unsharded = sum(each.bytes_held for each in low), 0.0
    if config.sharding == "fsdp" and shards > config.replicas:  # rounded at each use
        rounded, unsharded = 0.0, max((each.bytes_at_once for each in low), default=0.0)
        ends = count - sum(units.layers[layer] for layer in layers)
        unsharded += _gathered(request, [units.layers[layer] for layer in layers], ends, dtypes)
    if not dtypes.has_masters and dtypes.main_gradients != dtypes.parameters:
        unsharded += count * dtypes.parameters  # gradients once more in the parameters' dtype
    memory = RankMemory(
        parameters=round(states.parameters),
        gradients=round(states.gradients),
        optimizer=round(states.optimizer),
        rounded=round(rounded),
        activations=round(kept),
        buffers=round(working + unsharded + _messages(request) + WORKSPACE_BYTES),
        host=round(states.host + host),
    )
    return PipelineRank(
        rank=rank,
        chunks=tuple(
            "E" * c.has_embedding + "t" * len(c.layers) + "L" * c.has_head for c in chunks
        ),
        num_layers=len(layers),
        num_parameters=count,
        peak_live=peak_live(actions),
        memory=memory,
        traffic=traffic_of(
            request, layout, rank, parameters=count - experts, experts=experts, dtypes=dtypes
        ),
    )


def _states(request: PlanRequest, dtypes: StateDtypes, dense: int, experts: int) -> StateBytes:
    """Bytes of all states of a rank: experts have other, fewer, replicas to share theirs out to."""
    config = request.parallel.data_parallel
    ranks = request.data_parallel_size * request.parallel.context_parallel_size
    found = []
    for count, copies in ((dense, ranks), (experts, request.expert_data_size)):
        shards = copies // math.gcd(copies, config.replicas)
        each = state_bytes(
            dtypes, sharding=config.sharding, shards=shards, offload=config.offload_optimizer
        )
        found.append([count * getattr(each, f.name) for f in dataclasses.fields(each)])
    return StateBytes(
        **{
            field.name: sum(values)
            for field, *values in zip(dataclasses.fields(StateBytes), *found, strict=True)
        }
    )


def _messages(request: PlanRequest) -> float:
    """Bytes of what is on its way between pipeline ranks: sends not yet waited for, and a receive
    that was begun ahead.
    """
    if request.parallel.pipeline_parallel_size == 1:
        return 0.0
    sizes = activation_sizes(request)
    tokens = request.micro_batch_size * -(
        -request.seq_length // request.parallel.context_parallel_size
    )
    each = tokens * sizes.bytes_per_element * request.model.hidden_size / sizes.split_hidden
    return (StageMessages.max_sends_under_way + 1) * each


def _gathered(request: PlanRequest, layers: Sequence[int], ends: int, dtypes: StateDtypes) -> float:
    """Bytes of whole parameters and gradients under FSDP2: a layer at work and the next one (all
    layers where they stay gathered), embedding and head, and gradients before they are reduced.
    """
    config = request.parallel.data_parallel
    largest = max(layers, default=0)
    weights = 2 * largest if config.reshard_after_forward else sum(layers)
    adds_up = request.num_microbatches > 1 and not config.reduce_each_micro_batch
    gradients = sum(layers) + ends if adds_up else max(largest, ends)
    return (weights + ends) * dtypes.parameters + gradients * dtypes.main_gradients


def walk(
    actions: Sequence[Action], chunks: Sequence[ChunkActivations]
) -> tuple[float, float, float]:
    """(kept, worked with, in CPU memory) in bytes, at the action at which the device holds most."""
    kept = host = peak_host = 0.0
    worst = (0.0, 0.0)
    for action in by_memory(actions):
        if action.kind not in (Kind.F, Kind.B, Kind.I, Kind.W):
            continue
        chunk = chunks[action.chunk]
        if action.kind is Kind.F:
            kept, host = kept + chunk.kept, host + chunk.host
        working = {
            Kind.F: chunk.forward,
            Kind.B: chunk.backward,
            Kind.I: chunk.split_backward,
            Kind.W: 0.0,
        }[action.kind]
        if kept + working > sum(worst):
            worst = (kept, working)
        peak_host = max(peak_host, host)
        if action.kind is Kind.I:
            kept += chunk.waiting
        if action.kind is Kind.W:
            kept -= chunk.waiting
        if action.kind in (Kind.B, Kind.W):
            kept, host = kept - chunk.kept, host - chunk.host
    return *worst, peak_host


def peak_live(actions: Sequence[Action]) -> int:
    """Most forwards whose backward (or weight gradient) is still to come."""
    live = peak = 0
    for action in by_memory(actions):
        live += (action.kind is Kind.F) - (action.kind in (Kind.B, Kind.W))
        peak = max(peak, live)
    return peak
