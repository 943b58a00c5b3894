"""A plan as a picture: which GPU has which place in the mesh, and what the pipeline does when."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from megatron_lightning.cli.errors import UserError
from megatron_lightning.cli.plan_estimate import Plan
from megatron_lightning.cli.plan_values import coordinates
from megatron_lightning.parallel.schedules.actions import Kind
from megatron_lightning.utils.wording import counted

FORMATS = (".svg", ".png", ".pdf")
MOST_GPUS = 1024
_COLOURS = {Kind.F: "#4c78a8", Kind.B: "#f58518", Kind.I: "#f58518", Kind.W: "#54a24b"}
_WORDS = {
    Kind.F: "forward",
    Kind.B: "backward",
    Kind.I: "gradient of inputs",
    Kind.W: "gradient of weights",
}


def draw(plan: Plan, path: str) -> None:
    """Write the picture; its format is that of the path's ending. UserError for another one."""
    if Path(path).suffix not in FORMATS:
        raise UserError(f"--picture {path}: the name must end in one of {', '.join(FORMATS)}")
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    nodes = -(-min(plan.request.gpus, MOST_GPUS) // plan.request.gpus_per_node)
    has_pipeline = plan.simulation is not None
    mesh_height = 0.55 * nodes + 1.2
    timeline_height = 0.4 * plan.layout.pipeline_size + 1.2 if has_pipeline else 0.0
    width = max(8.0, 1.25 * plan.request.gpus_per_node)
    figure = Figure(figsize=(width, mesh_height + timeline_height), layout="constrained")
    FigureCanvasAgg(figure)
    ratios = [mesh_height, timeline_height] if has_pipeline else [1.0]
    axes = figure.subplots(len(ratios), 1, squeeze=False, height_ratios=ratios)[:, 0]
    _draw_mesh(plan, axes[0])
    if has_pipeline:
        _draw_timeline(plan, axes[1])
    figure.savefig(path)


def _draw_mesh(plan: Plan, axes: Any) -> None:
    """One box a GPU, one row a node; the colour is the pipeline rank's."""
    from matplotlib import colormaps
    from matplotlib.patches import Rectangle

    shown = coordinates(plan)[:MOST_GPUS]
    per_node = plan.request.gpus_per_node
    colours = colormaps["viridis"].resampled(max(2, plan.sizes["pp"]))
    for row in shown:
        x, y = row["rank"] % per_node, row["node"]
        axes.add_patch(
            Rectangle((x + 0.04, y + 0.08), 0.92, 0.84, color=colours(row["pp"]), alpha=0.55)
        )
        places = " ".join(
            f"{name}{row[name]}" for name in ("pp", "dp", "cp", "tp") if plan.sizes[name] > 1
        )
        axes.text(x + 0.5, y + 0.34, str(row["rank"]), ha="center", va="center", weight="bold")
        axes.text(x + 0.5, y + 0.68, places, ha="center", va="center", fontsize=7)
    nodes = shown[-1]["node"] + 1
    axes.set_xlim(0, per_node)
    axes.set_ylim(nodes, 0)
    axes.set_yticks([node + 0.5 for node in range(nodes)], [f"node {n}" for n in range(nodes)])
    axes.set_xticks([])
    left_out = plan.request.gpus - len(shown)
    more = f" ({counted(left_out, 'more GPU')} alike)" if left_out else ""
    sizes = " x ".join(f"{name}={plan.sizes[name]}" for name in ("tp", "cp", "dp", "pp"))
    axes.set_title(
        f"{plan.request.model_name} on {counted(plan.request.gpus, 'GPU')}: {sizes}{more}"
    )
    axes.spines[:].set_visible(False)


def _draw_timeline(plan: Plan, axes: Any) -> None:
    """Every action of a batch on its pipeline rank; white is idle. Time in forwards of a layer."""
    from matplotlib.patches import Patch

    assert plan.simulation is not None
    for start, end, rank, action in plan.simulation.spans:
        shade = 1.0 - 0.35 * action.chunk / max(1, plan.layout.virtual_size)
        axes.broken_barh(
            [(start, end - start)],
            (rank + 0.1, 0.8),
            facecolors=_COLOURS[action.kind],
            alpha=shade,
            edgecolor="white",
            linewidth=0.3,
        )
    used = dict.fromkeys(action.kind for *_, action in plan.simulation.spans)
    axes.legend(
        handles=[Patch(color=_COLOURS[kind], label=_WORDS[kind]) for kind in used],
        loc="upper right",
        fontsize=7,
    )
    size = plan.layout.pipeline_size
    axes.set_xlim(0, plan.simulation.makespan)
    axes.set_ylim(size, 0)
    axes.set_yticks([rank + 0.5 for rank in range(size)], [f"pp {rank}" for rank in range(size)])
    axes.set_xlabel("time, in forwards of one layer of one micro-batch")
    axes.set_title(
        f"{plan.request.parallel.pipeline.schedule}: {plan.request.num_microbatches} micro-batches,"
        f" bubble {plan.bubble:.1%}"
    )
