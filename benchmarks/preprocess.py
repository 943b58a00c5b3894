"""How fast is preprocessing, beside the plain design of Megatron-LM's `tools/preprocess_data.py`?

The peer is written here: a `multiprocessing.Pool` whose processes take lines (in bundles of 32),
parse a line, call `tokenizer.encode` on its text and send lists of integers back; the parent makes
arrays of them and writes. Both sides have the same input, tokenizer and number of processes, and
must write the same bytes. They run in turns, in this process, the corpus' digests and data card
included on our side; loading the tokenizer counts on both.

Input is what the Python files of this installation have: docstrings (prose), and source files cut
at blank lines (code), each text once; the tokenizer is a byte-level BPE of 32,000 ids trained on a
part of it. A word table gains from repeated words, so no text is repeated to make it longer.

    python benchmarks/preprocess.py --workers 2 --rounds 5 --out results.json
"""

import argparse
import ast
import json
import multiprocessing
import os
import platform
import random
import statistics
import subprocess
import sysconfig
import tempfile
import time
import warnings
from array import array
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers

from megatron_lightning.data import (
    IndexedDataset,
    PreprocessOptions,
    load_tokenizer,
    open_files,
    preprocess,
    train_byte_bpe,
)

VOCAB_SIZE = 32_000
SHORTEST, LONGEST = 200, 8_000  # characters of a document


class LineEncoder:
    """What a process of the plain design does."""

    tokenizer: tokenizers.Tokenizer

    def __init__(self, file: str) -> None:
        self.file = file

    def start(self) -> None:
        LineEncoder.tokenizer = tokenizers.Tokenizer.from_file(self.file)
        LineEncoder.eod = LineEncoder.tokenizer.token_to_id("<|endoftext|>")

    def encode(self, line: str) -> tuple[list[int], list[int], int]:
        text = json.loads(line)["text"]
        ids, lengths = [], []
        for sentence in text if isinstance(text, list) else [text]:
            found = LineEncoder.tokenizer.encode(sentence, add_special_tokens=False).ids
            if found:
                ids.extend(found)
                lengths.append(len(found))
        if ids:
            ids.append(LineEncoder.eod)
            lengths[-1] += 1
        return ids, lengths, len(line)


def plain(lines: Path, tokenizer: Path, prefix: Path, workers: int) -> None:
    """The plain design, writing `prefix.bin` and the arrays of an index."""
    encoder = LineEncoder(str(tokenizer))
    lengths, boundaries = array("i"), array("q", [0])
    with (
        lines.open(encoding="utf-8") as source,
        Path(f"{prefix}.bin").open("wb") as out,
        multiprocessing.get_context("fork").Pool(workers, encoder.start) as pool,
    ):
        for ids, sizes, _ in pool.imap(encoder.encode, source, 32):
            out.write(np.array(ids, np.uint16).tobytes(order="C"))
            lengths.extend(sizes)
            boundaries.append(len(lengths))
    np.savez(f"{prefix}.npz", lengths=np.array(lengths), boundaries=np.array(boundaries))


def ours(lines: Path, tokenizer: Path, prefix: Path, workers: int) -> None:
    options = PreprocessOptions(append_eod=True, workers=workers)
    preprocess(open_files([lines], "jsonl", options.fields), prefix, tokenizer, options)


def same_output(reference: Path, prefix: Path) -> bool:
    """Whether both sides wrote the same corpus."""
    index, data = np.load(f"{reference}.npz"), IndexedDataset(prefix)
    return (
        Path(f"{reference}.bin").read_bytes() == Path(f"{prefix}.bin").read_bytes()
        and np.array_equal(index["lengths"], data.sequence_lengths)
        and np.array_equal(index["boundaries"], data.document_indices)
    )


def python_files() -> list[Path]:
    folders = [Path(sysconfig.get_path(name)) for name in ("stdlib", "purelib")]
    found = {path: None for folder in folders for path in sorted(folder.rglob("*.py"))}
    return [path for path in found if "tests" not in path.parts]


def prose(files: list[Path]) -> Iterator[str]:
    """Docstrings."""
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    for path in files:
        try:
            tree = ast.parse(path.read_text(encoding="utf-8"))
        except (SyntaxError, ValueError, RecursionError):
            continue
        for node in ast.walk(tree):
            if isinstance(node, kinds) and (text := ast.get_docstring(node)):
                yield text


def code(files: list[Path]) -> Iterator[str]:
    """Source files, cut at blank lines."""
    for path in files:
        try:
            blocks = path.read_text(encoding="utf-8").split("\n\n")
        except ValueError:
            continue
        text = ""
        for block in blocks:
            if len(text) + len(block) > LONGEST // 2:
                yield text
                text = ""
            text += f"{block}\n\n"
        yield text


def write_input(texts: Iterator[str], target: Path, limit: int) -> dict[str, int]:
    """Writes each text once, in random order, about `limit` bytes; returns counts."""
    known: set[str] = set()
    characters = 0
    for text in texts:
        if SHORTEST <= len(text) <= LONGEST and text not in known:
            known.add(text)
            characters += len(text)
            if characters > limit:
                break
    chosen = sorted(known)
    random.Random(1).shuffle(chosen)
    documents = 0
    with target.open("w", encoding="utf-8") as out:
        for text in chosen:
            try:
                out.write(json.dumps({"text": text}, ensure_ascii=False) + "\n")
            except UnicodeEncodeError:
                continue
            documents += 1
    return {"documents": documents, "bytes": target.stat().st_size}


def measure(side: Callable[[Path, Path, Path, int], None], *arguments: Any) -> tuple[float, float]:
    """Seconds, and processor seconds of this process and its children."""
    before, start = os.times(), time.perf_counter()
    side(*arguments)
    seconds, after = time.perf_counter() - start, os.times()
    return seconds, sum(after[:4]) - sum(before[:4])


def compare(name: str, lines: Path, tokenizer: Path, args: argparse.Namespace) -> dict[str, Any]:
    folder = lines.parent
    found: dict[str, list[tuple[float, float]]] = {"plain": [], "ours": []}
    for turn in range(args.rounds):
        sides = [("plain", plain), ("ours", ours)]
        for key, side in sides if turn % 2 == 0 else reversed(sides):
            found[key].append(measure(side, lines, tokenizer, folder / key, args.workers))
        print(name, turn, {key: round(entries[-1][0], 2) for key, entries in found.items()})
    assert same_output(folder / "plain", folder / "ours")
    return {
        key: {
            "seconds": [round(seconds, 3) for seconds, _ in entries],
            "median_seconds": round(statistics.median(s for s, _ in entries), 3),
            "median_processor_seconds": round(statistics.median(p for _, p in entries), 3),
        }
        for key, entries in found.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--limit-mb", type=float, default=12.0)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    warnings.simplefilter("ignore", SyntaxWarning)
    files = python_files()
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        inputs: dict[str, dict[str, int]] = {}
        for kind, texts in (("prose", prose(files)), ("code", code(files))):
            target = folder / f"{kind}.jsonl"
            inputs[kind] = write_input(texts, target, int(args.limit_mb * 1e6))
        sample = [
            json.loads(line)["text"]
            for kind in inputs
            for line in (folder / f"{kind}.jsonl").open(encoding="utf-8").readlines()[:1500]
        ]
        train_byte_bpe(sample, VOCAB_SIZE, folder / "tokenizer.json")
        vocabulary = load_tokenizer(folder / "tokenizer.json").vocab_size
        for kind, counts in inputs.items():
            sides = compare(kind, folder / f"{kind}.jsonl", folder / "tokenizer.json", args)
            for side in sides.values():
                rate = counts["documents"] / side["median_seconds"]
                side["documents_per_second"] = round(rate)
            ratio = sides["plain"]["median_seconds"] / sides["ours"]["median_seconds"]
            results[kind] = counts | sides | {"times_as_fast": round(ratio, 2)}
            print(kind, json.dumps(results[kind]))
    report = {
        "workers": args.workers,
        "rounds": args.rounds,
        "vocab_size": vocabulary,
        "results": results,
        "cores": os.cpu_count(),
        "load_average": os.getloadavg(),  # more than the cores: other work ran meanwhile
        "processor": platform.processor() or platform.machine(),
        "python": platform.python_version(),
        "tokenizers": tokenizers.__version__,
        "numpy": np.__version__,
        "commit": subprocess.run(
            ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False
        ).stdout.strip(),
    }
    if args.out:
        args.out.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
