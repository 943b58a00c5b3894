"""NeMo 2 checkpoints: `weights/`, a `torch_dist` checkpoint of Megatron-Core, beside `context/`,
which says what model it is: `model.yaml` with all fields of its config, or `io.json`, fiddle's
JSON, with those that were set.

Both are read as data: nothing that they name is looked up. Fields that could change what the
network computes, and that aren't known here, are refused by name.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from megatron_lightning.checkpoint.convert.nemo_fields import gpt_config
from megatron_lightning.checkpoint.errors import CheckpointError
from megatron_lightning.config.model import GPTConfig

WEIGHTS, CONTEXT = "weights", "context"
_YAML, _JSON = "model.yaml", "io.json"
_TARGET = "_target_"
_MODULES = re.compile(
    r"nemo\.collections\.llm\.gpt\.model\."
    r"(base|llama|mistral|mixtral|qwen2|qwen3|starcoder|starcoder2|phi3mini|nemotron)\.\w+"
)
"""Configs whose fields say everything; others have code of their own."""


def is_nemo(folder: Path) -> bool:
    """Whether a folder has the parts of a NeMo 2 checkpoint."""
    return (folder / WEIGHTS / ".metadata").is_file() and (folder / CONTEXT).is_dir()


def nemo_config(folder: Path, vocab_size: int | None = None) -> GPTConfig:
    """The model of a NeMo 2 checkpoint. `vocab_size`: its true vocabulary, where the checkpoint
    doesn't say. CheckpointError names what is missing or not supported.
    """
    fields, origin = _fields(folder / CONTEXT)
    target = fields.pop(_TARGET, "")
    if not _MODULES.fullmatch(str(target)):
        raise CheckpointError(
            f"{origin}: {target or 'a model without a name'} is not supported: what it computes is"
            " not said by its fields alone; convert with the config of the model (--config)"
        )
    size = vocab_size or fields.get("vocab_size") or _tokens(folder / CONTEXT)
    if size is None:
        raise CheckpointError(
            f"{origin}: the size of the vocabulary is missing (the embedding's is padded), and"
            " there is no tokenizer.json; give --vocab-size"
        )
    complete, scaled = origin.endswith(_YAML), re.search(r"Llama3\d", str(target)) is not None
    return gpt_config(fields, int(size), origin, complete=complete, scaled=scaled)


def _fields(context: Path) -> tuple[dict[str, Any], str]:
    """Fields of the model's config, and the file they are from."""
    for name, read in ((_YAML, _from_yaml), (_JSON, _from_json)):
        path = context / name
        if path.is_file():
            model = read(path)
            config = model.get("config") if isinstance(model, Mapping) else None
            if not isinstance(config, Mapping):
                raise CheckpointError(f"{path}: it describes no model with a config")
            return dict(config), str(path)
    raise CheckpointError(f"{context}: there is neither {_YAML} nor {_JSON}")


def _from_yaml(path: Path) -> Any:
    try:
        return yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{path} is no plain YAML: {error}") from error


def _from_json(path: Path) -> Any:
    """The model in fiddle's JSON: `objects` that refer to each other by key."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        root = _Objects(content["objects"]).plain(content["root"])
    except (ValueError, KeyError, TypeError, IndexError, RecursionError) as error:
        raise CheckpointError(f"{path} is no JSON of fiddle: {error!r}") from error
    return root.get("model", root) if isinstance(root, dict) else root


class _Objects:
    """What `io.json` holds, as plain values: a config is a dict with its `_target_`."""

    def __init__(self, objects: Mapping[str, Any]) -> None:
        self._objects = objects

    def plain(self, value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        kind = value["type"]
        if kind == "ref":
            return self._object(self._objects[value["key"]])
        if kind == "leaf":
            return value["value"]
        if kind == "pyref":
            return {_TARGET: f"{value['module']}.{value['name']}"}
        return self._object(value)

    def _object(self, entry: Mapping[str, Any]) -> Any:
        items = [(key, self.plain(value)) for key, value in entry["items"]]
        if entry["type"]["name"] in ("list", "tuple", "set", "frozenset"):
            return [value for _, value in items]
        found = {_key(key): value for key, value in items}
        metadata = entry.get("metadata")
        if isinstance(metadata, dict) and metadata.get("type") == "ref":
            about = dict(self._objects[metadata["key"]]["items"])
            made = about.get("Attr(name='fn_or_cls')")
            if made is not None:
                found[_TARGET] = self.plain(made)[_TARGET]
        return found


def _key(path: str) -> str:
    """The name in `Attr(name='x')` or `Key(key='x')`."""
    match = re.fullmatch(r"\w+\((?:name|key|index)=(.*)\)", path)
    return path if match is None else match.group(1).strip("'\"")


def _tokens(context: Path) -> int | None:
    """Tokens of the tokenizer that lies in the context, if it is one of Hugging Face."""
    found = sorted(context.glob("**/tokenizer.json"))
    if not found:
        return None
    try:
        content = json.loads(found[0].read_text(encoding="utf-8"))
        vocabulary = content["model"]["vocab"]
        words = {entry[0] if isinstance(entry, list) else entry for entry in vocabulary}
        return len(words | {token["content"] for token in content.get("added_tokens") or ()})
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{found[0]} is no tokenizer: {error!r}") from error
