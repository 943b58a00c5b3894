"""The loss curve of the quickstart as a PNG: both parts of the run, and where it was resumed."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Points = Sequence[tuple[int, float]]
"""(optimizer step, loss) in order."""

_INK, _MUTED, _GRID = "#1f2430", "#6b7280", "#e5e7eb"
_COLOURS = ("#2563eb", "#d9480f")
_PAPER = {"facecolor": "white", "edgecolor": "none", "pad": 1.5}
_TRAINING: dict[str, Any] = {"linewidth": 1.2, "alpha": 0.35}
_VALIDATION: dict[str, Any] = {
    "linewidth": 1.8,
    "marker": "o",
    "markersize": 5.5,
    "markeredgecolor": "white",
    "markeredgewidth": 0.9,
    "zorder": 3,
}


@dataclass(frozen=True, kw_only=True)
class Part:
    """One part of the run."""

    label: str
    """Layout that it ran in."""
    train: Points
    """Training loss of each step."""
    validation: Points
    """Loss over the validation set."""


def draw_losses(parts: Sequence[Part], path: Path, *, title: str, subtitle: str) -> None:
    """Write the PNG at `path`, 1600 x 1000 pixels. A later part's first validation point is the
    loss of the loaded checkpoint, at the step where the part before ended.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 5), dpi=200, facecolor="white")
    FigureCanvasAgg(figure)
    axes = figure.add_axes((0.085, 0.115, 0.885, 0.70))
    _style(axes)
    for part, colour in zip(parts, _COLOURS, strict=False):
        axes.plot(*zip(*part.train, strict=True), color=colour, **_TRAINING)
        axes.plot(*zip(*part.validation, strict=True), color=colour, **_VALIDATION)
    _mark_resume(axes, parts[0], parts[1])
    _label(axes, parts[0].validation[0], (9, 3), "left")
    _label(axes, parts[1].validation[-1], (2, 9), "right")
    _legend(axes)
    figure.text(0.085, 0.925, title, fontsize=14, fontweight="bold", color=_INK)
    figure.text(0.085, 0.872, subtitle, fontsize=9.5, color=_MUTED)
    figure.savefig(path)


def _mark_resume(axes: Any, first: Part, second: Part) -> None:
    """A dashed line where the layout changes, both layouts beside it, both losses at its foot."""
    step, loaded = second.validation[0]
    saved = first.validation[-1][1]
    axes.axvline(step, color=_MUTED, linestyle=(0, (4, 3)), linewidth=1, zorder=1)
    for part, colour, offset, side in (
        (first, _COLOURS[0], -10, "right"),
        (second, _COLOURS[1], 10, "left"),
    ):
        axes.annotate(
            part.label.replace(" x ", " \N{MULTIPLICATION SIGN} "),
            (step, 0.965),
            xycoords=("data", "axes fraction"),
            xytext=(offset, 0),
            textcoords="offset points",
            ha=side,
            va="top",
            fontsize=10,
            fontweight="bold",
            color=colour,
            bbox=_PAPER,
        )
    axes.annotate(
        f"resumed at step {step}\nsaved {saved:.4f}, loaded {loaded:.4f}",
        (step, loaded),
        xytext=(10, 34),
        textcoords="offset points",
        fontsize=9,
        linespacing=1.4,
        color=_MUTED,
        bbox=_PAPER,
    )


def _label(axes: Any, point: tuple[int, float], offset: tuple[int, int], side: str) -> None:
    """The loss as a number beside a point."""
    axes.annotate(
        f"{point[1]:.2f}",
        point,
        xytext=offset,
        textcoords="offset points",
        ha=side,
        fontsize=10,
        fontweight="bold",
        color=_INK,
    )


def _style(axes: Any) -> None:
    axes.set_xlabel("optimizer step", fontsize=10, color=_INK)
    axes.set_ylabel("loss (nats per token)", fontsize=10, color=_INK)
    axes.grid(axis="y", color=_GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.margins(x=0.02, y=0.09)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color(_GRID)
    axes.tick_params(colors=_MUTED, labelsize=9, length=0)


def _legend(axes: Any) -> None:
    from matplotlib.lines import Line2D

    handles = [
        Line2D([], [], color=_MUTED, label="validation loss", **_VALIDATION),
        Line2D([], [], color=_MUTED, label="training loss of each step", **_TRAINING),
    ]
    axes.legend(handles=handles, loc="lower left", frameon=False, fontsize=9, labelcolor=_INK)
