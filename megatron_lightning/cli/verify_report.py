"""The result of `verify` for the screen, as Markdown and for JSON."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from megatron_lightning.cli.verify_findings import Finding
from megatron_lightning.cli.verify_run import Outcome, Verification
from megatron_lightning.cli.verify_source import Source
from megatron_lightning.cli.verify_tolerances import Limits
from megatron_lightning.utils.wording import counted

SHOWN_FINDINGS = 8


def tolerance_lines(source: Source, limits: Limits) -> list[str]:
    """What is allowed, to be printed before anything runs."""
    width = max(len(name) for name in vars(limits))
    lines = [f"Tolerances ({source.precision}), relative errors:"]
    return lines + [f"  {name:<{width}}  {value:.2g}" for name, value in vars(limits).items()]


def first_finding(outcome: Outcome) -> Finding | None:
    """Where it began."""
    found = outcome.comparison.findings if outcome.comparison is not None else ()
    return found[0] if found else None


def as_text(verification: Verification) -> str:
    """A line for each candidate and what left its tolerance."""
    lines = []
    for outcome in verification.outcomes:
        verdict = "pass" if outcome.passed else "FAIL"
        lines.append(f"{verdict}  {outcome.candidate.name}  ({outcome.seconds:.1f} s)")
        if outcome.failure:
            lines.append(f"      the run failed: {outcome.failure}")
        first = first_finding(outcome)
        if first is not None and outcome.comparison is not None:
            lines.append(f"      first: {first.describe()}")
            more = len(outcome.comparison.findings) - 1
            if more:
                lines.append(f"      and {more} more signals behind it")
    lines += [f"Warning: {warning}" for warning in verification.warnings]
    lines.append("PASSED" if verification.passed else "FAILED")
    return "\n".join(lines)


def as_values(verification: Verification) -> dict[str, Any]:
    """Everything as plain values."""
    return {
        "passed": verification.passed,
        "model": verification.source.name,
        "precision": verification.source.precision,
        "notes": list(verification.source.notes),
        "warnings": list(verification.warnings),
        "settings": dataclasses.asdict(verification.settings),
        "tolerances": vars(verification.limits),
        "baseline": {
            "name": verification.baseline.name,
            "world_size": verification.baseline.world_size,
        },
        "candidates": [_outcome_values(outcome) for outcome in verification.outcomes],
    }


def _outcome_values(outcome: Outcome) -> dict[str, Any]:
    comparison = outcome.comparison
    return {
        "name": outcome.candidate.name,
        "world_size": outcome.candidate.world_size,
        "layout": dataclasses.asdict(outcome.candidate.parallel),
        "passed": outcome.passed,
        "failure": outcome.failure,
        "seconds": outcome.seconds,
        "signals": []
        if comparison is None
        else [dataclasses.asdict(signal) for signal in comparison.signals],
        "findings": []
        if comparison is None
        else [dataclasses.asdict(finding) for finding in comparison.findings],
    }


def as_markdown(verification: Verification) -> str:
    """A page to keep or to attach."""
    source, settings = verification.source, verification.settings
    lines = [
        f"# Verification of {source.name}: {'passed' if verification.passed else 'FAILED'}",
        "",
        f"{settings.steps} steps in {source.precision} on {settings.accelerator}, seed"
        f" {settings.seed}. Baseline: {verification.baseline.name}"
        f" ({counted(verification.baseline.world_size, 'rank')}).",
        "",
    ]
    lines += [f"- {note}" for note in (*source.notes, *verification.warnings)]
    lines += ["", "## Tolerances", ""]
    lines += _table(
        ("signal", "allowed"),
        [(name, f"{value:.2g}") for name, value in vars(verification.limits).items()],
    )
    lines += ["", "## Layouts", ""]
    rows = []
    for outcome in verification.outcomes:
        first = first_finding(outcome)
        words = outcome.failure or (first.describe() if first else "")
        verdict = "pass" if outcome.passed else "**fail**"
        rows.append((outcome.candidate.name, outcome.candidate.world_size, verdict, words))
    lines += _table(("layout", "ranks", "verdict", "first signal out of tolerance"), rows)
    for outcome in verification.outcomes:
        lines += _details(outcome)
    return "\n".join(lines) + "\n"


def _details(outcome: Outcome) -> list[str]:
    if outcome.comparison is None:
        return []
    lines = ["", f"### {outcome.candidate.name}", ""]
    lines += _table(
        ("signal", "compared", "largest error", "allowed"),
        [
            (signal.signal, signal.compared, f"{signal.error:.2g}", f"{signal.limit:.2g}")
            for signal in outcome.comparison.signals
        ],
    )
    found = outcome.comparison.findings
    if found:
        lines += ["", "Out of tolerance, in the order of a step:", ""]
        lines += [f"1. {finding.describe()}" for finding in found[:SHOWN_FINDINGS]]
        if len(found) > SHOWN_FINDINGS:
            lines.append(f"\nand {len(found) - SHOWN_FINDINGS} more")
    return lines


def _table(header: Sequence[str], rows: Sequence[Sequence[Any]]) -> list[str]:
    body = [[str(cell).replace("|", "\\|").replace("\n", " ") for cell in row] for row in rows]
    lines = [f"| {' | '.join(header)} |", f"|{'---|' * len(header)}"]
    return lines + [f"| {' | '.join(row)} |" for row in body]
