"""From a module in any layout to a folder that transformers loads.

Nothing is gathered. All ranks compute the same places of all tensors in the files; then each writes
the bytes of its own boxes there, replicas being shared out as in a checkpoint. The folder must be
on a file system that all ranks see, and appears under its name when it is complete.
"""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from megatron_lightning.bridge.family import TOKEN_FIELDS, Family, difference
from megatron_lightning.bridge.folder import COMPANIONS, CONFIG
from megatron_lightning.bridge.hf import family_named, family_of
from megatron_lightning.bridge.mapping import TensorMap, apply_rules
from megatron_lightning.bridge.placing import DEFAULT_SHARD_BYTES, FileSet, plan_files, write_json
from megatron_lightning.bridge.record import SourceRecord
from megatron_lightning.bridge.safetensors_files import DTYPES, write_box
from megatron_lightning.bridge.source_config import SourceConfig
from megatron_lightning.checkpoint import Box, BoxedTensor
from megatron_lightning.checkpoint.files import sync_folder
from megatron_lightning.checkpoint.ranks import ALONE, RankGroup
from megatron_lightning.checkpoint.sharing import shares
from megatron_lightning.config.model import GPTConfig
from megatron_lightning.models import MegatronModule
from megatron_lightning.runtime.boxes import box_of

_NAMES = {
    torch.float32: "float32",
    torch.bfloat16: "bfloat16",
    torch.float16: "float16",
    torch.float64: "float64",
}


@dataclass(frozen=True, kw_only=True)
class ExportOptions:
    """See `to_hf`."""

    dtype: torch.dtype | None = None
    architecture: str | None = None
    max_shard_bytes: int = DEFAULT_SHARD_BYTES
    tokenizer: str | Path | None = None


class Held(Protocol):
    """Values of a network's parameters, by their names relative to it."""

    def dtypes(self) -> Mapping[str, torch.dtype]:
        """Dtypes of those that are here."""
        ...

    def share(self, ranks: RankGroup) -> Mapping[str, list[Box]]:
        """The boxes that this rank writes; over all ranks each element once."""
        ...

    def values(self, name: str, box: Box) -> Tensor:
        """Values of one of these boxes."""
        ...


@dataclass(frozen=True)
class RankBoxes:
    """What a rank of a layout holds."""

    boxes: Mapping[str, BoxedTensor]
    computed_in: Mapping[str, torch.dtype] = field(default_factory=dict)
    """Dtypes in which the network reads parameters that are kept in another."""

    def dtypes(self) -> Mapping[str, torch.dtype]:
        """See `Held`."""
        return {n: self.computed_in.get(n, value.dtype) for n, value in self.boxes.items()}

    def share(self, ranks: RankGroup) -> Mapping[str, list[Box]]:
        """See `Held`."""
        return shares(self.boxes, ranks)

    def values(self, name: str, box: Box) -> Tensor:
        """See `Held`."""
        return self.boxes[name].view_of(box)


def to_hf(
    module: MegatronModule,
    path: str | Path,
    *,
    dtype: torch.dtype | None = None,
    architecture: str | None = None,
    max_shard_bytes: int = DEFAULT_SHARD_BYTES,
    tokenizer: str | Path | None = None,
) -> None:
    """Write the module's weights, config.json and tokenizer files to the new folder `path`.

    Under a MegatronStrategy all ranks must call it, in or after a run of the Trainer; elsewhere the
    module is whole, and one rank calls it. An imported model gets the names, dtypes and config that
    it came with; `dtype` replaces all dtypes, `architecture` (a `model_type`) the choice of the
    first that expresses the config. Files hold at most `max_shard_bytes` unless one tensor is
    larger. `tokenizer`: folder whose tokenizer files are copied; by default that of the source.

    ValueError when no architecture is this network, or `path` holds something already; on several
    ranks as a CheckpointError on all of them.
    """
    held, together = _held(module)
    options = ExportOptions(
        dtype=dtype,
        architecture=architecture,
        max_shard_bytes=max_shard_bytes,
        tokenizer=tokenizer,
    )
    export(module, held, Path(path), options, RankGroup(None if together else ALONE))


def export(
    module: MegatronModule, held: Held, path: Path, options: ExportOptions, ranks: RankGroup
) -> None:
    """Write the values that all ranks hold together as the model that `module` is; see `to_hf`."""
    config = module.config
    if not isinstance(config, GPTConfig):
        raise ValueError(f"{type(module).__name__}: its config is no GPTConfig")
    record = None if module.source_record is None else SourceRecord.from_dict(module.source_record)
    family, fields = _target(config, record, options.architecture)
    prefix = f"{module.network_attribute}."
    shapes = {n.removeprefix(prefix): shape for n, shape in module.global_shapes().items()}
    table = apply_rules(family.rules(config), shapes)
    dtypes = _dtypes(table, held, record, options.dtype, ranks)
    bare = record is not None and record.bare and family.model_type == record.config["model_type"]
    names = {n: n.removeprefix(family.prefix) if bare else n for n in table.theirs}
    entries = {names[n]: (dtypes[n], shape) for n, shape in table.theirs.items()}
    partial = ranks.broadcast("beginning an export", lambda: _begin(path))
    try:
        files = plan_files(partial, entries, options.max_shard_bytes)
        mine = held.share(ranks)
        ranks.broadcast("laying out files", files.create)
        ranks.gather("writing weights", lambda: _write(held, mine, table, names, files))
        fields = _with_dtype(fields, dtypes, options.dtype is not None)
        source = options.tokenizer
        source = record.folder if source is None and record is not None else source
        ranks.broadcast("ending an export", lambda: _finish(path, files, fields, source))
    except BaseException:
        if ranks.is_first:
            shutil.rmtree(partial, ignore_errors=True)
        raise


def _held(module: MegatronModule) -> tuple[RankBoxes, bool]:
    """This rank's parts of the parameters, and whether other ranks have some."""
    prefix = f"{module.network_attribute}."
    strategy: Any = None if module._trainer is None else module.trainer.strategy
    model = _cut_model(strategy)
    if model is None:
        module.built_network()
        whole = module.canonical_parameters()
        boxes = {n.removeprefix(prefix): BoxedTensor.of(p.detach()) for n, p in whole.items()}
        return RankBoxes(boxes), False
    if strategy.update is not None:
        strategy.update.wait()
    boxes = {
        name.removeprefix(prefix): BoxedTensor.of(box_of(parameter.detach(), model.table[name]))
        for name, parameter in model.parameters.items()
    }
    dtypes = {name.removeprefix(prefix): dtype for name, dtype in model.compute_dtypes.items()}
    return RankBoxes(boxes, dtypes), True


def _cut_model(strategy: Any) -> Any:
    """This rank's part of the model; None where no strategy of this package has cut it, as in the
    process that started the ranks.
    """
    if not hasattr(type(strategy), "parallel_model"):
        return None
    try:
        return strategy.parallel_model
    except RuntimeError:
        return None


def _target(
    config: GPTConfig, record: SourceRecord | None, architecture: str | None
) -> tuple[Family, dict[str, Any]]:
    """The architecture to write, and the fields of config.json."""
    came_as = None if record is None else record.config["model_type"]
    wanted = came_as if architecture is None else architecture
    if record is not None and wanted == came_as:
        family = family_named(wanted, "the imported model")
        theirs = family.read(SourceConfig(record.config, "the config of the imported model"))
        if difference(config, theirs) is None:
            return family, dict(record.config)
    family = family_of(config) if wanted is None else family_named(wanted, "architecture")
    if (reason := family.expresses(config)) is not None:
        raise ValueError(f"architecture={wanted!r} is not this network: {reason}")
    kept = {} if record is None else record.config
    tokens = {k: kept[k] for k in TOKEN_FIELDS if k in kept}
    return family, {**family.config_json(config), **tokens}


def _with_dtype(
    fields: Mapping[str, Any], dtypes: Mapping[str, torch.dtype], asked: bool
) -> dict[str, Any]:
    """The fields of config.json with the dtype of most tensors; as they were imported if they name
    one and none was asked for.
    """
    field = "dtype" if "dtype" in fields else "torch_dtype"
    if field in fields and not asked:
        return dict(fields)
    held = list(dtypes.values())
    return {**fields, field: _NAMES[max(set(held), key=held.count)]}


def _dtypes(
    table: TensorMap,
    held: Held,
    record: SourceRecord | None,
    dtype: torch.dtype | None,
    ranks: RankGroup,
) -> dict[str, torch.dtype]:
    """Dtype of each tensor there: asked for, as it came, or as it is."""
    if dtype is not None and dtype not in _NAMES:
        raise ValueError(f"dtype={dtype}: use one of {sorted(_NAMES.values())}")
    if dtype is not None:
        return dict.fromkeys(table.theirs, dtype)
    if record is not None:
        return {name: DTYPES[record.others.get(name, record.dtype)] for name in table.theirs}
    all_held: dict[str, torch.dtype] = {}
    for one in ranks.gather("comparing dtypes", held.dtypes):
        all_held |= one
    all_held = ranks.broadcast("comparing dtypes", lambda: all_held)
    return {there: all_held[name] for name, entry in table.entries.items() for there in entry.names}


def _begin(path: Path) -> Path:
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise ValueError(f"{path} exists already; give a new folder")
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{secrets.token_hex(4)}.partial")
    partial.mkdir()
    return partial


def _write(
    held: Held,
    mine: Mapping[str, list[Box]],
    table: TensorMap,
    names: Mapping[str, str],
    files: FileSet,
) -> None:
    """Write this rank's share."""
    with files.opened() as descriptor_of:
        for ours, share in mine.items():
            entry = table.entries[ours]
            for box in share:
                whole = held.values(ours, box)
                for piece in (part for p in entry.pieces if (part := p.cut(box)) is not None):
                    stored = files.tensors[names[entry.names[piece.source]]]
                    values = whole[piece.ours.shift(box.offsets, sign=-1).slices()]
                    descriptor = descriptor_of(stored.file)
                    write_box(descriptor, stored, piece.theirs, piece.to_theirs(values))


def _finish(
    path: Path, files: FileSet, fields: Mapping[str, Any], source: str | Path | None
) -> None:
    """Write what is small, and put the folder in place."""
    folder = files.folder
    files.write_index()
    write_json(folder / CONFIG, fields)
    for name in COMPANIONS if source is not None else ():
        found = Path(source) / name  # type: ignore[arg-type] - not None here
        if found.is_file():
            shutil.copyfile(found, folder / name)
    sync_folder(folder)
    if path.is_dir():
        path.rmdir()
    os.replace(folder, path)
    sync_folder(path.absolute().parent)
