"""Experts' loads over the steps of a run, as a heat map."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from megatron_lightning.callbacks.expert_load import ExpertReading

_MOST_COLUMNS = 500


def draw_loads(readings: Sequence[ExpertReading], path: Path) -> None:
    """Write a PNG: one strip a layer, experts from top to bottom, steps from left to right; white
    is the mean load, blue less, red more, at most a factor of eight.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    names = list(readings[-1].layers)
    shown = readings[:: -(-len(readings) // _MOST_COLUMNS)]
    figure = Figure(figsize=(9.0, 1.2 + 0.9 * len(names)), layout="constrained")
    FigureCanvasAgg(figure)
    strips = figure.subplots(len(names), 1, squeeze=False, sharex=True)[:, 0]
    image = None
    for name, strip in zip(names, strips, strict=True):
        loads = np.array([reading.layers[name].relative for reading in shown]).T  # (E, steps)
        image = strip.imshow(
            np.log2(np.maximum(loads, 2.0**-3)),
            aspect="auto",
            interpolation="nearest",
            cmap="coolwarm",
            vmin=-3,
            vmax=3,
            extent=(-0.5, len(shown) - 0.5, len(loads) - 0.5, -0.5),
        )
        strip.set_ylabel(f"layer {name}" if name.isdigit() else name, fontsize=7)
        strip.tick_params(labelsize=6)
    ticks = np.unique(np.linspace(0, len(shown) - 1, 8).astype(int))
    strips[-1].set_xticks(ticks, [str(shown[i].step) for i in ticks])
    strips[-1].set_xlabel("optimizer step")
    assert image is not None
    bar = figure.colorbar(image, ax=list(strips), ticks=[-3, -1, 0, 1, 3], shrink=0.8)
    bar.ax.set_yticklabels(["1/8", "1/2", "mean", "2", "8"], fontsize=7)
    bar.set_label("tokens of an expert over the mean", fontsize=8)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
