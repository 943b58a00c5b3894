"""How fast is training, beside the peer in the same run?

Each shape is trained by this package (`train_step.py`) and by the peer, turn about, each in a
process of its own; what counts is the ratio of tokens a second a GPU, since the device itself
varies by several per cent between days.

    python benchmarks/speed.py --shapes a b --peer "python bench_mcore.py" --out results.json
    python benchmarks/speed.py --shapes a --peer "..." --against results.json

The peer is any command that takes `--configs SHAPE --steps N --warm N --out FILE` and writes there
{"runs": [{"tokens_per_s_per_gpu": ..., "peak_alloc_GiB": ..., "step_ms_median": ...}]}; without
`--peer` this package alone is measured. With `--against` the exit status is 1 where a ratio (or
without a peer, the share of the ceiling) has fallen by more than `--tolerance` since.
"""

import argparse
import datetime
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
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


def ours(shape: str, args: argparse.Namespace) -> dict[str, Any]:
    """One run of this package."""
    with tempfile.NamedTemporaryFile("r", suffix=".json") as out:
        command = [sys.executable, str(HERE / "train_step.py"), "--shapes", shape, "--busy"]
        command += ["--steps", str(args.steps), "--warm", str(args.warm), "--out", out.name]
        command += args.ours.split() + ([] if args.eager else ["--compile"])
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        return json.loads(out.read().splitlines()[-1])


def peer(shape: str, args: argparse.Namespace) -> dict[str, Any]:
    """One run of the peer, in our terms."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "peer.json"
        command = f"{args.peer} --configs {shape} --steps {args.steps} --warm {args.warm}"
        subprocess.run(f"{command} --out {out}", check=True, shell=True, stdout=subprocess.DEVNULL)
        written = json.loads(out.read_text())
    found = written["runs"][-1]
    return {
        "tokens_per_second_per_gpu": found["tokens_per_s_per_gpu"],
        "step_ms": found["step_ms_median"],
        "peak_gib": found["peak_alloc_GiB"],
        "mfu_full": found.get("mfu_full_vs_989"),
        "mfu_causal": found.get("mfu_causal_vs_989"),
        "share_of_ceiling": found.get("full_vs_ceiling"),
        "versions": written.get("versions"),
    }


def measure(shape: str, args: argparse.Namespace) -> dict[str, Any]:
    """Both, turn about; the run with the median rate of each, and the ratio of these."""
    runs: dict[str, list[dict[str, Any]]] = {"ours": [], "peer": []}
    for _ in range(args.repeats):
        runs["ours"].append(ours(shape, args))
        if args.peer:
            runs["peer"].append(peer(shape, args))
    row: dict[str, Any] = {name: median(found) for name, found in runs.items() if found}
    row["rates"] = {
        name: [round(run["tokens_per_second_per_gpu"]) for run in found]
        for name, found in runs.items()
    }
    if args.peer:
        rates = [row[name]["tokens_per_second_per_gpu"] for name in ("ours", "peer")]
        row["ratio"] = round(rates[0] / rates[1], 4)
        row["memory_ratio"] = round(row["ours"]["peak_gib"] / row["peer"]["peak_gib"], 4)
    return row


def median(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """The run with the (lower) median rate."""
    rates = [run["tokens_per_second_per_gpu"] for run in runs]
    return runs[rates.index(statistics.median_low(rates))]


def table(rows: dict[str, dict[str, Any]]) -> str:
    """What was measured, a line each."""
    lines = [" ".join(f"{title:>12}" for title in ("shape", *(t for _, t in COLUMNS), "ratio"))]
    for shape, row in rows.items():
        for name in ("ours", "peer"):
            if name not in row:
                continue
            cells = [f"{shape} {name}", *(_cell(row[name].get(key)) for key, _ in COLUMNS)]
            cells.append(_cell(row.get("ratio")) if name == "ours" else "")
            lines.append(" ".join(f"{cell:>12}" for cell in cells))
    return "\n".join(lines)


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    return f"{value:.0f}" if value > 1000 else f"{value:.4g}"


def fallen(rows: dict[str, Any], before: dict[str, Any], tolerance: float) -> list[str]:
    """Which shapes are slower than they were, by ratios alone."""
    found = []
    for shape, row in rows.items():
        old = before["shapes"].get(shape)
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
            found.append(f"{shape}: {what} {now:.3f}, was {then:.3f} on {before['date']}")
    return found


def main() -> None:
    """Measure, print, write, compare."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shapes", nargs="+", default=["a", "b"])
    parser.add_argument("--peer", default="", help="command of the peer's benchmark")
    parser.add_argument("--ours", default="", help="further options for train_step.py")
    parser.add_argument("--eager", action="store_true", help="layers not compiled")
    parser.add_argument("--repeats", type=int, default=1, help="runs of each, turn about")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--warm", type=int, default=4)
    parser.add_argument("--against", default="", help="results of an earlier day")
    parser.add_argument("--tolerance", type=float, default=0.02)
    parser.add_argument("--out", default="")
    args = parser.parse_args()
    rows = {}
    for shape in args.shapes:
        rows[shape] = measure(shape, args)
        print(table({shape: rows[shape]}), flush=True)
    print("FLOPs a token: 6 N_matmul + k L heads head_dim S, k = 12 full, 6 causal; of 989 TFLOP/s")
    if args.out:
        made = {"date": datetime.date.today().isoformat(), "peer": args.peer, "shapes": rows}
        Path(args.out).write_text(json.dumps(made, indent=1) + "\n")
    if args.against:
        problems = fallen(rows, json.loads(Path(args.against).read_text()), args.tolerance)
        print("\n".join(problems) or "no slower than before")
        sys.exit(1 if problems else 0)


if __name__ == "__main__":
    main()
