"""Weights in few bits, read as bfloat16: a box at a time, from the bytes that it needs.

MXFP4 (OCP Microscaling Formats 1.0), as GPT-OSS is published: 32 neighbouring inputs share a power
of two, each has four bits, two of them in a byte. FP8 in blocks, as DeepSeek-V3 is published: a
float32 factor for each tile of 128 x 128.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor

from megatron_lightning.bridge.safetensors_files import FileReader, StoredTensor
from megatron_lightning.checkpoint import Box

FIELD = "quantization_config"
_GROUP = 32
"""Inputs that share a scale in MXFP4."""
_AT_ONCE = 1 << 20
"""Values that are made at once."""
_FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


class SourceTensor(Protocol):
    """A tensor that a file holds in some form."""

    @property
    def dtype(self) -> torch.dtype:
        """Of its values."""
        ...

    @property
    def shape(self) -> tuple[int, ...]:
        """Its shape."""
        ...

    @property
    def num_bytes(self) -> int:
        """Size of its values."""
        ...

    def seen_as(self, view: tuple[int, ...] | None) -> SourceTensor:
        """As a tensor of another shape with the same values in the same order."""
        ...

    def read(self, reader: FileReader, box: Box, target: Tensor) -> None:
        """Fill `target` (the box's sizes, any dtype and device) with a box of it."""
        ...


@dataclass(frozen=True)
class Mxfp4Tensor:
    """Experts (E, in, *out) of which the file holds, in uint8, blocks (E, out, in / 32, 16) and
    scales (E, out, in / 32).
    """

    blocks: StoredTensor
    scales: StoredTensor
    shape: tuple[int, ...]
    dtype: ClassVar[torch.dtype] = torch.bfloat16

    @classmethod
    def of(cls, blocks: StoredTensor, scales: StoredTensor, name: str) -> Mxfp4Tensor:
        """Pair the two. ValueError when they don't fit."""
        fits = len(blocks.shape) == 4 and blocks.shape[-1] == _GROUP // 2
        if not fits or scales.shape != blocks.shape[:-1]:
            raise ValueError(
                f"{name}: MXFP4 blocks of shape {list(blocks.shape)} and scales of"
                f" {list(scales.shape)} don't fit"
            )
        experts, out, groups = scales.shape
        return cls(blocks, scales, (experts, groups * _GROUP, out))

    @property
    def num_bytes(self) -> int:
        """See `SourceTensor`."""
        return Box.whole(self.shape).numel * self.dtype.itemsize

    def seen_as(self, view: tuple[int, ...] | None) -> Mxfp4Tensor:
        """See `SourceTensor`; only the last dim may be taken apart."""
        if view is None:
            return self
        assert view[:2] == self.shape[:2]
        return replace(self, shape=view)

    def read(self, reader: FileReader, box: Box, target: Tensor) -> None:
        """See `SourceTensor`."""
        experts, inputs, *out = self.shape
        blocks = self.blocks.seen_as((experts, *out, inputs // _GROUP, _GROUP // 2))
        scales = self.scales.seen_as((experts, *out, inputs // _GROUP))
        start, size = box.offsets[1], box.sizes[1]
        first, last = start // _GROUP, -(-(start + size) // _GROUP)
        outer = Box(_without(box.offsets, 1), _without(box.sizes, 1))
        for part in _parts(outer, _AT_ONCE // max(1, size)):
            offsets, sizes = (*part.offsets, first), (*part.sizes, last - first)
            exponents = torch.empty(sizes, dtype=torch.uint8)
            reader.read(scales, Box(offsets, sizes), exponents)
            nibbles = torch.empty((*sizes, _GROUP // 2), dtype=torch.uint8)
            reader.read(blocks, Box((*offsets, 0), (*sizes, _GROUP // 2)), nibbles)
            values = mxfp4_values(nibbles, exponents).narrow(-1, start - first * _GROUP, size)
            here = part.shift(outer.offsets, sign=-1)
            target.movedim(1, -1)[here.slices()].copy_(values)


def mxfp4_values(blocks: Tensor, scales: Tensor) -> Tensor:
    """(..., groups, 16) and (..., groups) uint8 -> (..., groups * 32) bfloat16; the low four bits
    come first.
    """
    table = torch.tensor((*_FP4, *(-x for x in _FP4)), dtype=torch.float32)
    pairs = torch.stack((blocks & 15, blocks >> 4), dim=-1).flatten(-2)  # (..., groups, 32)
    exponents = scales.to(torch.int32)[..., None] - 127
    return torch.ldexp(table[pairs.int()], exponents).to(torch.bfloat16).flatten(-2)


@dataclass(frozen=True)
class Fp8Tensor:
    """A matrix of float8 with a factor for each tile."""

    values: StoredTensor
    factors: StoredTensor
    tile: tuple[int, int]
    dtype: ClassVar[torch.dtype] = torch.bfloat16

    @classmethod
    def of(
        cls, values: StoredTensor, factors: StoredTensor, tile: tuple[int, int], name: str
    ) -> Fp8Tensor:
        """Pair the two. ValueError when they don't fit."""
        tiles = tuple(-(-size // edge) for size, edge in zip(values.shape, tile, strict=False))
        if len(values.shape) != 2 or factors.shape != tiles:
            raise ValueError(
                f"{name}: FP8 values of shape {list(values.shape)} in tiles of {list(tile)} and"
                f" factors of {list(factors.shape)} don't fit"
            )
        return cls(values, factors, tile)

    @property
    def shape(self) -> tuple[int, ...]:
        """See `SourceTensor`."""
        return self.values.shape

    @property
    def num_bytes(self) -> int:
        """See `SourceTensor`."""
        return Box.whole(self.shape).numel * self.dtype.itemsize

    def seen_as(self, view: tuple[int, ...] | None) -> Fp8Tensor:
        """See `SourceTensor`; as it is only."""
        assert view is None
        return self

    def read(self, reader: FileReader, box: Box, target: Tensor) -> None:
        """See `SourceTensor`."""
        for part in _parts(box, _AT_ONCE):
            first = tuple(o // edge for o, edge in zip(part.offsets, self.tile, strict=True))
            last = tuple(
                -(-(o + s) // edge)
                for o, s, edge in zip(part.offsets, part.sizes, self.tile, strict=True)
            )
            tiles = Box(first, tuple(b - a for a, b in zip(first, last, strict=True)))
            factors = torch.empty(tiles.sizes, dtype=torch.float32)
            reader.read(self.factors, tiles, factors)
            values = torch.empty(part.sizes, dtype=self.values.dtype)
            reader.read(self.values, part, values)
            for dim, edge in enumerate(self.tile):
                skipped = part.offsets[dim] - first[dim] * edge
                factors = factors.repeat_interleave(edge, dim=dim)
                factors = factors.narrow(dim, skipped, part.sizes[dim])
            here = part.shift(box.offsets, sign=-1)
            target[here.slices()].copy_((values.float() * factors).to(self.dtype))


def without_quantisation(
    values: Mapping[str, Any], tensors: Mapping[str, StoredTensor], origin: str
) -> tuple[dict[str, Any], dict[str, SourceTensor]]:
    """A config and tensors of a file as those of the model in bfloat16. ValueError names what is
    not supported.
    """
    fields: Any = values.get(FIELD)
    if not fields:
        return dict(values), dict(tensors)
    method = fields.get("quant_method") if isinstance(fields, Mapping) else None
    kept = {name: value for name, value in values.items() if name != FIELD}
    if method == "mxfp4":
        return kept, _paired(tensors, "_blocks", "_scales", Mxfp4Tensor.of)
    if method == "fp8":
        tile = fields.get("weight_block_size")
        if not isinstance(tile, list) or len(tile) != 2:
            raise ValueError(
                f"{origin}: {FIELD}.weight_block_size={tile!r}: FP8 weights with other factors than"
                " one for each tile are not supported"
            )
        edges = (int(tile[0]), int(tile[1]))
        return kept, _paired(
            tensors, "", "_scale_inv", lambda v, f, name: Fp8Tensor.of(v, f, edges, name)
        )
    raise ValueError(
        f"{origin}: {FIELD}.quant_method={method!r} is not supported; supported are 'fp8' (in"
        " tiles) and 'mxfp4'; give a folder with weights in bfloat16"
    )


def _paired(
    tensors: Mapping[str, StoredTensor], main: str, second: str, make: Any
) -> dict[str, SourceTensor]:
    """Each NAME + main with NAME + second as one tensor NAME; all others as they are."""
    names = [n.removesuffix(second) for n in tensors if n.endswith(second)]
    pairs = {name for name in names if name + main in tensors}
    parts = {name + end for name in pairs for end in (main, second)}
    rest: dict[str, SourceTensor] = {n: t for n, t in tensors.items() if n not in parts}
    made = {n: make(tensors[n + main], tensors[n + second], n) for n in sorted(pairs)}
    return {**rest, **made}


def _parts(box: Box, most: int) -> Iterator[Box]:
    """The box in parts of at most `most` elements, or of one."""
    pieces = box.cut(2) if box.numel > max(1, most) else [box]
    if len(pieces) == 1:
        yield box
        return
    for piece in pieces:
        yield from _parts(piece, most)


def _without(values: tuple[int, ...], index: int) -> tuple[int, ...]:
    return (*values[:index], *values[index + 1 :])
