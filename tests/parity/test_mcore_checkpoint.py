"""`torch_dist` checkpoints that Megatron-Core has written, read by `convert`: the same weights, and
the recorded logits and losses.
"""

import importlib
import json
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from safetensors.torch import load_file

from megatron_lightning.checkpoint import CheckpointError, list_tensors, load_metadata
from megatron_lightning.checkpoint.convert import Conversion, convert, to_theirs
from megatron_lightning.checkpoint.convert.lazy import LazyTensor
from megatron_lightning.checkpoint.convert.megatron_core import gpt_rules, read_weights
from megatron_lightning.cli.main import main
from megatron_lightning.config.training import OptimizerConfig, SchedulerConfig
from megatron_lightning.models import GPTModel
from megatron_lightning.strategies import MegatronStrategy
from tests import tolerances
from tests.harness import run_ranks_fresh
from tests.layout_runs import Recorder, Run
from tests.parity.mcore_cases import FOLDER, NAMES, load_case
from tests.parity.test_mcore_strategy import RecordedBatches

convert_module = importlib.import_module("megatron_lightning.checkpoint.convert.convert")


def source(name: str) -> Path:
    return FOLDER / name / "torch_dist"


def converted(name: str, folder: Path) -> Path:
    config = load_case(name).config
    shapes = GPTModel(config).global_shapes()
    how = Conversion(allow_pickle=True, hyper_parameters={"config": config}, shapes=shapes)
    convert(source(name), folder / name, how=how)
    return folder / name


@pytest.mark.parametrize("name", NAMES)
def test_weights_logits_and_losses(name: str, tmp_path: Path) -> None:
    case = load_case(name)
    model = GPTModel.load_from_checkpoint(converted(name, tmp_path))
    state = model.built_network().state_dict()
    assert case.state.keys() <= state.keys()
    for key, value in case.state.items():
        assert torch.equal(state[key][tuple(slice(0, size) for size in value.shape)], value), key
    with torch.no_grad():
        logits = model(case.tokens[0, 0])
        losses = model(case.tokens[0, 0], labels=case.labels[0, 0])
    assert (logits - case.logits).abs().max() < 1e-4
    assert (losses - case.token_losses).abs().max() < 1e-4
    assert load_metadata(tmp_path / name)["converted_from"] == str(source(name))


@pytest.mark.parametrize("name", NAMES)
def test_the_table_reads_both_ways(name: str) -> None:
    """Our weights renamed back are what Megatron-Core recorded, in its shapes."""
    config = load_case(name).config
    found = read_weights(source(name), config)
    assert found.left == ()
    back = to_theirs(gpt_rules(config), found.tensors)
    assert back.left == ()
    recorded = load_file(FOLDER / name / "initial.safetensors")
    assert back.tensors.keys() == recorded.keys()
    for key, value in recorded.items():
        assert torch.equal(back.tensors[key].whole(), value), key


def train(rank: int, world_size: int, name: str, checkpoint: str, layout: dict[str, Any]) -> Any:
    """The recorded run, from the converted checkpoint."""
    case = load_case(name)
    recorded = case.optimizer
    model = GPTModel(
        case.config,
        OptimizerConfig(lr=recorded["lr"], weight_decay=recorded["weight_decay"]),
        SchedulerConfig(
            lr_warmup_steps=recorded["warmup"],
            lr_decay_steps=recorded["decay"],
            min_lr=recorded["min_lr"],
        ),
        loss_normalization="micro_batch",
    )
    model.load_weights(checkpoint)
    recorder = Recorder(Run(keep_gradients=()))
    trainer = L.Trainer(
        strategy=MegatronStrategy(**layout, micro_batch_size=case.tokens.shape[2]),
        accelerator="cpu",
        devices=world_size,
        max_steps=len(case.tokens),
        gradient_clip_val=recorded["clip_grad"],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[recorder],
    )
    trainer.fit(model, RecordedBatches(case))
    return recorder.losses


def test_recorded_training_goes_on_from_it(tmp_path: Path) -> None:
    name = "gpt_rope_swiglu"
    folder = str(converted(name, tmp_path))
    layout = dict(tensor_parallel_size=2)
    for losses in run_ranks_fresh(train, 2, name, folder, layout):
        wanted = load_case(name).expected["loss"]
        assert losses == pytest.approx(wanted, rel=tolerances.RECORDED)


# ---------------------------------------------------------------------- the command


def run(arguments: list[str]) -> int:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert isinstance(ended.value.code, int)
    return ended.value.code


def test_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    name = "gpt_absolute"
    config, folder, target = tmp_path / "config.json", str(source(name)), str(tmp_path / "new")
    config.write_text(json.dumps(load_case(name).config.to_dict()))
    assert run(["convert", folder, target]) == 2
    message = capsys.readouterr().err
    assert "--allow-pickle" in message
    assert "give the model's config" in message
    assert "Traceback" not in message
    assert run(["convert", folder, target, "--allow-pickle", "--config", str(config)]) == 0
    assert f"{target}: 28 tensors of weights, 0 others" in capsys.readouterr().out
    assert run(["inspect", target, "--verify"]) == 0
    assert run(["convert", folder, f"{target}2", "--allow-pickle", "--like", target]) == 0
    capsys.readouterr()
    assert run(["convert", folder, f"{target}3", "--allow-pickle", "--preset", "llama3-8b"]) == 2
    assert "does not fit the model" in capsys.readouterr().err
    assert run(["convert", folder, f"{target}3", "--like", target, "--preset", "x"]) == 2
    assert "give one of them" in capsys.readouterr().err


def test_float32_weights_are_the_masters(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The distributed optimizer's masters (its form `fully_reshardable`) go by the same rules."""

    def with_masters(folder: Path) -> Any:
        found = read(folder)
        weights = {
            name: LazyTensor.held(tensor.whole().bfloat16())
            for name, tensor in found.tensors.items()
        }
        masters = {f"optimizer.state.param.{name}": t for name, t in found.tensors.items()}
        moments = {f"optimizer.state.exp_avg.{name}": t for name, t in found.tensors.items()}
        return type(found)({**weights, **masters, **moments}, found.values, found.folder)

    read = convert_module.read_dcp
    monkeypatch.setattr(convert_module, "read_dcp", with_masters)
    case = load_case("gpt_rope_swiglu")
    how = Conversion(
        allow_pickle=True, hyper_parameters={"config": case.config}, dtype=torch.float32
    )
    convert(source("gpt_rope_swiglu"), tmp_path / "new", how=how)
    state = GPTModel.load_from_checkpoint(tmp_path / "new").built_network().state_dict()
    for key, value in case.state.items():
        assert torch.equal(state[key][tuple(slice(0, size) for size in value.shape)], value), key
    kinds = {name.partition(".")[0] for name in list_tensors(tmp_path / "new")}
    assert kinds == {"model", "optimizer"}


def test_a_name_without_a_rule_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def with_another(folder: Path) -> Any:
        found = read(folder)
        extra = {"decoder.layers.0.mlp.router.weight": LazyTensor.held(torch.ones(2))}
        return type(found)({**found.tensors, **extra}, found.values, found.folder)

    read = convert_module.read_dcp
    monkeypatch.setattr(convert_module, "read_dcp", with_another)
    with pytest.raises(CheckpointError, match=r"no rule for decoder.layers.0.mlp.router.weight"):
        converted("gpt_absolute", tmp_path)
