"""What the losses of `low_precision.py` say: each precision's ratio to bfloat16's loss of the same
seed, its 95 % interval, and whether that lies within the limit, beyond it, or neither.
"""

import math
from statistics import fmean, stdev
from typing import Any

from low_precision_run import KINDS

LIMITS = {"fp16": 0.005, "nvfp4": 0.02}
FP8_LIMIT = 0.01
STUDENT_T = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201)
"""Two-sided 95 % quantiles for 1, 2, ... degrees of freedom."""


def limit_of(kind: str) -> float:
    """Largest relative distance from bfloat16's loss."""
    return LIMITS.get(kind, FP8_LIMIT)


def verdict(ratios: list[float], limit: float) -> dict[str, Any]:
    """Mean of the ratios, its standard error and interval, and what these say about the limit."""
    mean = fmean(ratios)
    found: dict[str, Any] = {"ratios": ratios, "ratio": mean, "limit": limit}
    if len(ratios) < 2:
        return found | {"verdict": "can't be told by one seed"}
    error = stdev(ratios) / math.sqrt(len(ratios))
    half = STUDENT_T[min(len(ratios) - 1, len(STUDENT_T)) - 1] * error
    low, high = mean - half, mean + half
    said = "can't be told"
    if 1 - limit <= low and high <= 1 + limit:
        said = "within"
    elif high < 1 - limit or low > 1 + limit:
        said = "beyond"
    return found | {"standard_error": error, "interval": [low, high], "verdict": said}


def judge(runs: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Each precision's ratios to bfloat16 of the same seed, on held-out text and in training."""
    plain = {run["seed"]: run for run in runs if run["kind"] == "bf16"}
    rows: dict[str, dict[str, Any]] = {}
    for kind in KINDS:
        own = sorted((run for run in runs if run["kind"] == kind), key=lambda run: run["seed"])
        pairs = [(run, plain[run["seed"]]) for run in own if run["seed"] in plain]
        if not pairs:
            continue
        rows[kind] = {
            "seeds": [run["seed"] for run, _ in pairs],
            "loss": fmean(run["loss"] for run, _ in pairs),
            "last_third_ratio": fmean(run["last_third"] / ref["last_third"] for run, ref in pairs),
            **verdict([run["loss"] / ref["loss"] for run, ref in pairs], limit_of(kind)),
        }
    return rows


def show(rows: dict[str, dict[str, Any]]) -> None:
    """A table of the verdicts."""
    print(f"{'':<15} {'loss':>7} {'ratio':>7} {'+-':>7}  {'interval':<17} limit  training")
    for kind, row in rows.items():
        low, high = row.get("interval", (math.nan, math.nan))
        print(
            f"{kind:<15} {row['loss']:7.4f} {row['ratio']:7.4f}"
            f" {row.get('standard_error', math.nan):7.4f}  {low:.4f} - {high:.4f}"
            f"   {row['limit']:.3f} {row['last_third_ratio']:8.4f}  {row['verdict']}"
            f"  ({', '.join(f'{ratio:.4f}' for ratio in row['ratios'])})"
        )
