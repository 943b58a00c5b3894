"""How long does building the index of a billion tokens take, beside Megatron-Core's C++ helpers?

    python benchmarks/data_index.py --megatron-python VENV/bin/python --out results.json

VENV is another virtual environment with the public packages megatron-core (which brings its
compiled `helpers_cpp`), numpy and torch; its Python version may differ. Fixed: the same document
lengths and weights in files, one thread, both sides in turn on the same machine within one run, and
results compared by digest. A number is the median CPU time of the one thread over all repetitions
of all rounds, after one that is not counted (imports and compilation, which are given apart); CPU
time, since other work on the machine disturbs it less. Medians of the elapsed time stand beside.

Lengths are log-normal: web pages (mean 700 tokens), short texts (100) and long ones (5000), about
10^9 tokens each, one epoch. Parts of an index: counting tokens, document index, sample index and
shuffle index. Document and shuffle index are numpy's `RandomState.shuffle` on both sides. Blends
have as many samples as 10^9 tokens give at sequence length 2048.
"""

import argparse
import hashlib
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

TOKENS = 10**9
MEANS = {"web": 700, "short": 100, "long": 5000}
SEQ_LENGTHS = (2048, 8192)
SOURCES = (2, 8, 32, 128)
BLEND_SIZE = TOKENS // 2048
SEED = 1234

Part = tuple[str, Callable[[], Any]]
Cases = tuple[
    Callable[[np.ndarray, int], list[Part]], Callable[[np.ndarray, np.ndarray], list[Part]]
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--megatron-python", required=True, help="Python with megatron-core")
    parser.add_argument("--rounds", type=int, default=3, help="turns of each side")
    parser.add_argument("--repetitions", type=int, default=3, help="measurements in a turn")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--side", choices=("megatron", "compiled", "plain"), help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.side:
        print(json.dumps(measure(options.side, options.folder, options.repetitions)))
        return
    with tempfile.TemporaryDirectory() as folder:
        write_inputs(Path(folder))
        turns: dict[str, list[Any]] = {"megatron": [], "compiled": [], "plain": []}
        for number in range(options.rounds):
            order = list(turns) if number % 2 == 0 else list(turns)[::-1]
            for side in order:
                python = options.megatron_python if side == "megatron" else sys.executable
                turns[side].append(turn(python, side, folder, options.repetitions))
    result = summary(turns, options)
    print(table(result))
    if options.out:
        options.out.write_text(json.dumps(result, indent=1) + "\n")


def write_inputs(folder: Path) -> None:
    random = np.random.default_rng(0)
    for name, mean in MEANS.items():
        lengths = random.lognormal(np.log(mean) - 0.5, 1.0, TOKENS // mean)
        np.save(folder / f"{name}.npy", np.maximum(lengths, 1).astype(np.int32))
    for sources in SOURCES:
        weights = random.random(sources) + 0.01
        np.save(folder / f"weights-{sources}.npy", weights / weights.sum())


def turn(python: str, side: str, folder: str, repetitions: int) -> dict[str, Any]:
    command = [python, __file__, "--megatron-python", python, "--side", side]
    command += ["--folder", folder, "--repetitions", str(repetitions)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    if done.returncode:
        raise SystemExit(f"{side}: {done.stderr[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def measure(side: str, folder: Path, repetitions: int) -> dict[str, Any]:
    begun = time.perf_counter()
    gpt_parts, blend_parts = {"megatron": megatron, "compiled": ours, "plain": plain}[side]()
    report: dict[str, Any] = {"import_seconds": time.perf_counter() - begun, "parts": {}}
    parts: list[Part] = []
    for name in MEANS:
        lengths = np.load(folder / f"{name}.npy")
        for length in SEQ_LENGTHS:
            parts += [(f"{name}-{length}/{n}", run) for n, run in gpt_parts(lengths, length)]
    for sources in SOURCES:
        weights = np.load(folder / f"weights-{sources}.npy")
        sizes = (weights * BLEND_SIZE).astype(np.int64)
        parts += [(f"blend-{sources}/{n}", run) for n, run in blend_parts(weights, sizes)]
    for name, run in parts:
        report["parts"][name] = measure_one(run, repetitions)
    report["numpy"], report["python"] = np.__version__, platform.python_version()
    return report


def measure_one(run: Callable[[], Any], repetitions: int) -> dict[str, Any]:
    cpu, wall = [], []
    digest = ""
    for repetition in range(repetitions + 1):
        before = time.perf_counter(), time.thread_time()
        value = run()
        wall.append(time.perf_counter() - before[0])
        cpu.append(time.thread_time() - before[1])
        if repetition == 0:
            digest = digest_of(value)
        del value
    return {"first_wall": wall[0], "cpu": cpu[1:], "wall": wall[1:], "digest": digest}


def digest_of(value: Any) -> str:
    arrays = value if isinstance(value, tuple) else (value,)
    return hashlib.sha256(b"".join(np.ascontiguousarray(a).tobytes() for a in arrays)).hexdigest()


def megatron() -> Cases:
    warnings.simplefilter("ignore")
    from megatron.core.datasets import gpt_dataset as gpt
    from megatron.core.datasets import helpers

    def parts(lengths: np.ndarray, length: int) -> list[Part]:
        total, indices = int(lengths.sum()), np.arange(len(lengths), dtype=np.int32)
        samples = (total - 1) // length
        documents = gpt._build_document_index(indices, 1, np.random.RandomState(SEED), False)
        sample_index = partial(
            helpers.build_sample_idx, lengths, documents, length, 1, total, True, True
        )
        return [
            ("tokens", lambda: np.int64(np.sum(lengths[indices]))),
            ("document index", lambda: gpt._build_document_index(indices, 1, seeded(), False)),
            ("sample index", sample_index),
            ("shuffle index", lambda: gpt._build_shuffle_index(samples, samples, seeded())),
        ]

    def blends(weights: np.ndarray, sizes: np.ndarray) -> list[Part]:
        return [
            ("weights", partial(peer_blend, helpers, weights, BLEND_SIZE)),
            ("exhaustive", partial(peer_exhaustive, helpers, sizes)),
        ]

    return parts, blends


def peer_blend(helpers: Any, weights: np.ndarray, size: int) -> tuple[np.ndarray, np.ndarray]:
    index, number = np.zeros(size, np.int16), np.zeros(size, np.int64)
    helpers.build_blending_indices(index, number, weights, len(weights), size, False)
    return index, number


def peer_exhaustive(helpers: Any, sizes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    index, number = np.zeros(sizes.sum(), np.int16), np.zeros(sizes.sum(), np.int64)
    helpers.build_exhaustive_blending_indices(index, number, sizes, len(sizes))
    return index, number


def plain() -> Cases:
    from megatron_lightning.data import blend, gpt_index

    blend.COMPILED_FROM = gpt_index.COMPILED_FROM = sys.maxsize
    return ours()


def ours() -> Cases:
    from megatron_lightning.data import gpt_index as index
    from megatron_lightning.data.blend import build_blend_index, build_exhaustive_index

    def parts(lengths: np.ndarray, length: int) -> list[Part]:
        total, everything = int(lengths.sum()), range(len(lengths))
        samples, plan = (total - 1) // length, index.plan_epochs(total, None, length)
        documents = index.build_document_index(everything, plan, seeded())
        return [
            ("tokens", lambda: np.int64(lengths.sum(dtype=np.int64))),
            ("document index", lambda: index.build_document_index(everything, plan, seeded())),
            (
                "sample index",
                partial(index.build_sample_index, lengths, documents, length, tokens=total),
            ),
            ("shuffle index", lambda: index.build_shuffle_index(samples, plan, seeded())),
        ]

    def blends(weights: np.ndarray, sizes: np.ndarray) -> list[Part]:
        shares, lengths = weights.tolist(), sizes.tolist()
        return [
            ("weights", lambda: tuple(build_blend_index(shares, BLEND_SIZE))),
            ("exhaustive", lambda: tuple(build_exhaustive_index(lengths))),
        ]

    return parts, blends


def seeded() -> np.random.RandomState:
    return np.random.RandomState(SEED)


def summary(turns: dict[str, list[Any]], options: argparse.Namespace) -> dict[str, Any]:
    rows = []
    for part in turns["megatron"][0]["parts"]:
        found = {side: [turn["parts"][part] for turn in done] for side, done in turns.items()}
        digests = {entry["digest"] for entries in found.values() for entry in entries}
        if len(digests) != 1:
            raise SystemExit(f"{part}: the two sides do not give the same array")
        row: dict[str, Any] = {"part": part}
        for clock, suffix in (("cpu", "ms"), ("wall", "elapsed_ms")):
            for side, entries in found.items():
                row[f"{side}_{suffix}"] = round(1e3 * median(entries, clock), 3)
        rows.append(row)
    totals: dict[str, dict[str, float]] = {}
    for row in rows:
        case = row["part"].split("/")[0]
        if not case.startswith("blend"):
            for side in turns:
                sums = totals.setdefault(case, dict.fromkeys(turns, 0.0))
                sums[side] += row[f"{side}_ms"]
    rows += [
        {"part": f"{case}/whole index"} | {f"{s}_ms": round(v, 3) for s, v in sums.items()}
        for case, sums in totals.items()
    ]
    for row in rows:
        row["ratio_compiled"] = round(row["compiled_ms"] / row["megatron_ms"], 3)
        row["ratio_plain"] = round(row["plain_ms"] / row["megatron_ms"], 3)
    import numba

    first = max(turn["parts"]["blend-2/weights"]["first_wall"] for turn in turns["compiled"])
    return {
        "date": time.strftime("%Y-%m-%d"),
        "what": "median CPU ms of building an index of 10^9 tokens, and blends of 488,281 samples",
        "hardware": f"{cpu_name()}, {os.cpu_count()} cores, one thread",
        "rounds": options.rounds,
        "repetitions_a_round": options.repetitions,
        "megatron": {
            "python": turns["megatron"][0]["python"],
            "numpy": turns["megatron"][0]["numpy"],
            "megatron_core": megatron_version(options.megatron_python),
        },
        "ours": {
            "python": platform.python_version(),
            "numpy": np.__version__,
            "numba": numba.__version__,
            "commit": commit(),
            "first_compiled_call_seconds": round(first, 3),
        },
        "equal_arrays": True,
        "rows": rows,
    }


def median(entries: list[dict[str, Any]], clock: str) -> float:
    return statistics.median(value for entry in entries for value in entry[clock])


def megatron_version(python: str) -> str:
    code = "import importlib.metadata as m; print(m.version('megatron-core'))"
    return subprocess.run([python, "-c", code], capture_output=True, text=True).stdout.strip()


def commit() -> str:
    command = ["git", "rev-parse", "--short", "HEAD"]
    return subprocess.run(command, capture_output=True, text=True).stdout.strip()


def cpu_name() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.machine()


def table(result: dict[str, Any]) -> str:
    lines = [f"{'':<28}{'Megatron ms':>12}{'compiled':>10}{'plain':>10}   ratios"]
    for row in result["rows"]:
        lines.append(
            f"{row['part']:<28}{row['megatron_ms']:>12.2f}{row['compiled_ms']:>10.2f}"
            f"{row['plain_ms']:>10.2f}   {row['ratio_compiled']:.2f} {row['ratio_plain']:.2f}"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
