"""Packed sequences as a plan of cuDNN's front end sees them: static bounds, and on the device where
each sequence lies.

Bounds are rounded up, so that few plans serve all micro-batches of a size; sequences that are too
many are empty.
"""

from __future__ import annotations

import functools
import itertools
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_lightning.parallel.context.plan import Band, Span, to_device

_INDICES = 64
_SMALLEST = 128


@dataclass(frozen=True, kw_only=True)
class PlanKey:
    """What a plan is built for."""

    backward: bool
    device: int
    dtype: torch.dtype
    sequences: int
    """Number of sequences, rounded up."""
    queries: int
    """Longest sequence of queries, rounded up."""
    keys: int
    """Longest sequence of keys, rounded up."""
    query_rows: int
    """All queries together."""
    key_rows: int
    """All keys together."""
    heads: int
    groups: int
    head_dim: int
    scale: float
    causal: bool
    """Whether a query sees no later keys."""
    square: bool
    """Whether each sequence has as many queries as keys; else the last ones are aligned."""
    window: int
    """Keys that a query sees, itself among them; 0: no limit."""


def rounded_up(count: int, smallest: int = 1) -> int:
    """The next 2^k or 3 * 2^(k-1) that is no less, at least `smallest`."""
    power = 1 << max(0, count - 1).bit_length()
    return max(smallest, count and (3 * power // 4 if count <= 3 * power // 4 else power))


def plan_key(
    query: Tensor,
    key: Tensor,
    queries: tuple[Span, ...],
    keys: tuple[Span, ...],
    *,
    scale: float,
    band: Band,
    backward: bool,
) -> PlanKey:
    """The plan that a call needs."""
    count, longest, longest_key, square = _sizes(queries, keys)
    return PlanKey(
        backward=backward,
        device=query.device.index or 0,
        dtype=query.dtype,
        sequences=count,
        queries=longest,
        keys=longest_key,
        query_rows=query.shape[0],
        key_rows=key.shape[0],
        heads=query.shape[1],
        groups=key.shape[1],
        head_dim=query.shape[2],
        scale=scale,
        causal=band.right == 0,
        square=square,
        window=0 if band.left is None else band.left + 1,
    )


@functools.lru_cache(256)
def _sizes(queries: tuple[Span, ...], keys: tuple[Span, ...]) -> tuple[int, int, int, bool]:
    lengths = [stop - start for start, stop in queries]
    others = [stop - start for start, stop in keys]
    return (
        rounded_up(len(lengths), 8),
        rounded_up(max(lengths), _SMALLEST),
        rounded_up(max(others), _SMALLEST),
        lengths == others,
    )


@dataclass(frozen=True)
class Indices:
    """Lengths (int32) and offsets (int64, in elements) of the sequences of one call."""

    query_lengths: Tensor
    key_lengths: Tensor
    query_offsets: Tensor
    key_offsets: Tensor
    log_sum_offsets: Tensor


@functools.lru_cache(_INDICES)
def indices(
    queries: tuple[Span, ...],
    keys: tuple[Span, ...],
    sequences: int,
    query_row: int,
    key_row: int,
    heads: int,
    device: torch.device,
) -> Indices:
    """For `sequences` sequences, the last ones empty; rows of `query_row` and `key_row` elements
    in the tensors, and of `heads` in the log-sum-exp.
    """
    tables = []
    for spans in (queries, keys):
        lengths = [stop - start for start, stop in spans]
        lengths += [0] * (sequences - len(lengths))
        tables.append((lengths, list(itertools.accumulate(lengths, initial=0))))
    (query_lengths, query_rows), (key_lengths, key_rows) = tables
    lengths = to_device([query_lengths, key_lengths], torch.int32, device)
    # One entry more than there are, so that each row begins at a multiple of 16 bytes.
    offsets = to_device(
        [
            [row * size for row in rows] + [0]
            for rows, size in ((query_rows, query_row), (key_rows, key_row), (query_rows, heads))
        ],
        torch.int64,
        device,
    )
    return Indices(*lengths.unbind(), *(row[:-1] for row in offsets.unbind()))
