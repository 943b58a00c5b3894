"""Table and chart of the speed beside Megatron-Core, from results/speed.json.

The file keeps entries (row, date, commit, note, ours, peer; no peer: its published numbers stand
for it). The last one of a row counts, but on one day those whose peer ran beside them come before
others. Nothing in the documents' tables is written by hand:

    python benchmarks/chart.py                 # are table and chart those of the entries?
    python benchmarks/chart.py --write         # README.md, docs/speed.md, docs/images/speed.svg
    python benchmarks/chart.py --add results.json --commit abc1234 --note "one GPU" --write

`--add` takes what `speed.py --out` or `train_step.py --out` wrote, and with `--peer FILE` what the
peer wrote in the same run as the (one) result added.
"""

import argparse
import datetime
import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

from rows import ROWS, Row, row_of
from speed import in_our_terms

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "speed.json"
CHART = ROOT / "docs" / "images" / "speed.svg"
BEGIN, END = "<!-- made by benchmarks/chart.py -->", "<!-- until here -->"
KEPT = ("tokens_per_second_per_gpu", "step_ms", "step_ms_p95", "mfu_full", "mfu_causal",
        "share_of_ceiling", "kernel_busy_share", "peak_gib", "ceiling_tflops", "torch", "cuda",
        "gpu", "set", "schedule", "virtual", "context", "versions")  # fmt: skip


@dataclass(frozen=True)
class Comparison:
    """The last entry of a row, beside its peer."""

    name: str
    row: Row
    entry: dict[str, Any]
    peer_rate: float
    peer_memory: float
    source: str
    """Where the peer's numbers are from: same run, published, or a row of this package."""

    @property
    def rate(self) -> float:
        """Tokens a second a GPU of this package."""
        return self.entry["ours"]["tokens_per_second_per_gpu"]

    @property
    def ratio(self) -> float:
        """Ours over the peer's."""
        return self.rate / self.peer_rate


def load() -> list[dict[str, Any]]:
    """All entries, oldest first."""
    return json.loads(RESULTS.read_text())["entries"]


def comparisons(entries: list[dict[str, Any]]) -> Iterator[Comparison]:
    """The entry of each row that counts, in the rows' order."""
    last: dict[str, dict[str, Any]] = {}
    for entry in entries:
        old = last.get(entry["row"])
        if old and old.get("peer") and not entry.get("peer") and old["date"] == entry["date"]:
            continue
        last[entry["row"]] = entry
    for name, row in ROWS.items():
        if name not in last:
            continue
        entry = last[name]
        if entry.get("peer"):
            peer = entry["peer"]
            rate, memory, source = peer["tokens_per_second_per_gpu"], peer["peak_gib"], "same run"
        elif row.of:
            peer = last[row.of]["ours"]
            rate, memory, source = peer["tokens_per_second_per_gpu"], peer["peak_gib"], "unpacked"
        else:
            rate, memory, source = row.rate, row.memory, "published"
        yield Comparison(name, row, entry, rate, memory, source)


def short_table(found: list[Comparison]) -> str:
    """For the README: a line a row."""
    lines = ["| case | here | Megatron-Core | ratio |", "|---|---|---|---|"]
    for one in found:
        lines.append(
            f"| {one.row.title} | {one.rate:,.0f} | {one.peer_rate:,.0f}, {one.source} |"
            f" {one.ratio:.2f} |"
        )
    return "\n".join(lines)


def long_table(found: list[Comparison]) -> str:
    """For docs/speed.md: all that was measured."""
    lines = [
        "| row | tokens/s/GPU | step P50, P95 ms | MFU full, causal | of ceiling | kernels run |"
        " GiB, peer's | peer | ratio | goal | measured |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for one in found:
        ours = one.entry["ours"]
        busy = ours.get("kernel_busy_share")
        cells = (
            one.row.title,
            f"{one.rate:,.0f}",
            f"{ours['step_ms']:.0f}, {ours['step_ms_p95']:.0f}",
            f"{ours['mfu_full']:.1%}, {ours['mfu_causal']:.1%}",
            f"{ours['share_of_ceiling']:.0%}",
            f"{busy:.0%}" if busy else "-",
            f"{ours['peak_gib']:.1f}, {one.peer_memory:.1f}",
            f"{one.peer_rate:,.0f} {one.source}",
            f"{one.ratio:.2f}",
            f"{one.row.wanted:g}, torch alone {one.row.least:g}",
            f"{one.entry['date']}, {one.entry['commit']}",
        )
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def chart(found: list[Comparison]) -> str:
    """SVG: two bars a row, the peer's of length one."""
    left, unit, step, top = 290, 200, 44, 56
    width = left + int(unit * max(2.0, *(one.ratio for one in found))) + 130
    height = top + step * len(found) + 20
    dates = sorted({one.entry["date"] for one in found})
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img"'
        ' font-family="sans-serif" font-size="13">',
        "<title>Tokens a second a GPU beside Megatron-Core, H200</title>",
        f'<rect width="{width}" height="{height}" fill="#ffffff"/>',
        '<text x="12" y="22" font-size="15" font-weight="bold">Tokens a second a GPU beside'
        " Megatron-Core, H200</text>",
        f'<text x="12" y="42" fill="#555555">{escape(" to ".join({dates[0]: 0, dates[-1]: 0}))};'
        " blue: this package; grey: Megatron-Core (* published, else in the same run)</text>",
    ]
    for index, one in enumerate(found):
        y = top + step * index
        star = " *" if one.source == "published" else ""
        peer = "unpacked " if one.source == "unpacked" else ""
        ours = unit * one.ratio
        parts += [
            f'<text x="{left - 10}" y="{y + 22}" text-anchor="end">{escape(one.row.title)}</text>',
            f'<rect x="{left}" y="{y + 4}" width="{ours:.1f}" height="16" fill="#2f6db5"/>',
            f'<text x="{left + ours + 6:.1f}" y="{y + 17}">{one.rate:,.0f}'
            f' <tspan font-weight="bold">{one.ratio:.2f}</tspan></text>',
            f'<rect x="{left}" y="{y + 22}" width="{unit}" height="12" fill="#a5a5a5"/>',
            f'<text x="{left + unit + 6}" y="{y + 33}" fill="#555555" font-size="12">'
            f"{peer}{one.peer_rate:,.0f}{star}</text>",
        ]
    return "\n".join([*parts, "</svg>"]) + "\n"


def replaced(text: str, made: str) -> str:
    """A document with the part between the marks written anew."""
    before, _, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not end:
        raise ValueError(f"the document lacks the marks {BEGIN!r} and {END!r}")
    return f"{before}{BEGIN}\n{made}\n{END}{after}"


def outputs(entries: list[dict[str, Any]]) -> dict[Path, str]:
    """What every file should hold."""
    found = list(comparisons(entries))
    readme, page = ROOT / "README.md", ROOT / "docs" / "speed.md"
    return {
        readme: replaced(readme.read_text(), short_table(found)),
        page: replaced(page.read_text(), long_table(found)),
        CHART: chart(found),
    }


def stale(entries: list[dict[str, Any]]) -> list[str]:
    """Files that differ from what the entries say."""
    made = outputs(entries)
    return [
        path.relative_to(ROOT).as_posix()
        for path, text in made.items()
        if not path.exists() or path.read_text() != text
    ]


def entries_of(path: Path, args: argparse.Namespace) -> list[dict[str, Any]]:
    """New entries from a file of `speed.py` or `train_step.py`."""
    common = {"date": args.date, "commit": args.commit, "note": args.note}
    text = path.read_text()
    try:
        written = json.loads(text)
    except json.JSONDecodeError:
        written = None
    if written is not None and "rows" in written:
        rows = written["rows"].items()
        common["date"] = written["date"]
        found = [
            (name, one["ours"], one.get("peer") if ROWS[name].peer else None) for name, one in rows
        ]
    else:
        peer = in_our_terms(json.loads(Path(args.peer).read_text())) if args.peer else None
        runs = [json.loads(line) for line in text.splitlines() if line.startswith("{")]
        found = [(row_of(run), run, peer) for run in runs]
        for name, run, _ in found:
            if name is None:
                print(f"of no row, left out: {json.dumps(run)[:200]}", file=sys.stderr)
    return [
        {"row": name, **common, "ours": _kept(ours), "peer": _kept(peer) if peer else None}
        for name, ours, peer in found
        if name is not None
    ]


def _kept(run: dict[str, Any]) -> dict[str, Any]:
    return {key: run[key] for key in KEPT if run.get(key) is not None}


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--write", action="store_true", help="write documents and chart")
    parser.add_argument("--add", nargs="+", default=[], type=Path, help="results to keep")
    parser.add_argument("--peer", default="", help="--add: the peer's file of the same run")
    parser.add_argument("--commit", default="", help="--add: what was measured")
    parser.add_argument("--note", default="", help="--add: what to know about it")
    parser.add_argument("--date", default=datetime.date.today().isoformat(), help="--add: when")
    args = parser.parse_args()
    if args.add and not args.commit:
        parser.error("--add needs --commit: what was measured")
    entries = load() if RESULTS.exists() else []
    for path in args.add:
        entries += entries_of(path, args)
    if args.add:
        RESULTS.write_text(json.dumps({"entries": entries}, indent=1) + "\n")
    if args.write:
        for path, text in outputs(entries).items():
            path.parent.mkdir(exist_ok=True)
            path.write_text(text)
    elif problems := stale(entries):
        sys.exit(f"not what results/speed.json says: {', '.join(problems)}; use --write")


if __name__ == "__main__":
    main()
