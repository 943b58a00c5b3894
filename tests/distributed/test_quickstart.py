"""The quickstart as a user starts it, and its config file."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def run(folder: Path, *arguments: str, module: str = "megatron_lightning.cli.main") -> str:
    """Run a command in `folder`; its output. The ranks are not limited to one thread by us."""
    done = subprocess.run(
        [sys.executable, "-m", module, *arguments],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-6000:]
    return done.stdout


@pytest.mark.slow
def test_quickstart(tmp_path: Path) -> None:
    shown = run(
        tmp_path,
        "--steps",
        "20",
        "--devices",
        "4",
        "--accelerator",
        "cpu",
        module="megatron_lightning.cli.quickstart",
    )
    folder = tmp_path / "runs" / "quickstart"
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["validation_loss_first"] > 6.9  # ln 1024 = 6.93
    assert summary["validation_loss_last"] < summary["validation_loss_first"] - 0.5
    before, after = (summary[f"validation_loss_{when}_resume"] for when in ("before", "after"))
    assert after == pytest.approx(before, abs=1e-4)
    assert summary["layouts"] == {
        "first": {"tensor": 2, "pipeline": 2, "data": 1},
        "resumed": {"tensor": 1, "pipeline": 1, "data": 2},
    }
    assert (tmp_path / summary["checkpoint"] / "manifest.json").is_file()
    assert summary["prompt"]
    assert summary["continuation"]
    parts = {"data", "train", "validate", "resume", "generate", "plot", "total"}
    assert summary["seconds"].keys() == parts
    assert (folder / "loss.png").stat().st_size > 20_000
    assert "step 14/14  validation loss" in shown
    assert "step 20/20  validation loss" in shown
    assert shown.count("[1/6]") == 1  # nothing that was printed before a fork comes twice
    assert len(shown[shown.index("====") :].splitlines()) < 60  # one page
    recorded = [json.loads(line) for line in (folder / "losses-resumed.jsonl").open()]
    assert [entry["step"] for entry in recorded if "train_loss" in entry] == [
        15,
        16,
        17,
        18,
        19,
        20,
    ]


@pytest.mark.slow
def test_example_file(tmp_path: Path) -> None:
    run(tmp_path, "quickstart", "--prepare-only")
    config = str(ROOT / "examples" / "quickstart.yaml")
    options = ["--trainer.max_steps", "4", "--trainer.val_check_interval", "2"]
    run(tmp_path, "fit", "--config", config, *options)
    folder = tmp_path / "runs" / "quickstart-yaml"
    checkpoint = folder / "checkpoints" / "last.ckpt"
    assert (checkpoint / "manifest.json").is_file()
    assert (folder / "logs" / "version_0" / "config.yaml").is_file()
    losses = (folder / "logs" / "version_0" / "metrics.csv").read_text()
    assert "train_loss" in losses.splitlines()[0]
    shown = run(
        tmp_path,
        *("validate", "--config", config, "--ckpt_path", str(checkpoint)),
        *("--trainer.devices", "2", "--trainer.strategy.pipeline_parallel_size", "1"),
    )
    assert "val_loss" in shown
    # More samples than one pass over the corpus has: the order must not be another one.
    shown = run(
        tmp_path,
        *("fit", "--config", config, "--ckpt_path", str(checkpoint)),
        *("--trainer.max_steps", "160", "--trainer.limit_train_batches", "6"),
        *("--trainer.max_epochs", "1", "--trainer.limit_val_batches", "0"),
        *("--trainer.devices", "2", "--trainer.strategy.pipeline_parallel_size", "1"),
    )
    assert "order of the training samples" not in shown
