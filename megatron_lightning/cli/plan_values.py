"""A plan as plain values, for JSON and for the text."""

from __future__ import annotations

import dataclasses
from typing import Any

from megatron_lightning.cli.plan_estimate import Plan, ideal_bubble, stage_weights
from megatron_lightning.cli.plan_outside import outside_bytes
from megatron_lightning.parallel.ranks import EXPERT_ORDER, expert_rank_lists, rank_lists

AXES = {"tp": "tensor", "cp": "context", "dp": "data", "pp": "pipeline"}
EXPERT_AXES = {"etp": "expert tensor", "ep": "expert", "edp": "copies of experts"}


def as_values(plan: Plan) -> dict[str, Any]:
    """Everything as numbers, strings, lists and dicts. Bytes and operations are of one step."""
    request, config = plan.request, plan.request.parallel
    return {
        "model": {
            "name": request.model_name,
            "num_parameters": plan.parameters.total,
            "flops_per_token": request.model.flops_per_token(request.seq_length),
            "config": request.model.to_dict(),
        },
        "gpus": request.gpus,
        "gpus_per_node": request.gpus_per_node,
        "tensor_parallel_size": config.tensor_parallel_size,
        "pipeline_parallel_size": config.pipeline_parallel_size,
        "context_parallel_size": config.context_parallel_size,
        "data_parallel_size": request.data_parallel_size,
        "expert_parallel_size": config.expert_parallel_size,
        "expert_tensor_parallel_size": config.expert_tensor_size,
        "layout": dataclasses.asdict(config),
        "seq_length": request.seq_length,
        "micro_batch_size": request.micro_batch_size,
        "global_batch_size": request.batch_size,
        "num_microbatches": request.num_microbatches,
        "precision": request.precision,
        "mesh": {"axes": axes_of(plan), "ranks": coordinates(plan)},
        "layers_per_stage": plan.layers_per_stage,
        "stages": stages_of(plan),
        "memory": {
            "ranks": [
                {"pipeline_rank": rank.rank, **dataclasses.asdict(rank.memory)}
                | {"peak": rank.memory.peak, "num_parameters": rank.num_parameters}
                for rank in plan.ranks
            ],
            "peak_bytes": plan.peak_bytes,
            "outside_of_allocator_bytes": outside_bytes(request),
            "gpu_bytes": request.hardware.memory_bytes,
            "fits": plan.fits,
        },
        "flops": {
            "model_per_step": plan.model_flops,
            "hardware_per_step": plan.hardware_flops,
            "model_per_step_per_gpu": plan.model_flops / request.gpus,
        },
        "communication_bytes": [
            {"pipeline_rank": rank.rank, **dataclasses.asdict(rank.traffic)} for rank in plan.ranks
        ],
        "pipeline": {
            "schedule": config.pipeline.schedule,
            "bubble_fraction": plan.bubble,
            "bubble_fraction_equal_stages": ideal_bubble(plan),
            "peak_live_activations": [rank.peak_live for rank in plan.ranks],
        },
        "notes": notes_of(plan),
    }


def axes_of(plan: Plan) -> list[dict[str, Any]]:
    """Each axis of the mesh: size, the first group's ranks, and whether a group spans nodes."""
    order = tuple(plan.request.parallel.runtime.axis_order)
    rows = []
    names = AXES | (EXPERT_AXES if plan.request.parallel.folds_experts else {})
    for name in (*reversed(order), *(name for name in EXPERT_AXES if name in names)):
        groups = (
            expert_rank_lists(plan.sizes, order, EXPERT_ORDER, [name])
            if name in EXPERT_AXES
            else rank_lists(plan.sizes, order, [name])
        )
        spans = max(len({rank // plan.request.gpus_per_node for rank in g}) for g in groups)
        rows.append(
            {
                "axis": name,
                "name": names[name],
                "size": plan.sizes[name],
                "groups": len(groups),
                "first_group": list(groups[0]),
                "nodes_of_a_group": spans,
            }
        )
    return rows


def coordinates(plan: Plan) -> list[dict[str, int]]:
    """Node and place on every axis of each global rank."""
    order = tuple(plan.request.parallel.runtime.axis_order)
    rows = [{"rank": r, "node": r // plan.request.gpus_per_node} for r in range(plan.request.gpus)]
    for name in order:
        for group in rank_lists(plan.sizes, order, [name]):
            for place, rank in enumerate(group):
                rows[rank][name] = place
    return rows


def stages_of(plan: Plan) -> list[dict[str, Any]]:
    """Each virtual stage in the order of the forward: who holds it, what is in it, its cost."""
    layout = plan.layout
    costs = stage_weights(plan.request.model, plan.request.seq_length, layout)
    rows = []
    for stage, cost in zip(layout.stages, costs, strict=True):
        rank, chunk = layout.placement.owner(stage.stage)
        rows.append(
            {
                "stage": stage.stage,
                "pipeline_rank": rank,
                "chunk": chunk,
                "layers": list(stage.layers),
                "embedding": stage.has_embedding,
                "head": stage.has_head,
                "cost_in_layers": round(cost, 3),
            }
        )
    return rows


def notes_of(plan: Plan) -> list[str]:
    """What a reader should know or might change."""
    request, config = plan.request, plan.request.parallel
    notes = []
    if request.global_batch_size is None:
        notes.append(
            f"no global_batch_size given: {request.batch_size} samples assumed, 4 micro-batches for"
            " each pipeline stage"
        )
    limit = request.model.max_position_embeddings
    if request.seq_length > limit:
        notes.append(f"seq_length={request.seq_length} is above max_position_embeddings={limit}")
    if config.tensor_parallel_size > 1 and not config.sequence_parallel:
        notes.append("sequence_parallel is off: norms and residuals are kept on every tensor rank")
    if config.tensor_parallel_size > request.gpus_per_node:
        notes.append("tensor groups span nodes: every layer waits for the network")
    weights = stage_weights(request.model, request.seq_length, plan.layout)
    mean = sum(weights) / len(weights)
    if len(weights) > 1 and max(weights) > 1.1 * mean:
        head = weights[-1] - len(plan.layout.stages[-1].layers)
        counted = f", counted as {config.pipeline.head_cost:g} (--head-cost; pipeline.head_cost)"
        balanced = counted if config.pipeline.layout is None else ""
        notes.append(
            f"stages are unequal: the dearest costs {max(weights) / mean:.2f} times the mean; the"
            f" head costs {head:.2f} layers{balanced}"
        )
    if request.model.moe is not None:
        notes.append("activations and traffic of experts are those of an even load")
    if any(request.model.window_of(i) for i in range(request.model.num_layers)):
        notes.append("activations of sliding-window layers are approximate")
    if config.data_parallel.sharding == "none" and request.data_parallel_size > 1:
        notes.append(
            "optimizer state is whole on every data rank; data_parallel.sharding='optimizer'"
            " shares it out"
        )
    return notes
