"""Memory does not grow with the input."""

import json
import random
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_lightning.data import train_byte_bpe
from megatron_lightning.data.sample_text import python_help_texts

SCRIPT = """
import resource, sys
from megatron_lightning.data import PreprocessOptions, open_files, preprocess
source, prefix, tokenizer = sys.argv[1:]
options = PreprocessOptions(workers=2, append_eod=True)
preprocess(open_files([source], "auto", ["text"]), prefix, tokenizer, options)
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, "own")
print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss, "largest worker")
"""


@pytest.mark.slow
def test_peak_memory_of_one_and_eight_times_the_input(tmp_path: Path) -> None:
    train_byte_bpe(python_help_texts()[:20], 2000, tmp_path / "tokenizer.json")
    words = " ".join(python_help_texts()).split()
    chance = random.Random(5)
    peaks = {}
    for times in (1, 8):
        source = tmp_path / f"in{times}.jsonl"
        with source.open("w") as out:
            for _ in range(2500 * times):  # 5 MB, 40 MB
                text = " ".join(chance.choices(words, k=300))
                out.write(json.dumps({"text": text}) + "\n")
        done = subprocess.run(
            [sys.executable, "-c", SCRIPT, source, tmp_path / "out", tmp_path / "tokenizer.json"],
            capture_output=True,
            text=True,
            check=True,
        )
        peaks[times] = [int(line.split()[0]) for line in done.stdout.splitlines()]
    for one, eight in zip(peaks[1], peaks[8], strict=True):
        assert eight < one + 24 * 1024  # KiB; the input grew by 35 MB, the text in memory by more
