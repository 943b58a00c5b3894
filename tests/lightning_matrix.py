"""Lightning's flags, hooks and callbacks in every layout: the table behind `docs/lightning.md`.

    python -m tests.lightning_matrix        writes the page

A verdict stands on evidence, test by test: `tests/unit/test_lightning_docs.py` checks that every
row names a scenario or a refusal that runs in each layout it speaks of, that no flag, hook or
callback of the installed Lightning is missing, and that the page is up to date.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.lightning_rows import (
    CALLBACKS,
    DATA,
    ENTRY_POINTS,
    FLAGS,
    HOOKS,
    LOGGING,
    OPTIMIZATION,
    Row,
)

PAGE = Path(__file__).resolve().parents[1] / "docs" / "lightning.md"


@dataclass(frozen=True, kw_only=True)
class Section:
    """One table of the page."""

    title: str
    about: str
    rows: Sequence[Row]


SECTIONS = (
    Section(title="Trainer flags", about="", rows=FLAGS),
    Section(
        title="Calls of the Trainer",
        about="",
        rows=ENTRY_POINTS,
    ),
    Section(
        title="Optimization",
        about="",
        rows=OPTIMIZATION,
    ),
    Section(
        title="`self.log`",
        about=(
            "What a step logs is one number on every rank: the mean (or sum, maximum, "
            "minimum) over "
            "micro-batches and data-parallel ranks, weighted by tokens where the step reports "
            "`num_tokens`, else by samples. Within an accumulation window the step's number is the "
            "window's mean, where Lightning alone takes the last batch's."
        ),
        rows=LOGGING,
    ),
    Section(
        title="Hooks of modules and callbacks",
        about=(
            "They are called on every rank, in Lightning's order and as often as in one process. "
            "One difference: as under Lightning's own model-parallel strategies, a checkpoint is "
            "loaded when the model is cut, so `on_load_checkpoint` comes after "
            "`configure_optimizers`. Under PP a step's code behind the call of the network runs on "
            "the last stage alone: what it leaves on `self` exists there only, and the outputs "
            "that `on_validation_batch_end` gets are None elsewhere (`on_train_batch_end` gets the "
            "loss everywhere)."
        ),
        rows=HOOKS,
    ),
    Section(title="Data", about="", rows=DATA),
    Section(title="Built-in callbacks", about="", rows=CALLBACKS),
)

INTRODUCTION = """# Lightning in every layout

<!-- Written by `python -m tests.lightning_matrix`; a test fails when it is out of date. -->

What Lightning offers, against the layouts of `MegatronStrategy`: data parallelism (DP), tensor
parallelism without sequence parallelism (equality with it is shown by the layout tests) (TP),
and pipelines (PP). Each entry is tested:
**same** means that a run in that layout gave what Lightning's own single process gave on the same
data (weights, metrics, logged rows, files, calls of hooks); **refused** means that a message names
the flag, hook or callback and the remedy, before any process is started unless the note says
otherwise. Nothing is silently ignored.
"""


def render() -> str:
    """The page."""
    parts = [INTRODUCTION]
    for section in SECTIONS:
        parts.append(f"## {section.title}\n")
        if section.about:
            parts.append(f"{section.about}\n")
        lines = ["| | DP | TP | PP | |", "|---|---|---|---|---|"]
        lines += [
            f"| {row.name} | {' | '.join(row.verdicts)} | {row.note} |" for row in section.rows
        ]
        parts.append("\n".join(lines) + "\n")
    return "\n".join(parts)


def main() -> None:
    """Write the page."""
    PAGE.write_text(render())


if __name__ == "__main__":
    main()
