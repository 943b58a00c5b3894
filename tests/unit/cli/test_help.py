"""Every option that the commands list has a text: what it is, in which unit."""

import dataclasses
import importlib
import inspect
import typing
from argparse import Action
from collections.abc import Callable, Iterator
from typing import Any

import lightning as L
import pytest
from jsonargparse import ArgumentParser, set_parsing_settings

import megatron_lightning
from megatron_lightning import callbacks
from megatron_lightning.cli import trainer
from megatron_lightning.cli.errors import Parser
from megatron_lightning.cli.main import COMMANDS
from megatron_lightning.cli.presets import gpt_preset

CLASSES: list[Callable[..., Any]] = [
    megatron_lightning.MegatronStrategy,
    megatron_lightning.GPTModel,
    megatron_lightning.PretrainingDataModule,
    megatron_lightning.SFTDataModule,
    megatron_lightning.pretrained,
    gpt_preset,
    *(
        found
        for name in callbacks.__all__
        if issubclass(found := getattr(callbacks, name), L.Callback)
    ),
]
"""What a config file of `fit` names, and whose help it shows."""


class _Stop(Exception):
    pass


@pytest.fixture
def field_texts() -> Iterator[None]:
    """As where help is asked for."""
    set_parsing_settings(docstring_parse_attribute_docstrings=True)
    yield
    set_parsing_settings(docstring_parse_attribute_docstrings=False)


def without_text(actions: list[Action]) -> list[str]:
    return [
        "/".join(action.option_strings) or action.dest
        for action in actions
        if not (isinstance(action.help, str) and action.help.strip())
    ]


def actions_of(component: Callable[..., Any]) -> list[Action]:
    """The options that jsonargparse makes of a class or function."""
    parser = ArgumentParser(exit_on_error=False)
    if inspect.isclass(component):
        parser.add_class_arguments(component, "of")
    else:
        parser.add_function_arguments(component, "of")
    return parser._actions


def configs_in(hint: Any) -> Iterator[type]:
    """The dataclasses of a type: those whose fields are options too."""
    if inspect.isclass(hint) and dataclasses.is_dataclass(hint):
        yield hint
    for inner in typing.get_args(hint):
        yield from configs_in(inner)


def config_classes(component: Callable[..., Any]) -> Iterator[type]:
    """All configs of a component's arguments, and those inside of them."""
    called = component.__init__ if inspect.isclass(component) else component  # type: ignore[misc]
    for name, hint in typing.get_type_hints(called).items():
        if name != "return":
            for config in configs_in(hint):
                yield config
                yield from config_classes(config)


@pytest.mark.parametrize("component", CLASSES, ids=lambda component: component.__name__)
def test_every_argument_has_a_text(component: Callable[..., Any], field_texts: None) -> None:
    assert without_text(actions_of(component)) == []


CONFIGS = sorted(
    {config for component in CLASSES for config in config_classes(component)},
    key=lambda config: config.__name__,
)


def test_configs_are_found() -> None:
    names = {config.__name__ for config in CONFIGS}
    assert {"GPTConfig", "MoEConfig", "QuantizationConfig", "LocalCheckpointConfig"} <= names


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config.__name__)
def test_every_field_of_a_config_has_a_text(config: type, field_texts: None) -> None:
    actions = {action.dest: action for action in actions_of(config)}
    for field in dataclasses.fields(config):  # type: ignore[arg-type]
        text = actions[f"of.{field.name}"].help if f"of.{field.name}" in actions else "a section"
        assert text, f"{config.__name__}.{field.name}"
    assert without_text(list(actions.values())) == []


@pytest.mark.parametrize("component", [*CLASSES[:5], *CONFIGS], ids=lambda one: one.__name__)
def test_the_title_of_a_section_is_a_sentence(component: Callable[..., Any]) -> None:
    first = (component.__doc__ or "").splitlines()[0]
    assert first.endswith("."), f"{component.__name__}: help shows this line alone: {first}"


def parsers_of(name: str, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The parsers that a command of argparse makes, with its own subcommands."""
    found: list[Any] = []

    def stop(parser: Parser, *_: Any, **__: Any) -> None:
        found.append(parser)
        raise _Stop

    monkeypatch.setattr(Parser, "parse_args", stop)
    module = importlib.import_module(f"megatron_lightning.cli.{COMMANDS[name].module}")
    for arguments in [["info"], ["merge"], ["split"]] if name == "data" else [[]]:
        with pytest.raises(_Stop):
            module.main(arguments)
    return found


@pytest.mark.parametrize("name", [name for name, one in COMMANDS.items() if not one.passes_name])
def test_every_option_of_a_command_has_a_text(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for parser in parsers_of(name, monkeypatch):
        assert without_text(parser._actions) == []


def test_fit_shows_the_texts_of_fields(
    capsys: pytest.CaptureFixture[str], field_texts: None
) -> None:
    strategy = "--trainer.strategy.help=MegatronStrategy"
    with pytest.raises(SystemExit):
        trainer.main(["fit", strategy, "--trainer.strategy.quantization.help"])
    shown = " ".join(capsys.readouterr().out.split())
    assert "Layers at the beginning of the network that stay in the run's precision." in shown
    with pytest.raises(SystemExit):
        trainer.main(["fit", "--model.help", "GPTModel"])
    shown = " ".join(capsys.readouterr().out.split())
    assert "One letter a layer, repeated over the layers: S sliding" in shown


@pytest.mark.parametrize(
    ("arguments", "asks"),
    [
        (["fit", "--help"], True),
        (["fit", "-h"], True),
        (["fit", "--model.help", "GPTModel"], True),
        (["fit", "--trainer.strategy.pipeline.help"], True),
        (["fit", "--model.helper", "1"], False),
        (["fit", "--trainer.max_steps", "3"], False),
    ],
)
def test_texts_are_read_where_help_is_asked_for(arguments: list[str], asks: bool) -> None:
    assert trainer.asks_for_help(arguments) is asks
