"""Run the tests that need GPUs on all GPUs of this machine at once, and write down what each gave.

    python tests/gpu/run_all.py --out results.json
    python tests/gpu/run_all.py --out results.json --seconds 500 -- -k "not verify"

First those that one GPU is enough for run side by side, some on each GPU; those that were skipped
for want of GPUs then see all of them, two processes at a time; those marked `alone` (they measure
time, or wait for each other on the device) come last, one after the other. What follows `--` goes
to pytest. `--earlier` takes a file of an earlier run of the same commit: what it has as passed, or
as skipped for want of more GPUs than there are now, does not run again and stays in the results,
and what took long then begins first. With `--seconds` nothing begins later than that. The exit
status is 1 where a test failed, gave nothing, or was left out.
"""

from __future__ import annotations

import argparse
import json
import os
import queue
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

ROOT = Path(__file__).resolve().parents[2]
WANTS_MORE = re.compile(r"needs (two|\d+) (CUDA devices|GPUs)")
"""Reasons of tests that are to run again with more GPUs, where there are as many."""
TEST_SECONDS = 300.0
"""A test's limit, which pytest holds; a process has that of its tests, and a minute to begin."""
PYTEST = (sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m")


@dataclass(frozen=True)
class Outcome:
    """What one test gave."""

    status: str
    """passed, failed, skipped, or nothing: its process ended before."""
    seconds: float
    message: str = ""


@dataclass
class Results:
    """All outcomes so far, in a file."""

    out: Path | None
    head: Mapping[str, Any]
    outcomes: dict[str, Outcome] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def add(self, found: Mapping[str, Outcome]) -> None:
        """Keep, say and write outcomes."""
        with self._lock:
            self.outcomes.update(found)
            for test, outcome in found.items():
                if outcome.status in ("failed", "nothing"):
                    print(f"{outcome.status}: {test}: {outcome.message}", flush=True)
            if self.out is not None:
                tests = {test: asdict(each) for test, each in sorted(self.outcomes.items())}
                record = {**self.head, "counts": self.counts(), "tests": tests}
                self.out.write_text(json.dumps(record, indent=1) + "\n")

    def counts(self) -> dict[str, int]:
        """Tests by status."""
        return dict(Counter(outcome.status for outcome in self.outcomes.values()))

    def wanting(self, number: int) -> list[str]:
        """Tests that were skipped for want of GPUs, and run with `number`."""
        return [test for test, each in self.outcomes.items() if 0 < wanted(each) <= number]


def wanted(outcome: Outcome) -> int:
    """GPUs that a test was skipped for want of; 0 where there was another reason, or it ran."""
    found = WANTS_MORE.search(outcome.message) if outcome.status == "skipped" else None
    if found is None:
        return 0
    return 2 if found[1] == "two" else int(found[1])


def collect(marker: str, extra: Sequence[str]) -> list[str]:
    """Node ids of tests with a marker, in the files that name the marker `gpu`."""
    files = [str(p.relative_to(ROOT)) for p in sorted((ROOT / "tests").rglob("test_*.py"))]
    named = [name for name in files if "mark.gpu" in (ROOT / name).read_text()]
    command = [*PYTEST, marker, "--collect-only", *named, *extra]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode not in (0, 5):  # 5: there is none
        raise SystemExit(f"collecting failed:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    return [line for line in done.stdout.splitlines() if "::" in line]


def units(tests: Iterable[str], size: int, before: Mapping[str, float]) -> list[list[str]]:
    """Tests of one file in groups of at most `size`, the longest first by the seconds `before`."""
    files: dict[str, list[str]] = {}
    for test in tests:
        files.setdefault(test.split("::")[0], []).append(test)
    groups = [group[i : i + size] for group in files.values() for i in range(0, len(group), size)]
    return sorted(groups, key=lambda group: -sum(before.get(test, 10.0) for test in group))


def run_unit(tests: Sequence[str], gpus: str, timeout: float) -> dict[str, Outcome]:
    """Outcomes of some tests in a process that sees `gpus`."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        command = [*PYTEST, "gpu", f"--junitxml={report}", "-o", "junit_family=xunit1", *tests]
        environment = os.environ | {"CUDA_VISIBLE_DEVICES": gpus}
        with subprocess.Popen(
            command,
            cwd=ROOT,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        ) as process:
            try:
                said, _ = process.communicate(timeout=timeout)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, 9)
                said, _ = process.communicate()
                said += f"\nno end within {timeout:.0f} s"
        found = dict(read(report)) if report.exists() else {}
    last = (said.strip().splitlines() or ["nothing said"])[-1]
    return {test: found.get(test, Outcome("nothing", 0.0, last[:200])) for test in tests}


def read(report: Path) -> Iterator[tuple[str, Outcome]]:
    """Node ids and outcomes of a report in JUnit's format."""
    for case in ElementTree.parse(report).iter("testcase"):
        test = f"{case.get('classname', '').replace('.', '/')}.py::{case.get('name')}"
        status, message = "passed", ""
        for name in ("failure", "error", "skipped"):
            if (part := case.find(name)) is not None:
                status = "skipped" if name == "skipped" else "failed"
                message = (part.get("message") or "").strip().splitlines()[0][:200]
        yield test, Outcome(status, round(float(case.get("time", 0)), 1), message)


def run_phase(
    groups: Sequence[Sequence[str]], lanes: Sequence[str], results: Results, ends: float
) -> int:
    """Run groups in lanes, each of which sees some GPUs; how many tests were left out."""
    waiting: queue.SimpleQueue[Sequence[str]] = queue.SimpleQueue()
    for group in groups:
        waiting.put(group)

    def work(gpus: str) -> None:
        while time.monotonic() < ends:
            try:
                group = waiting.get_nowait()
            except queue.Empty:
                return
            limit = TEST_SECONDS * len(group) + 60
            results.add(run_unit(group, gpus, min(limit, ends + 60 - time.monotonic())))

    threads = [threading.Thread(target=work, args=(gpus,)) for gpus in lanes]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return sum(len(waiting.get()) for _ in range(waiting.qsize()))


def head() -> dict[str, Any]:
    """What tests run on."""
    import torch

    git = ["git", "rev-parse", "--short", "HEAD"]
    commit = subprocess.run(git, cwd=ROOT, capture_output=True, text=True, check=False).stdout
    number = torch.cuda.device_count()
    return {
        "date": time.strftime("%Y-%m-%d"),
        "commit": commit.strip(),
        "gpus": [torch.cuda.get_device_name(index) for index in range(number)],
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
    }


def earlier(path: Path, commit: str) -> dict[str, Outcome]:
    """Outcomes of a file; SystemExit where it is one of another commit."""
    record = json.loads(path.read_text())
    if record["commit"] != commit:
        raise SystemExit(
            f"--earlier {path}: it has tests of commit {record['commit']}, and this is {commit};"
            " leave the option out"
        )
    return {test: Outcome(**each) for test, each in record["tests"].items()}


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, help="JSON file for what each test gave")
    parser.add_argument("--earlier", type=Path, help="such a file: what passed is left out")
    parser.add_argument("--seconds", type=float, default=1e6, help="nothing begins after that")
    parser.add_argument("--lanes", type=int, default=3, help="processes at a time on each GPU")
    parser.add_argument("--size", type=int, default=6, help="tests of one process at most")
    parser.add_argument("pytest", nargs="*", help="options of pytest, behind --")
    args = parser.parse_args()
    ends = time.monotonic() + args.seconds
    results = Results(args.out, head())
    number = max(1, len(results.head["gpus"]))
    known = earlier(args.earlier, results.head["commit"]) if args.earlier else {}
    before = {test: each.seconds for test, each in known.items()}
    done = {
        test: each
        for test, each in known.items()
        if each.status == "passed" or wanted(each) > number
    }
    results.outcomes.update(done)
    beside, alone = (
        [test for test in collect(marker, args.pytest) if test not in done]
        for marker in ("gpu and not alone", "gpu and alone")
    )
    every = ",".join(map(str, range(number)))
    one = [str(index) for _ in range(args.lanes) for index in range(number)]
    left = run_phase(units(beside, args.size, before), one, results, ends)
    more = results.wanting(number) if number > 1 else []
    left += run_phase(units(more, args.size, before), [every] * 2, results, ends)
    left += run_phase(units(alone, args.size, before), [every], results, ends)
    print(f"{results.counts()}, {left} left out")
    sys.exit(1 if left or {"failed", "nothing"} & set(results.counts()) else 0)


if __name__ == "__main__":
    main()
