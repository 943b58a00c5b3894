"""What the quickstart shows at its end: one page of text and the picture of the losses."""

import platform
import textwrap
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from megatron_lightning import __version__
from megatron_lightning.cli.loss_plot import Part, draw_losses
from megatron_lightning.cli.quickstart_run import Layout, Settings
from megatron_lightning.utils.wording import counted

_WIDTH = 88


def page(summary: dict[str, Any], output: Path) -> str:
    """The summary for the screen."""
    layouts = {name: Layout(**sizes) for name, sizes in summary["layouts"].items()}
    steps, seconds = summary["steps"], summary["seconds"]
    device = "GPU" if summary["accelerator"] == "gpu" else "CPU"
    before, after = (summary[f"validation_loss_{when}_resume"] for when in ("before", "after"))
    rows = [
        (
            "model",
            f"GPT, {summary['model_parameters']:,} parameters, {summary['precision']};"
            f" corpus of {summary['corpus_tokens']:,} tokens",
        ),
        (
            f"steps 1-{steps['first']}",
            f"{layouts['first']}, {counted(layouts['first'].devices, f'{device} rank')}",
        ),
        (
            f"steps {steps['first'] + 1}-{steps['total']}",
            f"{layouts['resumed']}, {counted(layouts['resumed'].devices, f'{device} rank')}",
        ),
        (
            "validation loss",
            f"{summary['validation_loss_first']:.3f} -> {summary['validation_loss_last']:.3f}",
        ),
        (
            "at the resume",
            f"{before:.6f} saved, {after:.6f} loaded in the other layout"
            f" (difference {abs(before - after):.1e})",
        ),
        ("checkpoint", summary["checkpoint"]),
        ("seconds", ", ".join(f"{name} {value:.1f}" for name, value in seconds.items())),
        ("files", f"{output / 'summary.json'}, {output / 'loss.png'}"),
    ]
    lines = [f"  {name:<16} {text}" for name, text in rows]
    text = summary["prompt"] + "|" + summary["continuation"].rstrip()
    quoted = [
        wrapped for line in text.splitlines() for wrapped in textwrap.wrap(line, _WIDTH - 6) or [""]
    ]
    return "\n".join(
        [
            "",
            "=" * _WIDTH,
            "  Quickstart of megatron_lightning",
            "=" * _WIDTH,
            *lines,
            "-" * _WIDTH,
            "  Prompt | continuation (so little training gives form, not sense):",
            "",
            *(f"    {line}" for line in quoted),
            "=" * _WIDTH,
        ]
    )


def draw(settings: Settings, parts: Sequence[Part]) -> None:
    """Write `loss.png`."""
    draw_losses(
        parts,
        settings.output / "loss.png",
        title="One run, two layouts",
        subtitle=(
            "GPT trained on the documentation that Python ships; the checkpoint saved in one layout"
            " goes on in the other"
        ),
    )


def versions() -> dict[str, str]:
    """Of Python and of the packages that decide the numbers."""
    return {
        "python": platform.python_version(),
        "torch": version("torch"),
        "lightning": version("lightning"),
        "megatron_lightning": __version__,
    }
