"""A plan as a page of tables."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

from megatron_lightning.cli.plan_estimate import Plan, ideal_bubble
from megatron_lightning.cli.plan_memory import WORKSPACE_BYTES
from megatron_lightning.cli.plan_outside import outside_bytes
from megatron_lightning.cli.plan_request import GIB
from megatron_lightning.cli.plan_values import axes_of, notes_of, stages_of


def as_text(plan: Plan) -> str:
    """The whole plan as a page."""
    return "\n\n".join(
        [_head(plan), _mesh(plan), _stages(plan), _memory(plan), _traffic(plan), _foot(plan)]
    )


def table(header: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """Columns aligned, numbers to the right."""
    cells = [[str(cell) for cell in row] for row in (header, *rows)]
    widths = [max(len(row[i]) for row in cells) for i in range(len(header))]
    right = [all(_is_number(row[i]) for row in cells[1:]) for i in range(len(header))]
    lines = [
        "  ".join(
            cell.rjust(width) if to_right else cell.ljust(width)
            for cell, width, to_right in zip(row, widths, right, strict=True)
        ).rstrip()
        for row in cells
    ]
    return "\n".join([lines[0], "-" * max(map(len, lines)), *lines[1:]])


def _is_number(cell: str) -> bool:
    return cell.replace(".", "").replace(",", "").replace("-", "").isdigit() or cell == ""


def gib(count: float) -> str:
    """Bytes in GiB."""
    return f"{count / GIB:.2f}"


def _head(plan: Plan) -> str:
    request, config = plan.request, plan.request.parallel
    sizes = (
        f"tensor_parallel_size={config.tensor_parallel_size}"
        f" x pipeline_parallel_size={config.pipeline_parallel_size}"
        f" x context_parallel_size={config.context_parallel_size}"
        f" x data_parallel_size={request.data_parallel_size}"
    )
    if config.folds_experts:
        sizes += (
            f"; of experts: expert_parallel_size={config.expert_parallel_size}"
            f" x expert_tensor_parallel_size={config.expert_tensor_size}"
            f" x pipeline_parallel_size={config.pipeline_parallel_size}"
            f" x {request.expert_data_size} copies"
        )
    batch = (
        f"seq_length={request.seq_length}, micro_batch_size={request.micro_batch_size},"
        f" global_batch_size={request.batch_size}: {request.num_microbatches} micro-batches a rank"
    )
    return "\n".join(
        [
            f"{request.model_name}: {plan.parameters.total:,} parameters, {request.precision}",
            f"{request.gpus} GPUs ({request.hardware.name}, {request.gpus_per_node} a node) ="
            f" {sizes}",
            batch,
            f"layers of the stages: {'+'.join(map(str, plan.layers_per_stage))}",
        ]
    )


def _mesh(plan: Plan) -> str:
    rows = [
        (
            f"{row['name']} ({row['axis']})",
            row["size"],
            row["groups"],
            _shortened(row["first_group"]),
            "one node" if row["nodes_of_a_group"] == 1 else f"{row['nodes_of_a_group']} nodes",
        )
        for row in axes_of(plan)
    ]
    return "Mesh\n" + table(("axis", "size", "groups", "ranks of the first", "within"), rows)


def _shortened(ranks: Sequence[int]) -> str:
    shown = ranks if len(ranks) <= 8 else [*ranks[:4], "...", ranks[-1]]
    return " ".join(map(str, shown))


def _stages(plan: Plan) -> str:
    rows = []
    for row in stages_of(plan):
        layers = row["layers"]
        span = f"{layers[0]}-{layers[-1]}" if layers else "none"
        ends = [word for word in ("embedding", "head") if row[word]]
        place = (row["stage"], row["pipeline_rank"], row["chunk"])
        rows.append((*place, len(layers), span, " ".join(ends), f"{row['cost_in_layers']:.2f}"))
    header = ("stage", "pipeline rank", "chunk", "layers", "which", "and", "cost in layers")
    return "Stages\n" + table(header, rows)


def _memory(plan: Plan) -> str:
    quantized = plan.request.parallel.quantization is not None
    rows = []
    for rank in plan.ranks:
        m = rank.memory
        parts = [m.parameters, m.gradients, m.optimizer]
        parts += [m.rounded] if quantized else []
        parts += [m.activations, m.buffers, m.peak, m.host]
        rows.append((rank.rank, f"{rank.num_parameters:,}", rank.peak_live, *map(gib, parts)))
    header = (
        "pipeline rank",
        "parameters held",
        "live",
        "parameters",
        "gradients",
        "optimizer",
        *(["rounded"] if quantized else []),
        "activations",
        "buffers",
        "peak",
        "CPU",
    )
    verdict = "fits" if plan.fits else "DOES NOT FIT"
    return (
        "Memory of a rank, GiB\n"
        + table(header, rows)
        + f"\n{verdict}: {gib(plan.peak_bytes)} at the peak and"
        f" {gib(outside_bytes(plan.request))} outside of"
        f" torch's allocator, of {gib(plan.request.hardware.memory_bytes)}"
        f" (buffers count {gib(WORKSPACE_BYTES)} of workspaces)"
    )


def _traffic(plan: Plan) -> str:
    rows = [
        (rank.rank, *(gib(value) for value in dataclasses.astuple(rank.traffic)))
        for rank in plan.ranks
    ]
    header = ("pipeline rank", "tensor", "pipeline", "context", "data", "expert")
    return "Communication: GiB that a rank sends in a step\n" + table(header, rows)


def _foot(plan: Plan) -> str:
    lines = [
        f"Operations of a step: {plan.model_flops:.4g} FLOPs"
        f" ({plan.model_flops / plan.request.gpus:.4g} a GPU); with recompute"
        f" {plan.hardware_flops:.4g}",
        f"Pipeline: {plan.request.parallel.pipeline.schedule}, bubble {plan.bubble:.1%} of the time"
        f" ({ideal_bubble(plan):.1%} with equal stages)",
    ]
    return "\n".join(lines + [f"Note: {note}" for note in notes_of(plan)])
