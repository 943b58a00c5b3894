"""Where a turn through symmetric memory writes: no two things to the same place."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_lightning.parallel.axes import MeshAxis
from megatron_lightning.parallel.peers.symmetric import SETS, _SymmetricTurn


def regions(
    size: int, rank: int, number: int, room: int, sums: bool
) -> dict[Any, tuple[int, int, int]]:
    """(owner, first byte, end) of every buffer that rank `rank` writes or reads in a turn."""
    shape, dtype = (3, 5), torch.bfloat16
    part_bytes = 2 * room
    axis = MeshAxis(name="tp", rank=rank, size=size)

    def buffer(
        owner: int, offset: int, shape: tuple[int, ...], dtype: torch.dtype
    ) -> tuple[int, int, int]:
        first = offset * dtype.itemsize
        return owner, first, first + dtype.itemsize * shape[0] * shape[1]

    exchange: Any = SimpleNamespace(axis=axis, part_bytes=part_bytes, buffer=buffer, sums=sums)
    turn: Any = _SymmetricTurn(exchange, number, shape, dtype)
    found = {}
    for step in range(1, size):
        peer = (rank + step) % size
        found["gather", rank, peer] = turn._part_of(peer, rank)
        if sums:
            found["sum", rank, peer] = turn._sum_of(peer, step)
    found["own", rank, rank] = turn._part_of(rank, rank)
    return found


@pytest.mark.parametrize("sums", [True, False])
@pytest.mark.parametrize("size", [2, 3, 8])
@pytest.mark.parametrize("room", [15, 256])
def test_regions_are_apart_and_inside(size: int, room: int, sums: bool) -> None:
    """Of all ranks' writes to one rank's memory, in both turns that may be under way."""
    parts = 2 * size - 1 if sums else size
    written: dict[int, list[tuple[int, int]]] = {rank: [] for rank in range(size)}
    for number in range(SETS):
        for rank in range(size):
            for owner, first, end in regions(size, rank, number, room, sums).values():
                written[owner].append((first, end))
    for spans in written.values():
        assert len(spans) == SETS * parts
        spans.sort()
        assert all(end <= first for (_, end), (first, _) in zip(spans, spans[1:], strict=False))
        assert spans[-1][1] <= SETS * parts * 2 * room
