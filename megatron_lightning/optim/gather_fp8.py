"""The gather of a parameter bucket in which weights of low-precision layers travel in E4M3.

Each such weight has the scale that its layer would take, of the largest value of what this tensor
rank holds of it. What arrives is put into the parameters' memory in their own dtype, which holds
E4M3 times a power of two exactly: the layer then rounds to the same numbers as from a weight
gathered whole (by the next scale, if the largest value was rounded down to half of the range).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron_lightning.parallel.axes import MeshAxis
from megatron_lightning.parallel.collectives import all_gather_single, all_reduce_
from megatron_lightning.precision.formats import E4M3_MAX, cast_fp8, power_of_two_scale

_ALIGNMENT = 16
"""Bytes; a piece begins at a multiple of it."""


class _Piece(NamedTuple):
    start: int
    stop: int
    weight: int | None
    """Which of the weights in eight bits it belongs to."""
    place: int
    """First byte in what its rank sends."""
    size: int
    """Bytes."""


class FP8Gather:
    """Gathers `data`, of which each rank of `shard` holds one of equal slices; `spans` are the
    (start, stop) of the weights in eight bits.
    """

    def __init__(self, data: Tensor, shard: MeshAxis, spans: Sequence[tuple[int, int]]) -> None:
        self._data, self._shard = data, shard
        self._spans = list(spans)
        length = data.numel() // shard.size
        self._pieces = [
            _pieces(rank * length, (rank + 1) * length, spans, data.element_size())
            for rank in range(shard.size)
        ]
        self.bytes = max(pieces[-1].place + pieces[-1].size for pieces in self._pieces)
        """What each rank sends."""
        self._inverses: Tensor | None = None
        self._joined: Tensor | None = None

    def begin(self) -> Any:
        """Start to give the own slice to the other ranks; returns what to wait for."""
        data, own = self._data, self._pieces[self._shard.rank]
        length = data.numel() // self._shard.size
        scales = self.find_scales(data[self._shard.rank * length :][:length])
        sent = data.new_zeros(self.bytes, dtype=torch.uint8)
        for piece in own:
            values = data[piece.start : piece.stop]
            if piece.weight is not None:
                values = cast_fp8(values.float() * scales[piece.weight], "e4m3")
            sent[piece.place : piece.place + piece.size].copy_(values.view(torch.uint8))
        self._joined = sent.new_empty(self._shard.size * self.bytes)
        return all_gather_single(self._joined, sent, group=self._shard.group, async_op=True)

    def find_scales(self, values: Tensor) -> Tensor:
        """Of the weights in eight bits, whose own values stand in the own slice. All ranks must
        call it.
        """
        begin = self._shard.rank * len(values)
        amax = values.new_zeros(len(self._spans), dtype=torch.float32)
        for piece in self._pieces[self._shard.rank]:
            if piece.weight is not None:
                amax[piece.weight] = values[piece.start - begin : piece.stop - begin].abs().amax()
        amax = all_reduce_(amax, self._shard, "max")
        scales = power_of_two_scale(amax, E4M3_MAX)
        self._inverses = scales.reciprocal()
        return scales

    def finish(self) -> None:
        """Put into `data` what has arrived, the own slice too: all ranks hold the same, `given`."""
        joined, inverses = self._joined, self._inverses
        assert joined is not None
        assert inverses is not None
        for rank, pieces in enumerate(self._pieces):
            for piece in pieces:
                begin = rank * self.bytes + piece.place
                raw, into = joined[begin : begin + piece.size], self._data[piece.start : piece.stop]
                if piece.weight is None:
                    into.copy_(raw.view(into.dtype))
                else:
                    # In float32: float16 has no inverse scales of small weights.
                    values = raw.view(torch.float8_e4m3fn).float()
                    into.copy_(values.mul_(inverses[piece.weight]))
        self._joined = None

    def given(self, values: Tensor, place: int) -> Tensor:
        """What a gather by the last scales puts into `data` for own values beginning at `place`."""
        weight = next((i for i, (a, b) in enumerate(self._spans) if a <= place < b), None)
        if weight is None or self._inverses is None:
            return values
        inverse = self._inverses[weight]
        eight = cast_fp8(values.float() * inverse.reciprocal(), "e4m3")
        return eight.float().mul_(inverse).to(values.dtype)


def _pieces(
    start: int, stop: int, spans: Sequence[tuple[int, int]], element_size: int
) -> list[_Piece]:
    """Cut [start, stop) where weights in eight bits begin and end."""
    edges = {start, stop, *(edge for span in spans for edge in span if start < edge < stop)}
    ordered = sorted(edges)
    pieces: list[_Piece] = []
    place = 0
    for low, high in zip(ordered[:-1], ordered[1:], strict=True):
        weight = next((i for i, (a, b) in enumerate(spans) if a <= low < b), None)
        size = (high - low) * (element_size if weight is None else 1)
        pieces.append(_Piece(low, high, weight, place, size))
        place += size + -size % _ALIGNMENT
    return pieces
