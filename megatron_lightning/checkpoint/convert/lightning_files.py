"""Lightning's own checkpoints: one `.ckpt` file (single device, DDP, FSDP with full state), or the
folder of its sharded strategies (`FSDPStrategy`, `ModelParallelStrategy`).

Both are made of pickles. The file is read by torch's restricted loader, which knows tensors, plain
values and the config classes of this package; the folder like any DCP folder.
"""

from __future__ import annotations

import pickle
import zipfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_lightning.checkpoint.config_codec import CODEC
from megatron_lightning.checkpoint.convert.content import GROUPS, MODEL, OPTIMIZER, Content
from megatron_lightning.checkpoint.convert.lazy import LazyTensor
from megatron_lightning.checkpoint.convert.torch_dcp import DcpFolder, load_archive, read_dcp
from megatron_lightning.checkpoint.errors import CheckpointError
from megatron_lightning.config.model import GPTConfig

META = "meta.pt"
STATE_DICTS = ("state_dict.", "model.")
"""What the weights' names begin with in a sharded folder, by strategy."""
_HEAD = "network.output_layer.weight"
_VOCABULARY = ("network.embedding.word_embeddings.weight", _HEAD)
"""Parameters of a GPT that other strategies hold with rows of padding."""
_KEYS = ("state_dict", "optimizer_states")
GroupOf = Callable[[Mapping[str, Any], str, tuple[int, ...]], str]
"""(hyper-parameters, name, shape) -> name of the optimizer's group that the parameter is in."""


def read_lightning_file(
    path: Path, group_of: GroupOf | None = None, *, weights_only: bool = False
) -> Content:
    """The contents of a `.ckpt` file; tensors are mapped, not read. CheckpointError if it holds
    anything but tensors, plain values and configs.
    """
    checkpoint = _load_file(path)
    state = checkpoint.get("state_dict")
    if not isinstance(state, Mapping) or not state:
        raise CheckpointError(f"{path} is no checkpoint of Lightning: it has no state_dict")
    objects = {key: value for key, value in checkpoint.items() if key not in _KEYS}
    weights: dict[str, Tensor] = {}
    places: set[tuple[int, tuple[int, ...]]] = set()
    for name, value in state.items():
        place = (value.data_ptr(), tuple(value.shape)) if isinstance(value, Tensor) else None
        if place is not None and (place not in places or not value.numel()):
            weights[name] = value  # of tied ones the first
            places.add(place)
    tensors = {MODEL + name: LazyTensor.held(value) for name, value in weights.items()}
    groups: list[Any] = []
    optimizers = [] if weights_only else checkpoint.get("optimizer_states") or []
    for index, optimizer in enumerate(optimizers):
        names = _parameter_names(optimizer, weights, objects, group_of, path)
        groups.append([_group(group) for group in optimizer["param_groups"]])
        for key, entries in optimizer["state"].items():
            for kind, value in entries.items():
                if isinstance(value, Tensor):
                    name = f"{OPTIMIZER}{index}.{kind}.{names[key]}"
                    tensors[name] = LazyTensor.held(value)
    if groups:
        objects[GROUPS] = groups
    return _content(path, objects, tensors)


def read_lightning_folder(folder: Path) -> Content:
    """The contents of the folder of a sharded strategy; its tensors are read when asked for."""
    found = read_dcp(folder)
    prefix = next(
        (p for p in STATE_DICTS if any(name.startswith(p) for name in found.tensors)), None
    )
    if prefix is None:
        raise CheckpointError(f"{folder} holds no weights (no tensor {' or '.join(STATE_DICTS)})")
    objects: dict[str, Any] = {}
    if (folder / META).is_file():
        objects = dict(_load_file(folder / META))
    weights = {
        name.removeprefix(prefix): tensor
        for name, tensor in found.tensors.items()
        if name.startswith(prefix)
    }
    config = _gpt_config(objects)
    if config is not None and config.tie_word_embeddings:
        weights.pop(_HEAD, None)
    tensors = {MODEL + name: tensor for name, tensor in weights.items()}
    index = 0
    groups: list[Any] = []
    while any(name.startswith(f"optimizer_{index}.") for name in found.tensors):
        for name, tensor in found.tensors.items():
            start = f"optimizer_{index}.state."
            if name.startswith(start):
                parameter, _, kind = name.removeprefix(start).rpartition(".")
                if parameter in weights:
                    tensors[f"{OPTIMIZER}{index}.{kind}.{parameter}"] = tensor
        groups.append([_group(group) for group in _groups(found, index)])
        index += 1
    if groups:
        objects[GROUPS] = groups
    return _content(folder, objects, tensors)


def _groups(found: DcpFolder, index: int) -> list[dict[str, Any]]:
    """The parameter groups of an optimizer: stored as one value, or one for each entry."""
    name = f"optimizer_{index}.param_groups"
    if name in found.values:
        return list(found.read_value(name))
    groups: dict[int, dict[str, Any]] = {}
    for full in found.values:
        if full.startswith(f"{name}."):
            number, _, key = full.removeprefix(f"{name}.").partition(".")
            if number.isdigit() and "." not in key:
                groups.setdefault(int(number), {})[key] = found.read_value(full)
    return [groups[number] for number in sorted(groups)]


def _group(group: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key not in ("params", "param_names")}


def _content(path: Path, objects: Mapping[str, Any], tensors: Mapping[str, LazyTensor]) -> Content:
    config = _gpt_config(objects)
    if config is not None:
        tensors = {
            name: tensor.first(config.vocab_size)
            if name.endswith(_VOCABULARY) and tensor.shape
            else tensor
            for name, tensor in tensors.items()
        }
    try:
        encoded = CODEC.encode(dict(objects))
    except ValueError as error:
        raise CheckpointError(f"{path}: {error}") from error
    taken = {name: LazyTensor.held(value) for name, value in encoded.tensors.items()}
    step = objects.get("global_step")
    return Content(
        origin=str(path),
        tensors={**tensors, **taken},
        objects=encoded.tree,
        metadata={} if step is None else {"global_step": step},
    )


def _gpt_config(objects: Mapping[str, Any]) -> GPTConfig | None:
    config = (objects.get("hyper_parameters") or {}).get("config")
    return config if isinstance(config, GPTConfig) else None


def _load_file(path: Path) -> dict[str, Any]:
    with torch.serialization.safe_globals(list(CODEC.classes)):
        try:
            loaded = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        except (pickle.UnpicklingError, RuntimeError, ValueError, zipfile.BadZipFile, OSError):
            # in the old form, or not readable at all: the message comes from here
            loaded = load_archive(path.read_bytes(), str(path))
    if not isinstance(loaded, dict):
        raise CheckpointError(f"{path} holds a {type(loaded).__name__}, not a checkpoint")
    return loaded


def _parameter_names(
    optimizer: Mapping[str, Any],
    weights: Mapping[str, Tensor],
    objects: Mapping[str, Any],
    group_of: GroupOf | None,
    path: Path,
) -> dict[Any, str]:
    """Name of each parameter that an optimizer numbers.

    An optimizer's state has no names unless it was built with them. Its groups then list parameters
    in the order of the module, which shapes must confirm.
    """
    groups = optimizer["param_groups"]
    names: dict[Any, str] = {}
    for group in groups:
        if "param_names" in group:
            found: Sequence[str] = group["param_names"]
        elif len(groups) == 1:
            found = [n for n, w in weights.items() if w.is_floating_point()]
        elif group_of is not None and "name" in group:
            hyper_parameters = objects.get("hyper_parameters") or {}
            found = [
                name
                for name, weight in weights.items()
                if group_of(hyper_parameters, name, tuple(weight.shape)) == group["name"]
            ]
        else:
            found = []
        if len(found) == len(group["params"]):
            names |= dict(zip(group["params"], found, strict=True))
    for key, entries in optimizer["state"].items():
        shapes = [tuple(v.shape) for v in entries.values() if isinstance(v, Tensor) and v.dim()]
        if key not in names or any(shape != tuple(weights[names[key]].shape) for shape in shapes):
            raise CheckpointError(
                f"{path}: its optimizer numbers parameters in a way that does not fit the weights "
                f"(parameter {key}); convert with --weights-only"
            )
    return names
