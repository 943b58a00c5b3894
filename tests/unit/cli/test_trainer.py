"""`fit` and its sisters: config files, defaults, what is stored, and wrong input in one message."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from megatron_lightning.cli import generate, trainer
from megatron_lightning.cli import inspect as inspect_command
from megatron_lightning.cli.errors import UserError
from megatron_lightning.config import GPTConfig, RotaryConfig
from megatron_lightning.config.training import OptimizerConfig
from megatron_lightning.config.validate import ConfigurationError
from megatron_lightning.data import PretrainingDataModule, preprocess_jsonl
from megatron_lightning.models import GPTModel
from tests.harness import run_ranks_fresh

EXAMPLE = Path(__file__).resolve().parents[3] / "examples" / "quickstart.yaml"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A byte corpus, and a config file that trains on it for two steps on one rank."""
    path = tmp_path_factory.mktemp("cli")
    text = path / "text.jsonl"
    lines = (json.dumps({"text": "to be or not to be, " * 10}) for _ in range(40))
    text.write_text("\n".join(lines))
    preprocess_jsonl(text, path / "corpus", "bytes")
    (path / "fit.yaml").write_text(yaml.safe_dump(config(path)))
    return path


def config(path: Path) -> dict[str, Any]:
    sizes = dict(vocab_size=257, num_layers=2, hidden_size=32, num_attention_heads=4)
    checkpoints = {
        "class_path": "lightning.pytorch.callbacks.ModelCheckpoint",
        "init_args": {"dirpath": str(path / "checkpoints"), "filename": "{step}"},
    }
    return {
        "trainer": dict(
            accelerator="cpu",
            devices=1,
            max_steps=2,
            default_root_dir=str(path),
            logger=False,
            enable_progress_bar=False,
            callbacks=[checkpoints],
        ),
        "model": {"config": {**sizes, "rotary": {"base": 5000.0}}, "optimizer": {"lr": 1e-3}},
        "data": dict(
            paths=str(path / "corpus"),
            seq_length=16,
            micro_batch_size=2,
            global_batch_size=4,
            split="90,10,0",
        ),
    }


def fit(rank: int, world_size: int, arguments: list[str]) -> None:
    trainer.main(["fit", *arguments])


@pytest.fixture(scope="module")
def checkpoint(folder: Path) -> Path:
    run_ranks_fresh(fit, 1, ["--config", str(folder / "fit.yaml")])
    return folder / "checkpoints" / "step=2.ckpt"


def test_hyper_parameters_in_the_checkpoint_are_the_configs(checkpoint: Path) -> None:
    model = GPTModel.load_from_checkpoint(checkpoint)
    assert model.config == GPTConfig(
        vocab_size=257,
        num_layers=2,
        hidden_size=32,
        num_attention_heads=4,
        rotary=RotaryConfig(base=5000.0),
    )
    assert model.optimizer_config == OptimizerConfig(lr=1e-3)


def test_config_is_saved_and_can_be_read_again(checkpoint: Path, folder: Path) -> None:
    saved = yaml.safe_load((folder / "config.yaml").read_text())
    strategy = saved["trainer"]["strategy"]
    assert strategy["class_path"] == "megatron_lightning.MegatronStrategy"
    assert saved["model"]["class_path"] == "megatron_lightning.GPTModel"
    assert saved["data"]["class_path"] == "megatron_lightning.PretrainingDataModule"
    parser = parse(["fit", "--config", str(folder / "config.yaml")])
    assert parser.fit.model.init_args.config.rotary.base == 5000.0


def parse(arguments: list[str]) -> Any:
    """The parsed options, without building anything."""

    class ParseOnly(trainer.TrainerCLI):
        def instantiate_classes(self) -> None:
            self.trainer = None

        def after_instantiate_classes(self) -> None:
            pass

        def _run_subcommand(self, subcommand: str) -> None:
            pass

    return ParseOnly(arguments).config


def test_example_file_says_what_the_quickstart_runs() -> None:
    from megatron_lightning.cli import quickstart_run

    chosen = parse(["fit", "--config", str(EXAMPLE)]).fit
    settings = quickstart_run.Settings(
        output=Path("runs/quickstart"), steps=100, seed=1234, accelerator="cpu", devices=4
    )
    model = quickstart_run.build_model(settings)
    assert GPTConfig.from_dict(chosen.model.init_args.config.as_dict()) == model.config
    assert chosen.model.init_args.optimizer.lr == model.optimizer_config.lr
    assert chosen.model.init_args.scheduler.min_lr == model.scheduler_config.min_lr
    assert chosen.data.init_args.paths == str(settings.corpus)
    layout = quickstart_run.LAYOUTS[4][0]
    strategy = chosen.trainer.strategy.init_args
    assert strategy.tensor_parallel_size == layout.tensor
    assert strategy.pipeline_parallel_size == layout.pipeline


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("paths", "{a: 0.3, b: 2}", {"a": 0.3, "b": 2.0}),
        ("paths", "[a, b]", ["a", "b"]),
        ("paths", "[0.3, a, 2, b]", [0.3, "a", 2, "b"]),
        ("paths", "0.3 a 2 b", "0.3 a 2 b"),
        ("valid_paths", "{easy: a, hard: {b: 1, c: 2}}", {"easy": "a", "hard": {"b": 1, "c": 2}}),
        ("valid_paths", "null", None),
        ("cache_dir", "null", None),
        ("tokenizer", "null", None),
        ("rampup_batch_size", "[[0, 2], [40, 4]]", [[0, 2], [40, 4]]),
    ],
)
def test_data_options_keep_their_form(folder: Path, name: str, text: str, value: Any) -> None:
    """A mixture in a file, and on the command line, is a mixture and no path of this name."""
    changed = folder / f"{name}.yaml"
    changed.write_text(f"data: {{{name}: {text}}}\n")
    both = ["--config", str(changed)], [f"--data.{name}", text]
    for options in both:
        parsed = parse(["fit", "--config", str(folder / "fit.yaml"), *options]).fit
        assert parsed.data.init_args[name] == value


def test_mock_data_in_a_config_file(folder: Path) -> None:
    parsed = parse(
        [
            *("fit", "--config", str(folder / "fit.yaml")),
            *("--data.paths", "mock", "--data.mock_data", "true"),
        ]
    ).fit.data.init_args
    data = PretrainingDataModule(parsed.paths, parsed.seq_length, 1, 4, mock_data=parsed.mock_data)
    assert (data.all_paths, data.validate()) == ([], [])


def test_options_change_the_config_file(folder: Path) -> None:
    changed = parse(
        [
            *("fit", "--config", str(folder / "fit.yaml")),
            *("--trainer.strategy.tensor_parallel_size", "2"),
            *("--trainer.strategy.pipeline.virtual_pipeline_size", "2"),
            *("--model.config.num_layers", "8"),
        ]
    ).fit
    assert changed.trainer.strategy.init_args.tensor_parallel_size == 2
    assert changed.trainer.strategy.init_args.pipeline.virtual_pipeline_size == 2
    assert changed.model.init_args.config.num_layers == 8


def test_model_by_preset(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    chosen = config(folder)
    chosen["model"] = {
        "class_path": "megatron_lightning.cli.presets.gpt_preset",
        "init_args": {"preset": "tiny", "optimizer": {"lr": 0.5}},
    }
    chosen["trainer"]["fast_dev_run"] = True
    path = folder / "preset.yaml"
    path.write_text(yaml.safe_dump(chosen))
    run_ranks_fresh(fit, 1, ["--config", str(path)])
    with pytest.raises(UserError, match=r"^preset='llama9' is unknown; use one of \['deepseek-v3'"):
        trainer.main(["fit", "--config", str(path), "--model.preset", "llama9"])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--trainer.max_step", "3"], "--trainer.max_step: .* do you mean --trainer.max_steps"),
        (
            ["--model.vocab_size", "3"],
            "--model.vocab_size: .* do you mean --model.config.vocab_size",
        ),
        (
            ["--model.config.hidden", "3"],
            "--model.config.hidden: .* do you mean --model.config.hidden_size",
        ),
        (["--model.config.hidden_size", "x"], "hidden_size"),
        (["--trainer.devices", "0"], "devices"),
        (["--config", "/nowhere.yaml"], "--config /nowhere.yaml: there is no such file"),
        (["--model", "NoSuchModel"], "NoSuchModel"),
        (["--data.global_batch_size", "5"], "global_batch_size=5 must be a multiple"),
        (["--model.loss_normalization", "sum"], "loss_normalization"),
    ],
)
def test_wrong_option(options: list[str], message: str, folder: Path) -> None:
    with pytest.raises(UserError, match=message) as error:
        trainer.main(["fit", "--config", str(folder / "fit.yaml"), *options])
    assert len(str(error.value).splitlines()) <= 4


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--trainer.strategy.tensor_parallel_size", "3"], "devices x num_nodes = 1 rank:"),
        (["--trainer.strategy.micro_batch_size", "0"], "micro_batch_size=0"),
        (["--trainer.strategy.pipeline.virtual_pipeline_size", "0"], "virtual_pipeline_size=0"),
    ],
)
def test_layout_that_does_not_fit(options: list[str], message: str, folder: Path) -> None:
    with pytest.raises((UserError, ConfigurationError), match=message):
        trainer.main(["fit", "--config", str(folder / "fit.yaml"), *options])


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("predict", "predict: PretrainingDataModule has no predict_dataloader; give data with one"),
        ("test", "split='90,10,0' leaves nothing for testing; give it a third share"),
    ],
)
def test_commands_for_which_there_are_no_data(command: str, message: str, folder: Path) -> None:
    with pytest.raises(ConfigurationError, match=message):
        trainer.main([command, "--config", str(folder / "fit.yaml")])


def test_checkpoint_path_is_looked_at_before_the_start(folder: Path) -> None:
    options = ["validate", "--config", str(folder / "fit.yaml"), "--ckpt_path", str(folder)]
    with pytest.raises(UserError, match="is not a complete checkpoint"):
        trainer.main(options)


def test_inspect_checkpoint(checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    inspect_command.main([str(checkpoint), "--tensors", "--verify"])
    shown = [line.split(None, 1) for line in capsys.readouterr().out.splitlines()]
    assert ["global_step", "2"] in shown
    assert ["config.hidden_size", "32"] in shown
    assert ["model.network.embedding.word_embeddings.weight", "float32 [257, 32]"] in shown
    assert not any(row[0] == "config.norm" for row in shown)  # a default
    parameters = GPTModel.load_from_checkpoint(checkpoint).config.num_parameters()
    assert any(row[0] == "model" and row[1].endswith(f"{parameters:,} elements") for row in shown)


def test_generate(checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = [str(checkpoint), "--tokenizer", "bytes", "--prompt", "to be ", "--seed", "7"]
    generate.main([*options, "--max-new-tokens", "5", "--temperature", "0"])
    first = capsys.readouterr().out
    model = GPTModel.load_from_checkpoint(checkpoint)
    ids = model.generate(list(b"to be "), 5, end_token=256)[0].tolist()
    assert first == bytes(i for i in ids if i < 256).decode(errors="replace") + "\n"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--prompt", ""], "prompt=''"),
        (["--prompt", "a", "--temperature", "-1"], r"temperature=-1\.0"),
        (["--prompt", "a", "--top-p", "2"], "top_p=2"),
        (["--prompt", "a", "--max-new-tokens", "-1"], "max_new_tokens=-1"),
    ],
)
def test_generate_refuses(options: list[str], message: str, checkpoint: Path) -> None:
    with pytest.raises(UserError, match=message):
        generate.main([str(checkpoint), "--tokenizer", "bytes", *options])


def test_generate_without_checkpoint(tmp_path: Path) -> None:
    options = ["--tokenizer", "bytes", "--prompt", "a"]
    with pytest.raises(UserError, match="there is no such folder"):
        generate.main([str(tmp_path / "x"), *options])
    with pytest.raises(UserError, match="is not a complete checkpoint"):
        generate.main([str(tmp_path), *options])
