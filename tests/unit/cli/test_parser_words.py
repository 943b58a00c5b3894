"""Wrong options and files of `fit`: one message with path as typed, value and remedy."""

import os
import re
from argparse import Namespace
from pathlib import Path

import pytest
import torch
import yaml

from megatron_lightning import MegatronStrategy
from megatron_lightning.cli import convert, plan, trainer, verify
from megatron_lightning.cli.errors import UserError
from megatron_lightning.cli.given import Given, class_named
from megatron_lightning.cli.parser_words import explain
from megatron_lightning.config.names import ELSEWHERE, arguments_of


@pytest.fixture(scope="module")
def fit_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A config file on mock data; nothing of it is run here."""
    path = tmp_path_factory.mktemp("words") / "fit.yaml"
    sizes = dict(vocab_size=300, num_layers=2, hidden_size=32, num_attention_heads=4)
    content = {
        "trainer": dict(accelerator="cpu", devices=1, max_steps=2, logger=False),
        "model": {"config": sizes},
        "data": dict(
            paths="mock", mock_data=True, seq_length=16, micro_batch_size=2, global_batch_size=4
        ),
    }
    path.write_text(yaml.safe_dump(content))
    return path


def refusal(*arguments: str | Path) -> str:
    with pytest.raises(UserError) as error:
        trainer.main([str(argument) for argument in arguments])
    return str(error.value)


@pytest.mark.parametrize(
    ("option", "value", "told"),
    [
        ("model.config.num_layer", "4", "do you mean --model.config.num_layers?"),
        ("model.config.moe.num_expert", "4", "do you mean --model.config.moe.num_experts?"),
        pytest.param(
            "model.optimiser.lr", "4", "do you mean --model.optimizer.lr?", marks=pytest.mark.slow
        ),
        pytest.param(
            "model.vocab_size",
            "4",
            "do you mean --model.config.vocab_size?",
            marks=pytest.mark.slow,
        ),
        (
            "trainer.strategy.tensor_parallel",
            "2",
            "do you mean --trainer.strategy.tensor_parallel_size?",
        ),
        (
            "trainer.strategy.tensor_model_parallel_size",
            "2",
            "do you mean --trainer.strategy.tensor_parallel_size?",
        ),
        (
            "trainer.strategy.virtual_pipeline_model_parallel_size",
            "2",
            "do you mean --trainer.strategy.pipeline.virtual_pipeline_size?",
        ),
        pytest.param(
            "trainer.max_step", "3", "do you mean --trainer.max_steps?", marks=pytest.mark.slow
        ),
        ("trainr.max_steps", "3", "do you mean --trainer.max_steps?"),
        pytest.param("data.path", "x", "do you mean --data.paths?", marks=pytest.mark.slow),
        pytest.param("seed", "3", "do you mean --seed_everything?", marks=pytest.mark.slow),
    ],
)
def test_unknown_option(option: str, value: str, told: str, fit_file: Path) -> None:
    message = refusal("fit", "--config", fit_file, f"--{option}", value)
    assert message == f"--{option}: there is no such option; {told}"


BARE = {
    "load": "ckpt_path",
    "save-interval": "trainer.callbacks",
    "log-interval": "trainer.log_every_n_steps",
    "ckpt-path": "ckpt_path",
    "tensor-model-parallel-size": "trainer.strategy.tensor_parallel_size",
    "virtual_pipeline_model_parallel_size": "trainer.strategy.pipeline.virtual_pipeline_size",
    "recompute-granularity": "trainer.strategy.recompute.mode",
    "num-layers": "model.config.num_layers",
    "seq-length": "data.seq_length",
    "micro-batch-size": "data.micro_batch_size",
    "train-iters": "trainer.max_steps",
    "clip-grad": "trainer.gradient_clip_val",
    "lr": "model.optimizer.lr",
    "lr-warmup-iters": "model.scheduler.lr_warmup_steps",
    "learning_rate": "model.optimizer.lr",
    "num-experts": "model.config.moe.num_experts",
    "moe-router-topk": "model.config.moe.router_topk",
    "rope_theta": "model.config.rotary.base",
    "num-layer": "model.config.num_layers",
    "max_steps": "trainer.max_steps",
    "sequence-parallel": "trainer.strategy.sequence_parallel",
}


def test_bare_names_of_other_programs(fit_file: Path) -> None:
    words = [f"--{name}=1" for name in BARE]
    lines = refusal("fit", "--config", fit_file, *words).splitlines()
    there_is_none = "there is no such option; do you mean"
    assert lines == [f"--{name}: {there_is_none} --{own}?" for name, own in BARE.items()]


def test_every_bare_name_of_the_table_leads_to_an_option(fit_file: Path) -> None:
    lines = refusal("fit", "--config", fit_file, *(f"--{name}=1" for name in ELSEWHERE))
    given = Given([])
    for name, line in zip(ELSEWHERE, lines.splitlines(), strict=True):
        found = re.fullmatch(rf"--{name}: there is no such option; do you mean --([\w.]+)\?", line)
        assert found is not None, line
        head, _, last = found[1].rpartition(".")
        assert last in arguments_of(given.kind_at(head)), line


def test_what_is_required_and_not_given(fit_file: Path, tmp_path: Path) -> None:
    assert refusal("fit") == (
        "model: config.vocab_size, config.num_layers, config.hidden_size,"
        " config.num_attention_heads are not given; give --config FILE with trainer, model and"
        " data, or --model.config.vocab_size and so on (likewise --data.NAME)"
    )
    preset = ("--model", "megatron_lightning.cli.presets.gpt_preset", "--model.preset", "tiny")
    assert refusal("validate", *preset, "--data.paths", "x").startswith(
        "data: seq_length, micro_batch_size, global_batch_size are not given; give --config FILE"
    )
    content = yaml.safe_load(fit_file.read_text())
    del content["model"]["config"]["num_layers"]
    path = tmp_path / "short.yaml"
    path.write_text(yaml.safe_dump(content))
    assert refusal("fit", "--config", path) == (
        "model: config.num_layers is not given; add to the file of --config, or give"
        " --model.config.num_layers"
    )


def test_other_spelling_of_a_whole_path(fit_file: Path) -> None:
    typed = "--trainer.strategy.tensor-model-parallel-size"
    told = refusal("fit", "--config", fit_file, typed, "2")
    own = "--trainer.strategy.tensor_parallel_size"
    assert told == f"{typed}: there is no such option; do you mean {own}?"
    assert refusal("fit", "--config", fit_file, "--colour", "2").endswith(
        "there are trainer, model, data, config, seed_everything, ckpt_path, print_config"
    )


def test_unknown_options_of_named_classes(fit_file: Path) -> None:
    fit = ("fit", "--config", fit_file)
    callback = "--trainer.callbacks+=megatron_lightning.callbacks.ExpertHealth"
    message = refusal(*fit, callback, "--trainer.callbacks.every_n_step", "10")
    assert message.endswith("do you mean --trainer.callbacks.every_n_steps?")
    preset = ("--model", "megatron_lightning.cli.presets.gpt_preset", "--model.preset", "tiny")
    assert refusal(*fit, *preset, "--model.presets", "x").endswith("do you mean --model.preset?")


def test_where_a_class_is_named_that_there_is_not(fit_file: Path, tmp_path: Path) -> None:
    """Not the file for what was typed, nor an option for what stands in the file."""
    content = yaml.safe_load(fit_file.read_text())
    known = "megatron_lightning.callbacks.ExpertHealth"
    content["trainer"]["callbacks"] = [{"class_path": known}]
    good, bad = tmp_path / "good.yaml", tmp_path / "bad.yaml"
    good.write_text(yaml.safe_dump(content))
    content["trainer"]["callbacks"] = [{"class_path": known.replace("Health", "Helth")}]
    bad.write_text(yaml.safe_dump(content))
    told = "='megatron_lightning.callbacks.ExpertHelth': there is no such class; do you mean Exp"
    typed = "--trainer.callbacks+=megatron_lightning.callbacks.ExpertHelth"
    assert refusal("fit", "--config", good, typed).startswith(f"--trainer.callbacks+{told}")
    kept = "--trainer.callbacks+=megatron_lightning.callbacks.TokenLedger"
    assert refusal("fit", "--config", bad, kept).startswith(f"{bad}: trainer.callbacks{told}")
    found = refusal("fit", "--config", good, "--trainer.logger.class_path", "CSVLoger")
    assert found == (
        "--trainer.logger.class_path='CSVLoger': there is no such class; do you mean CSVLogger?"
    )
    for option, base in (("trainer.callbacks+", "Callback"), ("model", "LightningModule")):
        assert refusal("fit", "--config", good, f"--{option}=torch.nn.Linear") == (
            f"--{option}='torch.nn.Linear': is no {base}; name a class that is one"
        )
    content["model"] = {"class_path": "GPTModl", "init_args": content["model"]}
    bad.write_text(yaml.safe_dump(content))
    found = refusal("fit", "--config", bad, "--model.config.num_layers", "3")
    assert found.startswith(f"{bad}: model='GPTModl': there is no such class; do you mean GPTMod")


@pytest.mark.parametrize(
    ("section", "told"),
    [
        ({"trainer": {"strategy": {"tensor_parallel": 2}}}, "trainer.strategy.tensor_parallel: "),
        pytest.param(
            {"model": {"optimiser": {"lr": 1}}}, "model.optimiser.lr: ", marks=pytest.mark.slow
        ),
        ({"model": {"config": {"num_layer": 1}}}, "model.config.num_layer: "),
        pytest.param({"trainer": {"max_step": 1}}, "trainer.max_step: ", marks=pytest.mark.slow),
        pytest.param({"dat": {"paths": "x"}}, "dat.paths: ", marks=pytest.mark.slow),
    ],
)
def test_unknown_field_of_a_file(
    section: dict[str, object], told: str, fit_file: Path, tmp_path: Path
) -> None:
    second = tmp_path / "second.yaml"
    second.write_text(yaml.safe_dump(section))
    message = refusal("fit", "--config", fit_file, "--config", second)
    assert message.startswith(f"{second}: {told}there is no such option; do you mean ")
    assert "\n" not in message


@pytest.mark.parametrize(
    ("option", "value", "told"),
    [
        pytest.param(
            "model.config.num_layers",
            "2.5",
            "='2.5': must be a whole number",
            marks=pytest.mark.slow,
        ),
        ("model.config.activation", "swiglu", "='swiglu': must be one of ('silu', 'gelu', "),
        pytest.param(
            "model.optimizer.lr", "abc", "='abc': must be a number", marks=pytest.mark.slow
        ),
        pytest.param(
            "trainer.strategy.tensor_parallel_size",
            "x",
            "='x': must be a whole number",
            marks=pytest.mark.slow,
        ),
        ("trainer.strategy.quantization.recipe", "fp9", "='fp9': must be one of ('fp8_tensorwise'"),
        ("trainer.gradient_clip_val", "abc", "='abc': must be a number"),
        ("trainer.precision", "fp8", ": precision='fp8' does not work with MegatronStrategy (for"),
        pytest.param(
            "trainer.precision",
            "16-true",
            ": precision='16-true' does not work",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "trainer.precision",
            "transformer-engine",
            ": precision='transformer-engine' does not",
            marks=pytest.mark.slow,
        ),
        (
            "trainer.strategy",
            "MegatronStrateg",
            "='MegatronStrateg': there is no such strategy; do",
        ),
        ("model", "GPTModl", "='GPTModl': there is no such class; do you mean GPTModel?"),
        pytest.param(
            "model",
            "my.own.Model",
            "='my.own.Model': there is no such class; give its whole path",
            marks=pytest.mark.slow,
        ),
        ("ckpt_path", "no/such.ckpt", "ckpt_path='no/such.ckpt': there is no such file or folder"),
    ],
)
def test_wrong_value(option: str, value: str, told: str, fit_file: Path) -> None:
    message = refusal("fit", "--config", fit_file, f"--{option}", value)
    assert message.startswith(told if option == "ckpt_path" else f"--{option}{told}"), message
    assert "\n" not in message


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_no_gpu(fit_file: Path) -> None:
    message = refusal("fit", "--config", fit_file, "--trainer.accelerator", "gpu")
    assert message.startswith("--trainer.accelerator='gpu': there is no CUDA GPU here; set")


@pytest.mark.parametrize(
    "command",
    ["fit", *(pytest.param(name, marks=pytest.mark.slow) for name in ("validate", "predict"))],
)
def test_file_in_place_of_a_checkpoint(command: str, fit_file: Path) -> None:
    message = refusal(command, "--config", fit_file, "--ckpt_path", fit_file)
    assert message.startswith(
        f"ckpt_path={str(fit_file)!r}: not a complete checkpoint folder; give"
    )
    assert "is a file" in message


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (b"trainer: {devices: 1\nmodel: [\n", "no YAML: line 2, column 6: while parsing a flow"),
        (b"a: \xff\n", "no text in UTF-8: byte 3 is 0xff"),
        (b"only text\n", "not a mapping of"),
        (None, "there is no such file"),
    ],
)
def test_config_file_that_cannot_be_read(content: bytes | None, told: str, tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    if content is not None:
        path.write_bytes(content)
    commands = (
        (trainer.main, ["fit", "--config", str(path)]),
        (plan.main, ["--config", str(path), "--gpus", "2"]),
        (verify.main, ["--config", str(path), "--layouts", "dp2"]),
        (convert.main, [str(tmp_path), str(tmp_path / "out"), "--config", str(path)]),
    )
    for run, arguments in commands:
        with pytest.raises(UserError) as error:
            run(arguments)
        assert str(error.value).startswith(f"--config {path}: {told}")


def test_config_file_that_is_a_folder(tmp_path: Path) -> None:
    assert refusal("fit", "--config", tmp_path).endswith("is a folder; give a YAML file")


def test_message_of_an_unknown_form_stays() -> None:
    given = Given(["fit"])
    assert explain("unrecognized arguments: extra", given) is None
    of_another_kind = 'Parser key "trainer.callbacks":\n  - Not a valid subclass of Callback'
    expected = "  - Expected a <class 'NoneType'>"
    assert explain(f"{of_another_kind}\n{expected}", Given(["--trainer.callbacks+=x.Y"])) is None
    assert explain("Parser key \"model\":\n  - Unable to load config '{a:'", given) is None


@pytest.mark.parametrize(
    ("section", "told"),
    [
        ({"dat": {}}, "dat: there is no such section; do you mean data?"),
        ({"trainer": {"max_step": 1}}, "trainer.max_step: there is no such option; do you mean tr"),
        ({"model": {"optimiser": {}}}, "model.optimiser: there is no such option; do you mean mo"),
        ({"data": {"path": "x"}}, "data.path: there is no such option; do you mean data.paths?"),
    ],
)
def test_unknown_names_in_files_that_are_only_read(
    section: dict[str, object], told: str, fit_file: Path, tmp_path: Path
) -> None:
    path = tmp_path / "changed.yaml"
    path.write_text(yaml.safe_dump(yaml.safe_load(fit_file.read_text()) | section))
    for run, more in ((plan.main, ["--gpus", "1"]), (verify.main, ["--layouts", "dp2"])):
        with pytest.raises(UserError) as error:
            run(["--config", str(path), *more])
        assert str(error.value).startswith(f"{path}: {told}")


def test_saved_configs_of_other_command_lines_are_read(fit_file: Path, tmp_path: Path) -> None:
    path, content = tmp_path / "saved.yaml", yaml.safe_load(fit_file.read_text())
    content |= {"optimizer": None, "lr_scheduler": None}
    content["trainer"]["precision"] = None
    path.write_text(yaml.safe_dump(content))
    plan.main(["--config", str(path), "--gpus", "1"])


def test_what_the_parser_alone_can_read_is_left_to_it(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    for value in (str(pipe), "file:///no/such.yaml", "-", "{trainer: {devices: 1}}"):
        assert not Given(["fit", "--config", value]).files


def make_strategy(tp: int = 1) -> MegatronStrategy:
    return MegatronStrategy(tensor_parallel_size=tp)


def test_names_that_are_no_classes() -> None:
    path = f"{__name__}.make_strategy"
    assert class_named(path) is not None
    assert trainer.strategy_class(Namespace(class_path=path)) is None
    for name in ("./m.yaml", "m.yaml", "no.such.Class"):
        assert class_named(name) is None
