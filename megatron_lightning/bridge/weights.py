"""The weights of a model folder, as boxes of our parameters: each rank reads what it holds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from megatron_lightning.bridge.family import Family
from megatron_lightning.bridge.mapping import Shape, TensorMap, apply_rules
from megatron_lightning.bridge.progress import Bar
from megatron_lightning.bridge.quantised import SourceTensor
from megatron_lightning.bridge.safetensors_files import FileReader, StoredTensor
from megatron_lightning.checkpoint import Box
from megatron_lightning.config.lora import is_adapter
from megatron_lightning.config.model import GPTConfig
from megatron_lightning.models.module import MegatronModule


@dataclass
class FolderWeights:
    """A source of initial values (`layers.given.GivenValues`) that reads safetensors files."""

    table: TensorMap
    tensors: Mapping[str, SourceTensor]
    reader: FileReader = field(default_factory=FileReader)
    bar: Bar = field(default_factory=lambda: Bar("reading weights", " values"))

    def expect(self, elements: int) -> None:
        """Say how many values will be read, for the progress bar."""
        self.bar.expect(elements)

    def gives(self, name: str) -> bool:
        """Whether the files hold what `name`, relative to the network, is made of."""
        return name in self.table.entries

    @torch.no_grad()
    def fill(self, target: Tensor, name: str, offsets: Sequence[int], sizes: Sequence[int]) -> None:
        """Fill `target` (of shape `sizes`, any dtype and device) with that box of parameter `name`,
        a name relative to the network.
        """
        entry, wanted = self.table.entries[name], Box(tuple(offsets), tuple(sizes))
        for piece in entry.pieces:
            held = piece.cut(wanted)
            if held is None:
                continue
            view = held.to_theirs(target[held.ours.shift(wanted.offsets, sign=-1).slices()])
            stored = self.tensors[entry.names[piece.source]]
            stored.seen_as(piece.view).read(self.reader, held.theirs, view)
        if self.bar.total:
            self.bar.update(wanted.numel)

    def done(self) -> None:
        """Close the files."""
        self.reader.close()


def wanted_shapes(module: MegatronModule, family: Family) -> dict[str, Shape]:
    """Shapes of what the architecture's files hold, by name relative to the network: parameters,
    without those of adapters, and the buffers that a rule is about.
    """
    prefix = f"{module.network_attribute}."
    rules = family.rules(module.config)  # type: ignore[arg-type] - a GPTConfig
    buffers = {n.removeprefix(prefix): shape for n, shape in module.buffer_shapes().items()}
    buffers = {n: shape for n, shape in buffers.items() if any(rule.match(n) for rule in rules)}
    shapes = {n.removeprefix(prefix): shape for n, shape in module.global_shapes().items()}
    return {n: shape for n, shape in shapes.items() if not is_adapter(n)} | buffers


def match_weights(
    family: Family,
    config: GPTConfig,
    shapes: Mapping[str, Shape],
    tensors: Mapping[str, SourceTensor],
    origin: str,
) -> FolderWeights:
    """Pair every parameter (name relative to the network -> shape) with the tensors of a file.

    ValueError names tensors that are missing, of another shape, or belong to no parameter.
    """
    table = apply_rules(family.rules(config), shapes)
    problems = []
    missing = [name for name in table.theirs if name not in tensors]
    if missing:
        note = ""
        if family.output_layer in missing:
            note = f" ({family.output_layer} is absent in tied models: set tie_word_embeddings)"
        problems.append(f"tensors are missing: {_some(missing)}{note}")
    for name, shape in table.theirs.items():
        if name in tensors and tensors[name].shape != shape:
            problems.append(f"{name} has shape {list(tensors[name].shape)}, not {list(shape)}")
    integers = [n for n in table.theirs if n in tensors and not _is_float(tensors[n])]
    if integers:
        problems.append(f"quantised weights are not supported: {_some(integers)}")
    extra = [
        name for name in tensors if name not in table.theirs and not family.left_out(config, name)
    ]
    if config.tie_word_embeddings and family.output_layer in extra:
        extra.remove(family.output_layer)
        if not same_values(tensors[family.output_layer], tensors.get(family.word_embeddings)):
            problems.append(
                f"{family.output_layer} differs from {family.word_embeddings}, but the config says"
                " tie_word_embeddings=true; set it to false"
            )
    if extra:
        problems.append(f"tensors belong to no parameter: {_some(extra)}")
    if problems:
        raise ValueError("\n- ".join([f"{origin} doesn't fit its config:", *problems]))
    return FolderWeights(table, {name: tensors[name] for name in table.theirs})


def same_values(one: SourceTensor, other: SourceTensor | None) -> bool:
    """Whether two tensors in files are bitwise equal; reads them in blocks."""
    if not isinstance(one, StoredTensor) or not isinstance(other, StoredTensor):
        return False
    if (one.shape, one.dtype) != (other.shape, other.dtype):
        return False
    reader, whole = FileReader(), Box.whole(one.shape)
    try:
        pairs = zip(reader.blocks(one, whole), reader.blocks(other, whole), strict=True)
        return all(
            torch.equal(a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8))
            for (_, a), (_, b) in pairs
        )
    finally:
        reader.close()


def _is_float(stored: SourceTensor) -> bool:
    return stored.dtype.is_floating_point and stored.dtype.itemsize > 1


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - 5} others" if len(names) > 5 else ""
    return f"{list(names[:5])}{more}"
