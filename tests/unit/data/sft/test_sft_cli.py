"""The example file, and data of all kinds from config files."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from megatron_lightning.cli import trainer
from megatron_lightning.cli.errors import UserError
from megatron_lightning.data import SFTDataModule
from tests.harness import run_ranks_fresh
from tests.unit.cli.test_trainer import parse
from tests.unit.data.sft.test_dataset import write_parquet

ROOT = Path(__file__).resolve().parents[4]
EXAMPLE = ROOT / "examples" / "sft.yaml"
CHATS = ROOT / "examples" / "data" / "chats.jsonl"


def test_the_example_is_complete() -> None:
    options = yaml.safe_load(EXAMPLE.read_text())["data"]["init_args"]
    data = SFTDataModule(**{**options, "train": str(CHATS)})
    with pytest.warns(UserWarning, match="are no tokens of bytes"):
        data.setup("fit")
    assert data.statistics["train"].dropped_documents == 0
    assert data.statistics["train"].fill_rate > 0.9


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("train", ["a.jsonl", "b.jsonl"]),
        ("train", "a.jsonl"),
        ("train", {"path": "owner/name", "split": "train"}),
        ("valid", {"short": "a.jsonl", "long": {"path": "owner/name", "split": "test"}}),
    ],
)
def test_data_in_config_files(tmp_path: Path, key: str, value: Any) -> None:
    given = yaml.safe_load(EXAMPLE.read_text())
    given["data"]["init_args"] |= {key: value, "split": None}
    path = tmp_path / "c.yaml"
    path.write_text(yaml.safe_dump(given))
    parsed = parse(["fit", "--config", str(path)]).fit.data.init_args[key]
    assert parsed == value


def test_short_name_and_wrong_choice(tmp_path: Path) -> None:
    given = yaml.safe_load(EXAMPLE.read_text())
    given["data"]["class_path"] = "SFTDataModule"
    path = tmp_path / "c.yaml"
    path.write_text(yaml.safe_dump(given))
    parsed = parse(["fit", "--config", str(path), "--data.packing", "in_order"]).fit.data
    assert parsed.class_path.endswith(".SFTDataModule")
    assert parsed.init_args.packing == "in_order"
    with pytest.raises(UserError, match="packing"):
        parse(["fit", "--config", str(path), "--data.packing", "best"])


def fit(rank: int, world_size: int, arguments: list[str]) -> None:
    trainer.main(["fit", *arguments])


@pytest.mark.slow
def test_the_example_runs(tmp_path: Path) -> None:
    write_parquet(tmp_path / "own")
    for name, options in {
        "example": ["--data.train", str(CHATS)],
        "own": ["--data.train", str(tmp_path / "own.parquet"), "--data.chat_template", "null"],
    }.items():
        folder = tmp_path / name
        arguments = ["--config", str(EXAMPLE), *options, "--trainer.devices", "2"]
        arguments += ["--trainer.logger.init_args.save_dir", str(folder)]
        arguments += ["--trainer.default_root_dir", str(folder), "--trainer.max_epochs", "2"]
        arguments += ["--data.split", "100"] if name == "own" else []
        run_ranks_fresh(fit, 2, arguments, timeout=120)
        metrics = (folder / "logs" / "version_0" / "metrics.csv").read_text()
        assert "train_loss" in metrics
