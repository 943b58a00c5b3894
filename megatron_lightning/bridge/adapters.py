"""Low-rank adapters in and out in the form of `peft`: `adapter_config.json` and
`adapter_model.safetensors`, from and to any layout, each rank its own boxes.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from megatron_lightning.bridge.adapter_names import (
    PREFIX,
    Place,
    Projection,
    adapter_table,
    places,
)
from megatron_lightning.bridge.export import check_dtype
from megatron_lightning.bridge.family import Family
from megatron_lightning.bridge.folder import read_json
from megatron_lightning.bridge.held import RankBoxes, held_boxes, ranks_of
from megatron_lightning.bridge.hf import family_named, family_of
from megatron_lightning.bridge.placing import plan_files, write_json
from megatron_lightning.bridge.record import SourceRecord
from megatron_lightning.bridge.safetensors_files import StoredTensor, read_header
from megatron_lightning.bridge.weights import FolderWeights
from megatron_lightning.bridge.writing import Export, begin_folder
from megatron_lightning.config.lora import LoraConfig, is_adapter
from megatron_lightning.config.model import GPTConfig
from megatron_lightning.models import MegatronModule

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_READ = ("r", "lora_alpha", "lora_dropout", "use_rslora", "base_model_name_or_path")
_TEXT = """
auto_mapping corda_config eva_config exclude_modules fan_in_fan_out inference_mode
layers_pattern layers_to_transform loftq_config lora_ga_config megatron_config
megatron_core monteclora_config peft_type peft_version qalora_group_size revision runtime_config
target_modules task_type
"""
_SAME_ANYWAY = frozenset(_TEXT.split())
"""Fields of a config that say nothing which the names in the file don't, or how it was begun."""
_FORMS = {
    "bias": ("none",),
    # Other beginnings (PiSSA, OLoRA, CorDA, LoftQ, LoRA-GA, ...) change the base.
    "init_lora_weights": (True, "gaussian", "orthogonal", "eva"),
}
"""Values of others that change nothing; null, false and empty ones don't either."""


def save_adapters(
    module: MegatronModule, path: str | Path, *, dtype: torch.dtype | None = None
) -> None:
    """Write the module's adapters to the new folder `path`, as `peft.PeftModel.from_pretrained`
    reads them. Under a MegatronStrategy all ranks call it, in or after a run of the Trainer.

    `dtype`: of the tensors, None for that of the weights. ValueError where there are none, or the
    architecture has no modules for them.
    """
    if module.lora is None:
        raise ValueError("save_adapters: the module has no adapters; see add_lora")
    check_dtype(dtype)
    family, config = _family(module)
    shapes = _adapter_shapes(module)
    found = places(module, family, config)
    table = adapter_table(found, shapes, family)
    whole, together = held_boxes(module)
    held = RankBoxes(
        {name: box for name, box in whole.boxes.items() if name in shapes}, whole.computed_in
    )
    ranks = ranks_of(module, together)
    mine = held.share(ranks)
    dtypes: dict[str, torch.dtype] = {}
    for one in ranks.gather("comparing dtypes", held.dtypes):
        dtypes |= one
    dtypes = ranks.broadcast("comparing dtypes", lambda: dtypes)
    entries = {
        there: (dtype or dtypes[name], table.theirs[there])
        for name, entry in table.entries.items()
        for there in entry.names
    }
    target = Path(path).resolve()
    partial = ranks.broadcast("beginning an export", lambda: begin_folder(target))
    files = plan_files(partial, entries, max_shard_bytes=2**63, single=WEIGHTS)
    names = {name: name for name in table.theirs}
    export = Export(path=target, files=files, table=table, names=names, mine=mine)
    try:
        ranks.broadcast("laying out files", files.create)
        ranks.gather("writing adapters", lambda: export.write(held))
        fields = _peft_config(module, module.lora, found, list(table.theirs))
        ranks.broadcast("ending an export", lambda: _finish(export, fields))
    except BaseException:
        if ranks.is_first:
            export.abandon()
        raise


def load_adapters(module: MegatronModule, path: str | Path) -> None:
    """Give the module the adapters of a folder of `peft`: their values are read when the network is
    built, or now if it is there as a whole.

    A module without adapters gets those that the file has. ValueError names what is missing, of
    another shape, or not supported (other methods than LoRA, embeddings, whole modules).
    """
    folder = Path(path)
    fields, tensors = _read(folder)
    family, config = _family(module)
    found = places(module, family, config)
    chosen = _chosen(tensors, found, folder)
    wanted = _config_of(fields, chosen, found, folder)
    if module.lora is None:
        module.add_lora(wanted)
    ours = (module.lora.rank, module.lora.scale) if module.lora is not None else None
    if ours != (wanted.rank, wanted.scale):
        raise ValueError(
            f"{folder / CONFIG}: rank {wanted.rank} and scale {wanted.scale:g}, but the module's"
            f" adapters have (rank, scale) = {ours}"
        )
    table = adapter_table(found, _adapter_shapes(module), family)
    _compare({n: t.shape for n, t in tensors.items()}, table.theirs, folder)
    source = FolderWeights(table, tensors)
    module.adapter_values = source
    if module.network is None:
        return
    if module._trainer is not None:
        raise ValueError(
            "load_adapters: the network was built for a Trainer already; call it before the module"
            " is given to one"
        )
    for name, parameter in module.network.named_parameters():
        if is_adapter(name):
            source.fill(parameter.detach(), name, (0,) * parameter.dim(), tuple(parameter.shape))


def _adapter_shapes(module: MegatronModule) -> dict[str, tuple[int, ...]]:
    prefix = f"{module.network_attribute}."
    shapes = module.global_shapes().items()
    return {name.removeprefix(prefix): shape for name, shape in shapes if is_adapter(name)}


def _family(module: MegatronModule) -> tuple[Family, GPTConfig]:
    config = module.config
    if not isinstance(config, GPTConfig):
        raise ValueError(f"{type(module).__name__}: its config is no GPTConfig")
    if module.source_record is None:
        return family_of(config), config
    record = SourceRecord.from_dict(module.source_record)
    return family_named(record.config["model_type"], "the imported model"), config


# ---------------------------------------------------------------------- writing


def _peft_config(
    module: MegatronModule,
    lora: LoraConfig,
    found: Mapping[Place, Projection],
    names: list[str],
) -> dict[str, Any]:
    adapted = {name.removeprefix(PREFIX).rpartition(".lora_")[0] for name in names}
    projections = {projection.module: projection for projection in found.values()}
    source = module.source_record
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": None if source is None else source["name"] or source["folder"],
        "inference_mode": True,
        "r": lora.rank,
        "lora_alpha": int(lora.alpha) if lora.alpha == int(lora.alpha) else lora.alpha,
        "lora_dropout": lora.dropout,
        "use_rslora": lora.rank_stabilised,
        "target_modules": short_names(adapted, set(projections)),
        "fan_in_fan_out": any(projections[name].transposed for name in adapted),
        "bias": "none",
        "init_lora_weights": True,
        "use_dora": False,
        "modules_to_save": None,
        "layers_to_transform": None,
        "layers_pattern": None,
        "rank_pattern": {},
        "alpha_pattern": {},
    }


def short_names(adapted: set[str], known: set[str]) -> list[str]:
    """Endings of module names that are those of `adapted` and of no other of `known`; whole names
    where only some layers have adapters.
    """
    chosen: set[str] = set()
    for name in adapted:
        words = name.split(".")
        endings = (".".join(words[-length:]) for length in range(1, len(words)))
        for ending in endings:
            if {n for n in known if n.endswith(f".{ending}")} <= adapted:
                chosen.add(ending)
                break
        else:
            chosen.add(name)
    return sorted(chosen)


def _finish(export: Export, fields: Mapping[str, Any]) -> None:
    write_json(export.files.folder / CONFIG, fields)
    export.put_in_place()


# ---------------------------------------------------------------------- reading


def _read(folder: Path) -> tuple[dict[str, Any], dict[str, StoredTensor]]:
    for name in (CONFIG, WEIGHTS):
        if not (folder / name).is_file():
            raise ValueError(f"{folder}: there is no {name}; give a folder that peft has saved")
    fields = read_json(folder / CONFIG)
    if fields.get("peft_type") != "LORA":
        raise ValueError(
            f"{folder / CONFIG}: peft_type={fields.get('peft_type')!r} is not supported; only LORA"
        )
    unknown = {
        key: value
        for key, value in fields.items()
        if key not in (*_READ, *_SAME_ANYWAY)
        and value not in _FORMS.get(key, ())
        and value not in (None, False, {}, [], "")
    }
    if unknown:
        raise ValueError(f"{folder / CONFIG}: {unknown} is not supported")
    return fields, read_header(folder / WEIGHTS)


def _chosen(
    tensors: Mapping[str, StoredTensor], found: Mapping[Place, Projection], folder: Path
) -> set[Place]:
    """The adapters that the file has."""
    by_module = {projection.module: place for place, projection in found.items()}
    chosen, strange = set(), []
    for name in tensors:
        module, _, kind = name.removeprefix(PREFIX).rpartition(".lora_")
        if module in by_module and kind in ("A.weight", "B.weight"):
            chosen.add(by_module[module])
        else:
            strange.append(name)
    if strange:
        raise ValueError(
            f"{folder / WEIGHTS}: {strange[:3]} belong to no linear layer of this model that can"
            " have an adapter"
        )
    if not chosen:
        raise ValueError(f"{folder / WEIGHTS} holds no adapter")
    return chosen


def _config_of(
    fields: Mapping[str, Any],
    chosen: set[Place],
    found: Mapping[Place, Projection],
    folder: Path,
) -> LoraConfig:
    missing = [name for name in ("r", "lora_alpha") if fields.get(name) is None]
    if missing:
        raise ValueError(f"{folder / CONFIG}: {missing} missing, and no value is guessed for them")
    for name, kinds in (("r", int), ("lora_alpha", (int, float)), ("lora_dropout", (int, float))):
        value = fields.get(name)
        if value is not None and (isinstance(value, bool) or not isinstance(value, kinds)):
            raise ValueError(f"{folder / CONFIG}: {name}={value!r}: not a number that it may be")
    return LoraConfig(
        rank=fields["r"],
        alpha=float(fields["lora_alpha"]),
        targets=_targets(chosen, found),
        dropout=float(fields.get("lora_dropout") or 0.0),
        rank_stabilised=bool(fields.get("use_rslora")),
    )


def _targets(chosen: set[Place], found: Mapping[Place, Projection]) -> tuple[str, ...]:
    """`LoraConfig.targets` that mean the chosen adapters of those that there may be."""
    names = {place: f"model.{place.path}" for place in found}
    parts: dict[str, set[str]] = {}
    for place in chosen:
        same = {names[p] for p in chosen if p.part == place.part}
        known = {names[p] for p in found if p.part == place.part}
        (ending,) = short_names({names[place]}, known - same | {names[place]})
        parts.setdefault(ending.removeprefix("model."), set()).add(place.part)
    targets = []
    for ending, own in sorted(parts.items()):
        every = {place.part for place in found if f".{place.path}".endswith(f".{ending}")}
        targets += [ending] if own == every else [f"{ending}:{part}" for part in sorted(own)]
    return tuple(targets)


def _compare(
    theirs: Mapping[str, tuple[int, ...]], ours: Mapping[str, tuple[int, ...]], folder: Path
) -> None:
    problems = [f"{name} is missing" for name in ours if name not in theirs]
    problems += [f"{name} has no adapter here" for name in theirs if name not in ours]
    problems += [
        f"{name} has shape {list(shape)}, not {list(ours[name])}"
        for name, shape in theirs.items()
        if name in ours and shape != ours[name]
    ]
    if problems:
        more = f" and {len(problems) - 3} more" if len(problems) > 3 else ""
        raise ValueError(f"{folder / WEIGHTS}: {'; '.join(problems[:3])}{more}")
