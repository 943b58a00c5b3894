"""`--set FIELD=VALUE`, as commands take it."""

from __future__ import annotations

from typing import Any

import yaml

from megatron_lightning.cli.errors import UserError


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
