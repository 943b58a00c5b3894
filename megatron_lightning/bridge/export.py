"""From a module in any layout to a folder that transformers loads.

Nothing is gathered. All ranks compute the same places of all tensors in the files; then each writes
the bytes of its own boxes there, replicas being shared out as in a checkpoint. The folder must be
on a file system that all ranks see, and appears under its name when it is complete.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from megatron_lightning.bridge import hub
from megatron_lightning.bridge.card import Facts, facts_of_trainer, model_card
from megatron_lightning.bridge.family import TOKEN_FIELDS, Family, difference
from megatron_lightning.bridge.held import held_for_export, ranks_of
from megatron_lightning.bridge.hf import family_named, family_of
from megatron_lightning.bridge.mapping import TensorMap, apply_rules
from megatron_lightning.bridge.placing import DEFAULT_SHARD_BYTES, plan_files
from megatron_lightning.bridge.progress import Bar
from megatron_lightning.bridge.record import SourceRecord
from megatron_lightning.bridge.safetensors_files import DTYPES
from megatron_lightning.bridge.source_config import SourceConfig
from megatron_lightning.bridge.tokenizer_files import (
    Companions,
    companions_of_source,
    companions_of_tokenizer,
)
from megatron_lightning.bridge.verify import verify_logits, verify_tensors
from megatron_lightning.bridge.weights import wanted_shapes
from megatron_lightning.bridge.writing import Export, Held, Shares, begin_folder
from megatron_lightning.checkpoint import Box
from megatron_lightning.checkpoint.ranks import RankGroup
from megatron_lightning.config.model import GPTConfig
from megatron_lightning.models import MegatronModule

_NAMES = {
    torch.float32: "float32",
    torch.bfloat16: "bfloat16",
    torch.float16: "float16",
    torch.float64: "float64",
}


def check_dtype(dtype: torch.dtype | None) -> None:
    """ValueError for a dtype that weights are not written in; None is that which they have."""
    if dtype is not None and dtype not in _NAMES:
        raise ValueError(f"dtype={dtype}: use one of {sorted(_NAMES.values())}")


@dataclass(frozen=True, kw_only=True)
class ExportOptions:
    """See `to_hf`."""

    dtype: torch.dtype | None = None
    architecture: str | None = None
    max_shard_bytes: int = DEFAULT_SHARD_BYTES
    tokenizer: str | Path | None = None
    tokenizer_digest: str | None = None
    """Of the tokenizer that the model was trained with, where that is known."""
    verify: bool = False
    push_to_hub: str | None = None
    facts: Facts = field(default_factory=dict)
    """What the model card says of the training."""
    replace: bool = False
    """Whether a folder that is there gives way to the new one."""
    merge_adapters: bool | None = None
    """Of checkpoints on disk; where a module is exported, the values are merged already."""

    def __post_init__(self) -> None:
        """ValueError for what no model could be written with."""
        check_dtype(self.dtype)
        if self.max_shard_bytes < 1:
            raise ValueError(f"max_shard_bytes={self.max_shard_bytes}: must be positive")
        if self.push_to_hub is not None:
            hub.check_repo_id(self.push_to_hub)

    def check_tokenizer(self, vocab_size: int) -> None:
        """ValueError where it is not there, is none, or has ids that a model of `vocab_size` has
        not; the first rank alone reads it.
        """
        if self.tokenizer is not None:
            companions_of_tokenizer(self.tokenizer, vocab_size)

    def with_facts(self, facts: Facts) -> ExportOptions:
        """The same with these facts in the model card, beneath those given."""
        return replace(self, facts={**facts, **self.facts})


def to_hf(
    module: MegatronModule,
    path: str | Path,
    *,
    dtype: torch.dtype | None = None,
    architecture: str | None = None,
    max_shard_bytes: int = DEFAULT_SHARD_BYTES,
    tokenizer: str | Path | None = None,
    verify: bool = False,
    push_to_hub: str | None = None,
    merge_adapters: bool | None = None,
) -> None:
    """Write the module's weights, config.json, tokenizer files and a model card to the new folder
    `path`.

    Under a MegatronStrategy all ranks must call it, in or after a run of the Trainer; elsewhere the
    module is whole, and one rank calls it. An imported model gets the names, dtypes and config that
    it came with; `dtype` replaces all dtypes, `architecture` (a `model_type`) the choice of the
    first that expresses the config. Files hold at most `max_shard_bytes` unless one tensor is
    larger. `tokenizer`: a tokenizer.json under any name, or a folder whose tokenizer files are
    copied; by default those of the source.
    `verify`: read all tensors back, and compare logits with transformers' where it is installed,
    before the folder gets its name. `push_to_hub`: id of a repository to upload it to.
    `merge_adapters`: of a module with adapters, whether they are added to the weights (True) or
    left out (False); None refuses it.

    ValueError when no architecture is this network, or `path` holds something already;
    CheckpointError when what was written differs. On several ranks a CheckpointError on all.
    """
    options = ExportOptions(
        dtype=dtype,
        architecture=architecture,
        max_shard_bytes=max_shard_bytes,
        tokenizer=tokenizer,
        verify=verify,
        push_to_hub=push_to_hub,
    )
    held, together = held_for_export(module, merge_adapters)
    if module._trainer is not None:
        options = options.with_facts(facts_of_trainer(module.trainer))
    export(module, held, Path(path), options, ranks_of(module, together))


def export(
    module: MegatronModule, held: Held, path: Path, options: ExportOptions, ranks: RankGroup
) -> None:
    """Write the values that all ranks hold together as the model that `module` is; see `to_hf`."""
    path = path.resolve()
    writing = begin_export(module, held, path, options, ranks)
    try:
        with Bar.of("writing", writing.num_bytes) as bar:
            ranks.gather("writing weights", lambda: writing.write(held, bar))
        if options.verify:
            with Bar.of("verifying", writing.num_bytes) as bar:
                ranks.gather("verifying weights", lambda: verify_tensors(writing, held, bar))
            ranks.broadcast("comparing logits", lambda: verify_logits(writing.files.folder, path))
        ranks.broadcast("ending an export", lambda: writing.put_in_place(replace=options.replace))
    except BaseException:
        if ranks.is_first:
            writing.abandon()
        raise
    repository = options.push_to_hub
    if repository is not None:
        ranks.broadcast("pushing to the hub", lambda: hub.push(path, repository))


def begin_export(
    module: MegatronModule,
    held: Held,
    path: Path,
    options: ExportOptions,
    ranks: RankGroup,
    *,
    mine: Shares | None = None,
) -> Export:
    """Make all files with their sizes and headers, and write what is small; on all ranks. `mine`:
    what `held.share` gave before in this layout.
    """
    record = record_of(module)
    family, fields = target_of(module, options.architecture)
    table = apply_rules(family.rules(_config_of(module)), wanted_shapes(module, family))
    dtypes = _dtypes(table, held, record, options.dtype, ranks)
    if options.dtype is not None:  # buffers keep theirs
        dtypes |= {n: torch.float32 for n in dtypes if family.stays_float32(n)}
    bare = record is not None and record.bare and family.model_type == record.config["model_type"]
    names = {n: n.removeprefix(family.prefix) if bare else n for n in table.theirs}
    entries = {names[n]: (dtypes[n], shape) for n, shape in table.theirs.items()}
    card = partial(
        model_card,
        path.name,
        architecture=family.architecture,
        dtypes=dtypes,
        parameters=sum(Box.whole(shape).numel for shape in table.theirs.values()),
        record=record,
        facts=options.facts,
    )
    vocab_size = _config_of(module).vocab_size
    companions = ranks.broadcast(
        "beginning an export", lambda: _companions(options, record, vocab_size)
    )
    fields = companions.complete(_with_dtype(fields, dtypes, options.dtype is not None))
    folder = ranks.broadcast(
        "beginning an export", lambda: begin_folder(path, replace=options.replace)
    )
    try:
        files = plan_files(folder, entries, options.max_shard_bytes)
        mine = held.share(ranks) if mine is None else mine
        mine = {name: boxes for name, boxes in mine.items() if name in table.entries}
        writing = Export(path=path, files=files, table=table, names=names, mine=mine)
        ranks.broadcast("laying out files", files.create)
        ranks.broadcast("laying out files", lambda: writing.describe(fields, companions, card()))
    except BaseException:
        if ranks.is_first:
            shutil.rmtree(folder, ignore_errors=True)
        raise
    return writing


def _companions(options: ExportOptions, record: SourceRecord | None, vocab_size: int) -> Companions:
    """Files of the tokenizer that was given, else of the model's source."""
    if options.tokenizer is None:
        return companions_of_source(None if record is None else record.folder)
    return companions_of_tokenizer(options.tokenizer, vocab_size, options.tokenizer_digest)


def record_of(module: MegatronModule) -> SourceRecord | None:
    """What the module was; None if it came from nowhere."""
    record = module.source_record
    return None if record is None else SourceRecord.from_dict(record)


def _config_of(module: MegatronModule) -> GPTConfig:
    config = module.config
    if not isinstance(config, GPTConfig):
        raise ValueError(f"{type(module).__name__}: its config is no GPTConfig")
    return config


def target_of(
    module: MegatronModule, architecture: str | None = None
) -> tuple[Family, dict[str, Any]]:
    """The architecture to write, and the fields of config.json. ValueError if there is none."""
    config, record = _config_of(module), record_of(module)
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
    if dtype is not None:
        return dict.fromkeys(table.theirs, dtype)
    if record is not None:
        return {name: DTYPES[record.others.get(name, record.dtype)] for name in table.theirs}
    all_held: dict[str, torch.dtype] = {}
    for one in ranks.gather("comparing dtypes", held.dtypes):
        all_held |= one
    all_held = ranks.broadcast("comparing dtypes", lambda: all_held)
    return {there: all_held[name] for name, entry in table.entries.items() for there in entry.names}
