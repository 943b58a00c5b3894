"""What can be known of a checkpoint before any rank is started: are its tables whole, and does it
hold the model that is to be loaded.
"""

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from megatron_lightning.checkpoint.checks import open_checkpoint
from megatron_lightning.checkpoint.errors import CheckpointError
from megatron_lightning.checkpoint.index import METADATA_FILE, StoredTensor, index_from_json
from megatron_lightning.checkpoint.manifest import local_path, read_checked
from megatron_lightning.checkpoint.state import OBJECTS_FILE

_SHOWN = 5


@dataclass(frozen=True, slots=True)
class Tables:
    """What a checkpoint says of itself."""

    index: Mapping[str, StoredTensor]
    """Its tensors."""
    objects: Mapping[str, Any]
    """Everything else, encoded (`Codec`); plain text and numbers are themselves."""


def read_tables(path: str | os.PathLike[str]) -> Tables:
    """The tables of a checkpoint, after their checksums have been compared; no tensor is read.

    Raises CheckpointError naming the file.
    """
    folder = local_path(path)
    manifest = open_checkpoint(folder)
    try:
        objects = dict(json.loads(read_checked(folder, manifest, OBJECTS_FILE)))
    except (ValueError, TypeError) as error:
        raise CheckpointError(f"{folder / OBJECTS_FILE} is damaged: {error}") from error
    table = read_checked(folder, manifest, METADATA_FILE)
    return Tables(index_from_json(table, str(folder / METADATA_FILE)), objects)


def model_problems(
    index: Mapping[str, StoredTensor],
    shapes: Mapping[str, tuple[int, ...]],
    *,
    scope: str,
    optional: frozenset[str] = frozenset(),
    strict: bool = True,
) -> list[str]:
    """How the tensors of a checkpoint differ from a model; a sentence for each kind of difference.

    `shapes` are the parameters by name, without the `model.` that stands before it in the
    checkpoint; `optional` further names that it may hold. Names outside of `scope` are not looked
    at. Without `strict` only shapes must agree.
    """
    stored = {
        name.removeprefix("model."): tensor
        for name, tensor in index.items()
        if name.startswith(scope)
    }
    other = [
        f"{name} (saved with shape {list(stored[name].shape)}, the model has {list(shape)})"
        for name, shape in shapes.items()
        if name in stored and stored[name].shape != tuple(shape)
    ]
    missing = [name for name in shapes if name not in stored]
    unexpected = [name for name in stored if name not in shapes and name not in optional]
    found = {"of another shape": other}
    if strict:
        found |= {"missing in it": missing, "in it, but not in the model": unexpected}
    return [_sentence(names, what) for what, names in found.items() if names]


def _sentence(names: list[str], what: str) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    verb = "tensor is" if len(names) == 1 else "tensors are"
    return f"{len(names)} {verb} {what}: {', '.join(names[:_SHOWN])}{more}"
