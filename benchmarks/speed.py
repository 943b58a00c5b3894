r"""How fast is training, beside the peer in the same run?

Each row (`rows.py`) is trained by this package (`train_step.py`) and by the peer, turn about, each
in a process of its own; what counts is the ratio of tokens a second a GPU, since the device itself
varies by several per cent between days.

    python benchmarks/speed.py --rows a b --out results.json \
        --peer "torchrun --nproc-per-node {gpus} bench_mcore.py"
    python benchmarks/speed.py --rows a --peer "..." --against results.json

The peer is any command that takes `--configs CONFIG --steps N --warm N --out FILE` and writes there
{"runs": [{"tokens_per_s_per_gpu": ..., "peak_alloc_GiB": ..., "step_ms_median": ...}]}; CONFIG is
the row's. Without `--peer` this package alone is measured. With `--against` the exit status is 1
where a ratio (or without a peer, the share of the ceiling) has fallen by more than `--tolerance`
since. `chart.py` makes table and chart of what is kept in results/speed.json.
"""

import argparse
import datetime
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from rows import ROWS, Row

HERE = Path(__file__).parent
FORMULA = "FLOPs a token: 6 N_matmul + k L heads head_dim S, k = 12 full, 6 causal; of 989 TFLOP/s"
COLUMNS = (
    ("tokens_per_second_per_gpu", "tokens/s/GPU"),
    ("step_ms", "P50 ms"),
    ("step_ms_p95", "P95 ms"),
    ("mfu_full", "MFU full"),
    ("mfu_causal", "causal"),
    ("share_of_ceiling", "of ceiling"),
    ("kernel_busy_share", "busy"),
    ("peak_gib", "GiB"),
)


def ours(row: Row, args: argparse.Namespace) -> dict[str, Any]:
    """One run of this package."""
    with tempfile.NamedTemporaryFile("r", suffix=".json") as out:
        command = [sys.executable, str(HERE / "train_step.py"), *row.ours.split(), "--busy"]
        command += ["--devices", str(row.gpus)]
        command += ["--steps", str(args.steps), "--warm", str(args.warm), "--out", out.name]
        command += args.ours.split() + ([] if args.eager else ["--compile"])
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        return json.loads(out.read().splitlines()[-1])


def peer(row: Row, args: argparse.Namespace) -> dict[str, Any]:
    """One run of the peer, in our terms."""
    environment = os.environ | dict(one.split("=", 1) for one in row.environment.split())
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "peer.json"
        command = args.peer.replace("{gpus}", str(row.gpus))
        command += f" --configs {row.peer} --steps {args.steps} --warm {args.warm} --out {out}"
        subprocess.run(command, check=True, shell=True, stdout=subprocess.DEVNULL, env=environment)
        written = json.loads(out.read_text())
    if not written["runs"]:
        raise RuntimeError(f"the peer measured nothing: {command}: {written.get('failed')}")
    return in_our_terms(written)


def in_our_terms(written: dict[str, Any]) -> dict[str, Any]:
    """The last run in a file of the peer."""
    found = written["runs"][-1]
    return {
        "tokens_per_second_per_gpu": found["tokens_per_s_per_gpu"],
        "step_ms": found["step_ms_median"],
        "peak_gib": found.get("peak_alloc_GiB_max_rank", found["peak_alloc_GiB"]),
        "mfu_full": found.get("mfu_full_vs_989"),
        "mfu_causal": found.get("mfu_causal_vs_989"),
        "share_of_ceiling": found.get("full_vs_ceiling"),
        "versions": written.get("versions"),
    }


def measure(name: str, args: argparse.Namespace, before: dict[str, Any]) -> dict[str, Any]:
    """Both, turn about; the run with the median rate of each, and the ratio of these."""
    row = ROWS[name]
    runs: dict[str, list[dict[str, Any]]] = {"ours": [], "peer": []}
    for _ in range(args.repeats):
        runs["ours"].append(ours(row, args))
        if args.peer and row.peer:
            runs["peer"].append(peer(row, args))
    if row.of in before:
        runs["peer"].append(before[row.of]["ours"])
    found: dict[str, Any] = {side: median(each) for side, each in runs.items() if each}
    found["rates"] = {
        side: [round(run["tokens_per_second_per_gpu"]) for run in each]
        for side, each in runs.items()
    }
    if "peer" in found:
        rates = [found[side]["tokens_per_second_per_gpu"] for side in ("ours", "peer")]
        found["ratio"] = round(rates[0] / rates[1], 4)
        found["memory_ratio"] = round(found["ours"]["peak_gib"] / found["peer"]["peak_gib"], 4)
    return found


def median(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """The run with the (lower) median rate."""
    rates = [run["tokens_per_second_per_gpu"] for run in runs]
    return runs[rates.index(statistics.median_low(rates))]


def table(rows: dict[str, dict[str, Any]]) -> str:
    """What was measured, a line each; beside the ratio what is wanted, and what published numbers
    would make of it.
    """
    titles = (*(title for _, title in COLUMNS), "ratio", "wanted", "published")
    lines = [" ".join(f"{title:>12}" for title in ("row", *titles))]
    for name, row in rows.items():
        for side in ("ours", "peer"):
            if side not in row:
                continue
            cells = [f"{name} {side[0]}", *(_cell(row[side].get(key)) for key, _ in COLUMNS)]
            if side == "ours":
                cells += [_cell(row.get("ratio")), _wanted(name), _published(name, row)]
            lines.append(" ".join(f"{cell:>12}" for cell in cells))
    return "\n".join(lines)


def _wanted(name: str) -> str:
    return f"{ROWS[name].least:g}-{ROWS[name].wanted:g}"


def _published(name: str, row: dict[str, Any]) -> str:
    rate = ROWS[name].rate
    return _cell(row["ours"]["tokens_per_second_per_gpu"] / rate if rate else None)


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    return f"{value:.0f}" if value > 1000 else f"{value:.4g}"


def fallen(rows: dict[str, Any], before: dict[str, Any], tolerance: float) -> list[str]:
    """Which rows are slower than they were, by ratios alone."""
    found = []
    for name, row in rows.items():
        old = before["rows"].get(name)
        if old is None:
            continue
        if "ratio" in row and "ratio" in old:
            what, now, then = "ratio to the peer", row["ratio"], old["ratio"]
        else:
            what, now, then = (
                "share of the ceiling",
                *(one["ours"]["share_of_ceiling"] for one in (row, old)),
            )
        if now < then * (1 - tolerance):
            found.append(f"{name}: {what} {now:.3f}, was {then:.3f} on {before['date']}")
    return found


def main() -> None:
    """Measure, print, write, compare."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", nargs="+", default=["a", "b"], choices=list(ROWS))
    parser.add_argument("--peer", default="", help="command of the peer; {gpus} is replaced")
    parser.add_argument("--ours", default="", help="further options for train_step.py")
    parser.add_argument("--eager", action="store_true", help="layers not compiled")
    parser.add_argument("--repeats", type=int, default=1, help="runs of each, turn about")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--warm", type=int, default=4)
    parser.add_argument("--against", default="", help="results of an earlier day")
    parser.add_argument("--tolerance", type=float, default=0.02)
    parser.add_argument("--out", default="", help="JSON file, written anew after each row")
    args = parser.parse_args()
    rows: dict[str, Any] = {}
    for name in args.rows:
        rows[name] = measure(name, args, rows)
        print(table({name: rows[name]}), flush=True)
        if args.out:
            date = datetime.date.today().isoformat()
            made = {"date": date, "peer": args.peer, "formula": FORMULA, "rows": rows}
            Path(args.out).write_text(json.dumps(made, indent=1) + "\n")
    print(FORMULA)
    if args.against:
        problems = fallen(rows, json.loads(Path(args.against).read_text()), args.tolerance)
        print("\n".join(problems) or "no slower than before")
        sys.exit(1 if problems else 0)


if __name__ == "__main__":
    main()
