"""From a Hugging Face model to a LightningModule that knows where its weights are.

Reading config and headers is all that happens here. The values are read when the network is built,
under the strategy by each rank the bytes of its boxes, and as a whole at the first call outside of
a Trainer.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from megatron_lightning.bridge.adapter_names import joined_layers
from megatron_lightning.bridge.folder import CONFIG, ModelFolder, named_as, open_folder
from megatron_lightning.bridge.hf import family_named
from megatron_lightning.bridge.quantised import SourceTensor, without_quantisation
from megatron_lightning.bridge.record import SourceRecord
from megatron_lightning.bridge.safetensors_files import DTYPES
from megatron_lightning.bridge.source_config import SourceConfig
from megatron_lightning.bridge.weights import match_weights, wanted_shapes
from megatron_lightning.models import GPTModel, MegatronModule

M = TypeVar("M", bound=MegatronModule)


def from_hf(
    path: str | Path,
    *,
    model_class: type[M] = GPTModel,
    overrides: Mapping[str, Any] | None = None,
    revision: str | None = None,
    **arguments: Any,
) -> M:
    """Make a LightningModule of the model in a local folder, or of a repository of the hub by its
    id, which architecture it is being read from `model_type` in its config.

    `overrides` replace fields of config.json (None: as if absent), for files that lack a number or
    have fields without an effect. `arguments` go to the constructor of `model_class`, after the
    config. ValueError names what is missing or not supported.
    """
    folder = open_folder(path, revision=revision)
    origin = str(folder.path / CONFIG)
    given = {**folder.config, **(overrides or {})}
    values, held = without_quantisation(given, folder.tensors, origin)
    family = family_named(values.get("model_type"), origin)
    config = family.read(SourceConfig(values, origin))
    if problems := config.check():
        raise ValueError("\n- ".join([f"{origin} can't be followed:", *problems]))
    tensors, bare = named_as(
        held,
        prefix=family.prefix,
        head=family.output_layer,
        ignored=family.ignored,
    )
    module = model_class(config, **arguments)  # type: ignore[call-arg] - a GPTModel or like it
    shapes = wanted_shapes(module, family)
    module.initial_values = match_weights(family, config, shapes, tensors, str(folder.path))
    record = _record(folder, values, tensors, bare)
    module.source_record = replace(record, joined=joined_layers(module, family)).to_dict()
    return module


def _record(
    folder: ModelFolder,
    values: dict[str, Any],
    tensors: Mapping[str, SourceTensor],
    bare: bool,
) -> SourceRecord:
    names = {dtype: name for name, dtype in DTYPES.items()}
    sizes: Counter[str] = Counter()
    for stored in tensors.values():
        sizes[names[stored.dtype]] += stored.num_bytes
    main = sizes.most_common(1)[0][0]
    others = {n: names[s.dtype] for n, s in tensors.items() if names[s.dtype] != main}
    return SourceRecord(
        folder=str(folder.path.absolute()),
        config=values,
        dtype=main,
        others=others,
        bare=bare,
        name=folder.name,
    )
