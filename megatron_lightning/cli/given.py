"""What a user wrote for `fit` and its sisters: options in order, and config files with their names.

Only for messages: which option or file a path stands in, with which value, and which class takes
it. What it can't tell is None, and the message says less.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch import callbacks, loggers, strategies

import megatron_lightning
import megatron_lightning.callbacks
from megatron_lightning.cli.config_file import read_mapping
from megatron_lightning.config.names import arguments_of

_DEFAULTS: Mapping[str, type] = {
    "model": megatron_lightning.GPTModel,
    "data": megatron_lightning.PretrainingDataModule,
    "trainer.strategy": megatron_lightning.MegatronStrategy,
}
"""Classes that are meant where none is named."""
_CHOSEN = (*_DEFAULTS, "trainer.callbacks", "trainer.logger", "trainer.plugins", "trainer.profiler")
_BASES: Mapping[str, type] = {
    "model": pl.LightningModule,
    "data": pl.LightningDataModule,
    "trainer.strategy": strategies.Strategy,
    "trainer.callbacks": pl.Callback,
    "trainer.logger": loggers.Logger,
}
_HOMES = (megatron_lightning, megatron_lightning.callbacks, callbacks, loggers, strategies, pl)
"""Where classes without a path are looked for."""


class Given:
    """Options and files; UserError for a file that can't be read."""

    def __init__(self, arguments: Sequence[str]) -> None:
        self.options = list(_options(arguments))
        self.files = {
            value: read_mapping(value, "trainer, model and data")
            for name, value in self.options
            if name in ("config", "c") and value and _is_file_name(value)
        }

    def place(self, path: str) -> str:
        """`--a.b` for an option, `FILE: a.b` for what stands in a file, else the path itself."""
        if any(f"{name.rstrip('+')}.".startswith(f"{path}.") for name, _ in self.options):
            return f"--{path}"
        for file, content in reversed(self.files.items()):
            if _within(content, path) is not None:
                return f"{file}: {path}"
        return path

    def place_of_class(self, path: str, name: str) -> str:
        """The same where a class is named at `path`, of several the one that names `name`."""
        for option, value in reversed(self.options):
            is_there = option.rstrip("+") in (path, f"{path}.class_path")
            if is_there and value is not None and name in value:
                return f"--{option}"
        for file, content in reversed(self.files.items()):
            if name in _class_paths(_within(content, path)):
                return f"{file}: {path}"
        return self.place(path)

    def value(self, path: str) -> Any:
        """What was given at `path`; None if nothing."""
        for name, value in reversed(self.options):
            if name == path:
                return value
        for content in reversed(self.files.values()):
            found = _within(content, path)
            if found is not None:
                return found
        return None

    def kind_at(self, path: str) -> Any:
        """The class whose arguments stand at `path`, "model.config.moe"; None if unknown."""
        if path == "trainer":
            return pl.Trainer
        section = next((one for one in _CHOSEN if path == one or path.startswith(f"{one}.")), None)
        if section is None:
            return None
        kind = self._chosen(section)
        for name in path.removeprefix(section).split(".")[1:]:
            kind = None if kind is None else arguments_of(kind).get(name)
        return kind

    def _chosen(self, section: str) -> Any:
        for name in (f"{section}.class_path", f"{section}+", section):
            value = self.value(name)
            if isinstance(value, Mapping):
                value = value.get("class_path", _DEFAULTS.get(section))
            if isinstance(value, type):
                return value
            if isinstance(value, str):
                return class_named(value)
        return _DEFAULTS.get(section)


def _is_file_name(value: str) -> bool:
    """Not for YAML itself, addresses, and what the parser alone may read, since only once."""
    if "\n" in value or value[:1] in "{[" or "://" in value or value == "-":
        return False
    path = Path(value)
    return path.is_file() or path.is_dir() or not path.exists()


def _options(arguments: Sequence[str]) -> Sequence[tuple[str, str | None]]:
    found: list[tuple[str, str | None]] = []
    for place, argument in enumerate(arguments):
        if not argument.startswith("-") or argument[1:2].isdigit():
            continue
        name, equals, value = argument.lstrip("-").partition("=")
        following = arguments[place + 1] if place + 1 < len(arguments) else None
        found.append((name, value if equals else following))
    return found


def _within(content: Any, path: str) -> Any:
    """The value at a path, below `init_args` where a class is named."""
    for name in path.split("."):
        if isinstance(content, Mapping) and name not in content:
            content = content.get("init_args")
        if not isinstance(content, Mapping) or name not in content:
            return None
        content = content[name]
    return content


def _class_paths(content: Any) -> list[str]:
    """Classes that a section names: as text, by `class_path`, or some in a list."""
    entries = content if isinstance(content, list) else [content]
    named = (one.get("class_path") if isinstance(one, Mapping) else one for one in entries)
    return [one for one in named if isinstance(one, str)]


def class_names(section: str) -> Sequence[str]:
    """Names of the classes that may stand in a section, as far as they are found without a path."""
    base = _BASES.get(section)
    if base is None:
        return ()
    found = ((name, getattr(home, name)) for home in _HOMES for name in dir(home))
    names = (name for name, one in found if isinstance(one, type) and issubclass(one, base))
    return tuple(dict.fromkeys(names))


def class_named(name: str) -> Any:
    """The class or function of that name; None if it isn't found."""
    home, dot, last = name.rpartition(".")
    if not all(part.isidentifier() for part in name.split(".")) or Path(name).is_file():
        return None
    if not dot:
        return next((getattr(one, name) for one in _HOMES if hasattr(one, name)), None)
    try:
        return getattr(importlib.import_module(home), last, None)
    except Exception:  # a user's module may raise anything, which the parser will tell
        return None
