"""Which tokens a context rank holds: index arithmetic of the slices, and padding lengths.

Pure. See `plan.py` for the zig-zag layout, in which lengths are those of documents in a
flattened row. In the contiguous one they are those of samples: rank r of W holds the r-th of W
equal slices of each.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from megatron_lightning.parallel.context.plan import rank_parts

_CACHED = 64


def padded_length(length: int, size: int, tensor_size: int = 1, *, contiguous: bool = False) -> int:
    """The smallest length, not below `length`, that 2 x `size` blocks divide, or `size` slices.

    `tensor_size` above 1 (sequence parallelism): the local tokens must divide by it too.
    """
    multiple = math.lcm(size if contiguous else 2 * size, size * tensor_size)
    return -(-length // multiple) * multiple


def local_index(
    lengths: Sequence[int], size: int, rank: int, *, contiguous: bool = False
) -> Tensor:
    """Numbers, in the flattened row of whole documents, of the tokens that `rank` holds, in local
    order: (T / size,) int64 on the CPU. ValueError when 2 x `size` doesn't divide a length.
    """
    return _local_index(tuple(lengths), size, rank, contiguous)


@functools.lru_cache(_CACHED)
def _local_index(lengths: tuple[int, ...], size: int, rank: int, contiguous: bool) -> Tensor:
    if size == 1:
        return torch.arange(sum(lengths), device="cpu")
    parts: list[Tensor] = []
    for length, start in zip(lengths, itertools.accumulate(lengths, initial=0), strict=False):
        if contiguous:
            assert length % size == 0, "batches are padded"
            first = start + rank * (length // size)
            parts.append(torch.arange(first, first + length // size, device="cpu"))
            continue
        if length % (2 * size):
            raise ValueError(
                f"a document of {length} tokens can't be cut into 2 x"
                f" context_parallel_size={size} equal blocks; pad it to"
                f" {padded_length(length, size)} tokens"
            )
        for part in rank_parts(length, 0, size, rank):
            first = start + part.position
            parts.append(torch.arange(first, first + part.length, device="cpu"))
    return torch.cat(parts)


@functools.lru_cache(_CACHED)
def joining_index(
    lengths: tuple[int, ...],
    size: int,
    ranks: tuple[int, ...],
    device: torch.device,
    contiguous: bool = False,
) -> tuple[Tensor, Tensor]:
    """(into, back) for the local tokens of `ranks`, one rank after the other: `x[into]` puts them
    in the order of the documents, and `y[back]` undoes it. Both (T * len(ranks) / size,) int64.
    """
    with torch.inference_mode(False):
        into = torch.cat(
            [_local_index(lengths, size, rank, contiguous) for rank in ranks]
        ).argsort()
        return into.to(device), into.argsort().to(device)
