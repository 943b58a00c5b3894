"""`--set FIELD=VALUE`, as commands take it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import yaml

from megatron_lightning.cli.errors import UserError
from megatron_lightning.config.model import GPTConfig
from megatron_lightning.config.names import arguments_of
from megatron_lightning.config.parallel import ParallelConfig


def model_changes(texts: Iterable[str] | None, example: str) -> dict[str, Any]:
    """Names and values of `--set`s that change a model's config; UserError for fields of the
    layout, which have options of their own. Fields that nothing has are left to the config.
    """
    changes = dict(assignment(text, example) for text in texts or ())
    for name, value in changes.items():
        head = name.partition(".")[0]
        if head in arguments_of(ParallelConfig) and head not in arguments_of(GPTConfig):
            raise UserError(
                f"--set {name}={value}: --set changes the model's config, and {name} belongs to the"
                " layout; use its option (`--help` lists them), or write"
                f" trainer.strategy.{name} into the file of --config"
            )
    return changes


def assignment(text: str, example: str, *, option: str = "--set") -> tuple[str, Any]:
    """Name and value, read as YAML; also 1e-3, which YAML takes for text. UserError, with an
    example of the option, for text of another form.
    """
    name, equals, value = text.partition("=")
    if not equals:
        raise UserError(f"{option} {text}: write FIELD=VALUE, e.g. {example}")
    read = yaml.safe_load(value)
    if isinstance(read, str):
        try:
            return name, float(read)
        except ValueError:
            return name, read
    return name, read
