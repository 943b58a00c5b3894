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
from megatron_lightning.utils.wording import counted


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
    return cell.translate(str.maketrans("", "", ".,-<")).isdigit() or cell == ""


_UNITS = {"GiB": GIB, "MiB": GIB >> 10, "KiB": GIB >> 20}


def unit_of(counts: Iterable[float]) -> str:
    """The unit for a table of bytes: the largest that is not above all of them."""
    most = max(counts, default=0) or GIB
    return next((name for name, size in _UNITS.items() if most >= size), "KiB")


def in_unit(count: float, unit: str) -> str:
    """Bytes as a number of that unit, and what is too little for it as such."""
    text = f"{count / _UNITS[unit]:.2f}"
    return "<0.01" if count > 0 and text == "0.00" else text


def sized(count: float) -> str:
    """Bytes with the unit that fits them."""
    unit = unit_of([count])
    return f"{in_unit(count, unit)} {unit}"


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
    micro_batches = counted(request.num_microbatches, "micro-batch", "micro-batches")
    batch = (
        f"seq_length={request.seq_length}, micro_batch_size={request.micro_batch_size},"
        f" global_batch_size={request.batch_size}: {micro_batches} a rank"
    )
    return "\n".join(
        [
            f"{request.model_name}: {plan.parameters.total:,} parameters, {request.precision}",
            f"{counted(request.gpus, 'GPU')} ({request.hardware.name}, {request.gpus_per_node} a"
            f" node) = {sizes}",
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
    rows: list[tuple[Any, ...]] = []
    held: list[list[int]] = []
    for rank in plan.ranks:
        m = rank.memory
        parts = [m.parameters, m.gradients, m.optimizer]
        parts += [m.rounded] if quantized else []
        parts += [m.activations, m.buffers, m.peak, m.host]
        rows.append((rank.rank, f"{rank.num_parameters:,}", rank.peak_live))
        held.append(parts)
    unit = unit_of(rank.memory.peak for rank in plan.ranks)
    rows = [
        (*row, *(in_unit(part, unit) for part in parts))
        for row, parts in zip(rows, held, strict=True)
    ]
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
        f"Memory of a rank, {unit}\n"
        + table(header, rows)
        + f"\n{verdict}: {sized(plan.peak_bytes)} at the peak and"
        f" {sized(outside_bytes(plan.request))} outside of"
        f" torch's allocator, of {sized(plan.request.hardware.memory_bytes)}"
        f" (buffers count {sized(WORKSPACE_BYTES)} of workspaces)"
    )


def _traffic(plan: Plan) -> str:
    sent = [dataclasses.astuple(rank.traffic) for rank in plan.ranks]
    unit = unit_of(value for values in sent for value in values)
    rows = [
        (rank.rank, *(in_unit(value, unit) for value in values))
        for rank, values in zip(plan.ranks, sent, strict=True)
    ]
    header = ("pipeline rank", "tensor", "pipeline", "context", "data", "expert")
    return f"Communication: {unit} that a rank sends in a step\n" + table(header, rows)


def _foot(plan: Plan) -> str:
    lines = [
        f"Operations of a step: {plan.model_flops:.4g} FLOPs"
        f" ({plan.model_flops / plan.request.gpus:.4g} a GPU); with recompute"
        f" {plan.hardware_flops:.4g}",
        f"Pipeline: {plan.request.parallel.pipeline.schedule}, bubble {plan.bubble:.1%} of the time"
        f" ({ideal_bubble(plan):.1%} with equal stages)",
    ]
    return "\n".join(lines + [f"Note: {note}" for note in notes_of(plan)])
