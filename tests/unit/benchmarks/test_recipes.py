"""`docs/speed.md`: the shapes are those of `shapes.py`, and the config files give what the rows of
`rows.py` ran with, by the command line's own parser.
"""

import argparse
import dataclasses
import importlib
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml
from jsonargparse import ArgumentParser, Namespace

from megatron_lightning import MegatronStrategy
from megatron_lightning.cli.trainer import TrainerCLI
from megatron_lightning.config.parallel import ParallelConfig

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs" / "speed.md").read_text()
BLOCKS = re.findall(r"^```yaml\n# rows (.*?)\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
"""(names of rows, YAML) of each block under "What to set"."""

NETWORK_AND_DATA = """
model: {config: {vocab_size: 256, num_layers: 8, hidden_size: 64, num_attention_heads: 4}}
data: {paths: mock, mock_data: true, seq_length: 64, micro_batch_size: 1, global_batch_size: 64}
"""


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Imports a script of benchmarks/ by name."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return lambda name: importlib.import_module(name)


def asked_for(
    train_step: ModuleType, words: list[str], monkeypatch: pytest.MonkeyPatch
) -> argparse.Namespace:
    """The options of `train_step.py` for a command line."""
    seen: list[argparse.Namespace] = []
    with monkeypatch.context() as patch:
        patch.setattr(train_step, "measure", lambda name, args: seen.append(args) or {})
        patch.setattr(sys, "argv", ["train_step.py", *words])
        train_step.main()
    return seen[0]


def parsed(text: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Namespace:
    """What `megatron-lightning fit --config` makes of a block, with a network and data before."""
    base, block = folder / "base.yaml", folder / "block.yaml"
    base.write_text(NETWORK_AND_DATA)
    block.write_text(text)
    found: list[Namespace] = []
    with monkeypatch.context() as patch:
        patch.setattr(TrainerCLI, "instantiate_classes", lambda cli: found.append(cli.config.fit))
        patch.setattr(TrainerCLI, "after_instantiate_classes", lambda cli: None)
        patch.setattr(TrainerCLI, "_run_subcommand", lambda cli, name: None)
        TrainerCLI(["fit", "--config", str(base), "--config", str(block)])
    return found[0]


def layout_of(strategy: Namespace) -> ParallelConfig:
    """The layout of a parsed strategy."""
    assert strategy.class_path == "megatron_lightning.MegatronStrategy"
    parser = ArgumentParser(exit_on_error=False)
    parser.add_class_arguments(MegatronStrategy, "strategy")
    made = parser.instantiate(parser.parse_object({"strategy": strategy.init_args}))
    return made.strategy.config


def comparable(config: ParallelConfig) -> dict[str, Any]:
    """Fields, sequences as lists."""

    def plain(value: Any) -> Any:
        if isinstance(value, dict):
            return {name: plain(inner) for name, inner in value.items()}
        return list(value) if isinstance(value, tuple | list) else value

    return plain(dataclasses.asdict(config))


@pytest.mark.parametrize(("names", "text"), BLOCKS, ids=[names for names, _ in BLOCKS])
def test_a_config_file_is_the_layout_of_its_rows(
    names: str, text: str, module: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows, train_step, options = (module(name) for name in ("rows", "train_step", "step_options"))
    config = parsed(text, tmp_path, monkeypatch)
    given = yaml.safe_load(text).get("data", {})
    for name in names.split(", "):
        row = rows.ROWS[name]
        words = [*row.ours.split(), "--compile", "--devices", str(row.gpus)]
        args = asked_for(train_step, words, monkeypatch)
        assert comparable(layout_of(config.trainer.strategy)) == comparable(options.layout_of(args))
        assert config.trainer.devices == row.gpus
        assert config.trainer.precision == "bf16-mixed"
        assert config.trainer.gradient_clip_val == 1.0
        assert given.get("reset_attention_mask", False) == args.packed
        shape = options.shape_of(args.shapes[0], args)
        ranks = options.ranks_of(args)[1]
        ran = {
            "seq_length": shape["seq"],
            "micro_batch_size": shape["micro"],
            "global_batch_size": shape["micro"] * shape["accumulate"] * ranks,
            "reset_attention_mask": args.packed,
        }
        assert given.items() <= ran.items()


def test_every_row_has_its_config_file(module: Any) -> None:
    shown = {name for names, _ in BLOCKS for name in names.split(", ")}
    assert set(module("rows").ROWS) - shown == {"c-forced"}  # (c) with another router


def test_the_table_of_shapes_is_that_of_the_benchmarks(module: Any) -> None:
    shapes, options = module("shapes").SHAPES, module("step_options")
    section = PAGE.partition("## The shapes")[2].partition("\n## ")[0]
    lines = [line for line in section.splitlines() if line.startswith("|")][2:]
    table = {
        title.strip(): [cell.strip().replace(",", "") for cell in cells]
        for title, *cells in (re.split(r"\|", line)[1:-1] for line in lines)
    }
    for column, name in enumerate("abc"):
        shape = shapes[name]
        network = options.network_of(shape, argparse.Namespace(forced=False, set=[]))
        experts = shape.get("experts")

        def numbers(title: str, column: int = column) -> list[float]:
            return [float(number) for number in re.findall(r"[\d.]+", table[title][column])]

        assert numbers("parameters, billions") == [round(network.num_parameters() / 1e9, 2)]
        assert numbers("layers") == [shape["layers"]]
        width = experts.ffn_hidden_size if experts else shape["ffn"]
        assert numbers("hidden size, FFN size") == [shape["hidden"], width]
        heads = [shape["heads"], shape["groups"], network.head_dim]
        assert numbers("query heads, key/value heads, head size") == heads
        counts = [experts.num_experts, experts.router_topk] if experts else []
        assert numbers("experts, of which a token passes") == counts
        assert numbers("vocabulary") == [shape["vocab"]]
        assert numbers("tokens a sample") == [shape["seq"]]
        batch = [shape["micro"], shape["accumulate"]]
        assert numbers("samples a micro-batch, micro-batches a step and rank") == batch
