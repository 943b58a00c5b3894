"""Between Hugging Face folders and this package's checkpoints on disk: one process, no network in
memory, a box at a time.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import lightning
import torch
from torch import Tensor

from megatron_lightning.bridge.card import facts_of_checkpoint
from megatron_lightning.bridge.export import ExportOptions, check_dtype, export
from megatron_lightning.bridge.load import from_hf
from megatron_lightning.bridge.merge import Factors, factors_of, merged, weights_with_adapters
from megatron_lightning.bridge.weights import FolderWeights
from megatron_lightning.checkpoint import Box, CheckpointError, load_metadata, load_objects
from megatron_lightning.checkpoint.config_codec import CODEC
from megatron_lightning.checkpoint.convert import Content, LazyTensor
from megatron_lightning.checkpoint.convert.content import MODEL, exact_weights
from megatron_lightning.checkpoint.convert.native import pieces, read_native, write_native
from megatron_lightning.checkpoint.ranks import ALONE, RankGroup
from megatron_lightning.config.lora import is_adapter
from megatron_lightning.config.model import GPTConfig
from megatron_lightning.models import GPTModel
from megatron_lightning.models.adapters import ADAPTER_RECORD
from megatron_lightning.models.module import SOURCE_RECORD, TOKENIZER_DIGEST


@dataclass(frozen=True)
class StoredValues:
    """The weights of a checkpoint, read when they are written (`export.Held`)."""

    tensors: Mapping[str, LazyTensor]

    def dtypes(self) -> Mapping[str, torch.dtype]:
        """See `Held`."""
        return {name: tensor.dtype for name, tensor in self.tensors.items()}

    def share(self, ranks: RankGroup) -> Mapping[str, list[Box]]:
        """All of them, in boxes of about 64 MiB."""
        return {name: pieces(tensor) for name, tensor in self.tensors.items()}

    def values(self, name: str, box: Box) -> Tensor:
        """See `Held`."""
        return self.tensors[name].part(box)


def import_checkpoint(
    source: str | Path,
    target: str | Path,
    *,
    overrides: Mapping[str, Any] | None = None,
    dtype: torch.dtype | None = None,
    files: int = 1,
) -> Content:
    """Write the checkpoint folder `target` with the weights of a Hugging Face model, which
    `GPTModel.load_from_checkpoint` reads; returns what was written.

    `dtype`: of the weights, None for those of the source. ValueError as for `from_hf`.
    """
    target = Path(target)
    if target.exists():
        raise ValueError(f"target={str(target)!r} exists; choose another name or remove it")
    check_dtype(dtype)
    if files < 1:
        raise ValueError(f"files={files}: give at least 1")
    model = from_hf(source, overrides=overrides)
    weights: Any = model.initial_values
    prefix = f"{model.network_attribute}."
    tensors = {
        MODEL + name: _lazy(weights, name.removeprefix(prefix), shape)
        for name, shape in (model.global_shapes() | _given_buffers(model, weights)).items()
    }
    kept = {
        "hyper_parameters": {"config": model.config},
        SOURCE_RECORD: model.source_record,
        "pytorch-lightning_version": lightning.__version__,  # else Lightning doesn't take it
    }
    content = Content(
        origin=str(source),
        tensors=tensors,
        objects=CODEC.encode(kept).tree,
        metadata={"converted_from": str(source)},
    )
    if dtype is not None:
        content = _with_dtype(content, model, dtype)
    target.absolute().parent.mkdir(parents=True, exist_ok=True)
    try:
        write_native(target, content, files=files)
    finally:
        weights.reader.close()
    return content


def _given_buffers(model: GPTModel, weights: FolderWeights) -> dict[str, tuple[int, ...]]:
    """Buffers that the files have values for."""
    prefix = f"{model.network_attribute}."
    shapes = model.buffer_shapes()
    return {name: shape for name, shape in shapes.items() if weights.gives(name[len(prefix) :])}


def _with_dtype(content: Content, model: GPTModel, dtype: torch.dtype) -> Content:
    """With weights in a dtype; buffers keep theirs."""
    kept = {MODEL + name for name in model.buffer_shapes()}
    buffers = {name: tensor for name, tensor in content.tensors.items() if name in kept}
    content = content.with_weights_dtype(dtype)
    return replace(content, tensors={**content.tensors, **buffers})


def _lazy(weights: FolderWeights, name: str, shape: tuple[int, ...]) -> LazyTensor:
    sources = weights.table.entries[name].names
    dtypes = {weights.tensors[source].dtype for source in sources}
    dtype = dtypes.pop() if len(dtypes) == 1 else torch.float32

    def part(box: Box) -> Tensor:
        target = torch.empty(box.sizes, dtype=dtype)
        weights.fill(target, name, box.offsets, box.sizes)
        return target

    return LazyTensor(shape, dtype, part)


def export_checkpoint(
    source: str | Path, target: str | Path, options: ExportOptions | None = None
) -> Content:
    """Write the weights of a checkpoint folder of a GPTModel as a Hugging Face folder; returns what
    was read. Float32 weights are taken from the masters where there are some; of a checkpoint that
    holds adapters alone, those of the base from the folder that the run began from.
    """
    options = options or ExportOptions()
    content = read_native(Path(source))
    objects = load_objects(source, codec=CODEC)
    config = (objects.get("hyper_parameters") or {}).get("config")
    if not isinstance(config, GPTConfig):
        raise CheckpointError(f"{source} does not hold a GPTModel: no config among its arguments")
    module = GPTModel(config)
    module.source_record = objects.get(SOURCE_RECORD)
    adapted = objects.get(ADAPTER_RECORD)
    if adapted is not None:
        module.add_lora(adapted["config"])
    if options.dtype is not None and options.dtype.itemsize > 2:  # else rounded once, at the end
        content = _with_dtype(content, module, options.dtype)
    prefix = f"{module.network_attribute}."
    tensors = {n.removeprefix(prefix): t for n, t in exact_weights(content).items()}
    if adapted is not None and adapted["without_base"]:
        tensors = _base_of(module, str(source)) | tensors
    shapes = module.global_shapes() | module.buffer_shapes()
    shapes = {n.removeprefix(prefix): shape for n, shape in shapes.items()}
    if {name: tensor.shape for name, tensor in tensors.items()} != shapes:
        wrong = sorted(set(tensors) ^ set(shapes)) or "their shapes"
        raise CheckpointError(f"{source}: its tensors are not those of its config: {wrong}")
    facts = facts_of_checkpoint(objects, load_metadata(source, codec=CODEC))
    options = replace(options.with_facts(facts), tokenizer_digest=objects.get(TOKENIZER_DIGEST))
    factors = partial(_factors, module, tensors)
    held = merged(module, StoredValues(tensors), options.merge_adapters, factors)
    export(module, held, Path(target), options, RankGroup(ALONE))
    return content


def _base_of(module: GPTModel, origin: str) -> dict[str, LazyTensor]:
    """Values of the frozen base, from the folder that it came from."""
    if module.source_record is None:
        raise CheckpointError(f"{origin} holds adapters alone, over a base that came from nowhere")
    base = from_hf(module.source_record["folder"])
    weights: Any = base.initial_values
    prefix = f"{base.network_attribute}."
    named = {name.removeprefix(prefix): shape for name, shape in base.global_shapes().items()}
    return {name: _lazy(weights, name, shape) for name, shape in named.items()}


def _factors(module: GPTModel, tensors: Mapping[str, LazyTensor]) -> Mapping[str, Factors]:
    adapters = {n: partial(t.part, Box.whole(t.shape)) for n, t in tensors.items() if is_adapter(n)}
    shapes = {name: tensors[name].shape for name in weights_with_adapters(adapters)}
    places = {name: ((0,) * len(shape), shape) for name, shape in shapes.items()}
    return factors_of(module, adapters, places)
