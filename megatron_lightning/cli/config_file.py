"""YAML files that a user names: what can't be read is said with the file's name and the place."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from megatron_lightning.cli.errors import UserError


def read_mapping(path: str | Path, what: str, option: str = "--config") -> Mapping[str, Any]:
    """The content of a file that must be a mapping; `what` says of what, for the message.

    UserError for a missing file, text that is no YAML, and other content.
    """
    file = Path(path)
    if file.is_dir():
        raise UserError(f"{option} {path}: is a folder; give a YAML file")
    if not file.is_file():
        raise UserError(f"{option} {path}: there is no such file")
    try:
        content = yaml.safe_load(file.read_text())
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise UserError(f"{option} {path}: {_place(error)}; correct the file") from error
    except OSError as error:
        raise UserError(f"{option} {path}: cannot be read: {error.strerror}") from error
    if not isinstance(content, Mapping):
        raise UserError(f"{option} {path}: not a mapping of {what}")
    return content


def _place(error: yaml.YAMLError | UnicodeDecodeError) -> str:
    if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark is not None:
        mark = error.problem_mark
        context = f" {error.context}," if error.context else ""
        return f"no YAML: line {mark.line + 1}, column {mark.column + 1}:{context} {error.problem}"
    if isinstance(error, UnicodeDecodeError):
        return f"no text in UTF-8: byte {error.start} is {error.object[error.start]:#04x}"
    return f"no YAML: {' '.join(str(error).split())}"
