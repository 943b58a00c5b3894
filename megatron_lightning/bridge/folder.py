"""A model as the Hugging Face hub holds it: a folder with config.json and safetensors files."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from megatron_lightning.bridge.quantised import SourceTensor
from megatron_lightning.bridge.safetensors_files import StoredTensor, read_header

CONFIG, SINGLE, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"
COMPANIONS = (
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
    "tekken.json",
    "spiece.model",
    "vocab.txt",
    "LICENSE",
    "LICENSE.md",
    "LICENSE.txt",
    "NOTICE",
    "NOTICE.txt",
)
"""Files beside the weights that belong to a model and are copied with it."""


@dataclass(frozen=True)
class ModelFolder:
    """What a folder holds; no value has been read."""

    path: Path
    config: Mapping[str, Any]
    tensors: Mapping[str, StoredTensor]
    name: str = ""
    """Id on the hub; empty for a local folder."""


def open_folder(source: str | Path, *, revision: str | None = None) -> ModelFolder:
    """Read config and headers of a local folder, or of a repository of the hub by its id (which is
    downloaded first). ValueError names the file that is missing or damaged.
    """
    path = _local(source, revision)
    config = path / CONFIG
    if not config.is_file():
        raise ValueError(f"{path}: there is no {CONFIG}; give the folder of a Hugging Face model")
    name = "" if Path(source).is_dir() else str(source)
    return ModelFolder(path, read_json(config), _tensors(path), name)


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object. ValueError names the file."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is no JSON: {error}") from error
    if not isinstance(found, dict):
        raise ValueError(f"{path} holds no object")
    return found


def _local(source: str | Path, revision: str | None) -> Path:
    path = Path(source)
    if path.is_dir():
        return path
    name = str(source)
    if path.exists() or path.is_absolute() or name.startswith(".") or name.count("/") > 1:
        raise ValueError(f"{name}: there is no such folder; give a folder or an id of the hub")
    from huggingface_hub import snapshot_download

    wanted = [CONFIG, INDEX, "*.safetensors", "README.md", *COMPANIONS]
    try:
        return Path(snapshot_download(name, revision=revision, allow_patterns=wanted))
    except (OSError, ValueError) as error:
        raise ValueError(
            f"{name} is no folder here, and as an id it couldn't be had from the hub: {error}"
        ) from error


def _tensors(path: Path) -> dict[str, StoredTensor]:
    single, index = path / SINGLE, path / INDEX
    if not index.is_file():
        if single.is_file():
            return read_header(single)
        others = sorted(p.name for p in path.glob("*.bin"))[:2]
        note = f"; {others} are pickles, which are not read" if others else ""
        raise ValueError(f"{path}: there is neither {SINGLE} nor {INDEX}{note}")
    placed = read_json(index).get("weight_map")
    if not isinstance(placed, dict):
        raise ValueError(f"{index} has no weight_map")
    headers: dict[str, dict[str, StoredTensor]] = {}
    for file in sorted(set(placed.values())):
        if not isinstance(file, str) or Path(file).name != file:
            raise ValueError(f"{index}: {file!r} is no name of a file in this folder")
        if not (path / file).is_file():
            raise ValueError(f"{path / file} is missing, {INDEX} names it")
        headers[file] = read_header(path / file)
    wrong = sorted(name for name, file in placed.items() if name not in headers[file])
    wrong += sorted({n for held in headers.values() for n in held} - set(placed))
    if wrong:
        raise ValueError(f"{index} does not agree with its files about {wrong[:3]}")
    return {name: headers[file][name] for name, file in placed.items()}


def named_as(
    tensors: Mapping[str, SourceTensor], *, prefix: str, head: str, ignored: tuple[str, ...]
) -> tuple[dict[str, SourceTensor], bool]:
    """Tensors by the names of the model with its head, and whether the file has those of the bare
    model (without `prefix`). Tensors that match a glob of `ignored` are left out.
    """
    kept = {
        name: tensor
        for name, tensor in tensors.items()
        if not any(fnmatchcase(name, glob) for glob in ignored)
    }
    bare = not any(name.startswith(prefix) for name in kept)
    if not bare:
        return kept, False
    return {n if n == head else prefix + n: tensor for n, tensor in kept.items()}, True
