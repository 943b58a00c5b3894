"""Which local queries meet which keys in context parallelism, as data. Pure: no tensor, no rank
group.

Tokens of a micro-batch are flattened, sample after sample, into a row of documents; without packing
each sample is one document. Every document is cut into 2W equal blocks, and rank r of W holds
blocks r and 2W-1-r of each, so that causal work is equal on all ranks (zig-zag, as in "Striped
Attention", arXiv 2311.09431, and Llama 3, arXiv 2407.21783, section 3.3.2). Flattened local tokens
are again a row of documents, each of 1/W of its length: its low block, then its high block.

A `Call` is one use of an attention kernel on parts of local queries and of some keys. Masks are
bands along the diagonal that ends in the lower right corner, so kernels need no mask in memory.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

Span = tuple[int, int]
"""Rows [start, stop) of a flattened row of tokens."""

_CACHED = 256


@dataclass(frozen=True)
class Band:
    """Query i of n sees key j of m when i + m - n - left <= j <= i + m - n + right (None: no
    limit).
    """

    left: int | None = None
    right: int | None = None

    @property
    def is_full(self) -> bool:
        """True when every query sees every key."""
        return self.left is None and self.right is None


FULL = Band()
CAUSAL = Band(right=0)


@dataclass(frozen=True)
class Call:
    """Attention of some spans of queries to as many spans of keys, under one band."""

    queries: tuple[Span, ...]
    keys: tuple[Span, ...]
    band: Band


@dataclass(frozen=True)
class _Part:
    """A run of tokens of one document: position in the document, row where it lies, length."""

    position: int
    row: int
    length: int


def rank_parts(length: int, row: int, size: int, rank: int) -> tuple[_Part, _Part]:
    """Low and high block of `rank`, for a document of `length` whose local rows begin at `row`."""
    block = length // (2 * size)
    return (
        _Part(rank * block, row, block),
        _Part((2 * size - 1 - rank) * block, row + block, block),
    )


@functools.lru_cache(_CACHED)
def ring_calls(
    lengths: tuple[int, ...], size: int, rank: int, source: int, causal: bool, window: int
) -> tuple[Call, ...]:
    """Calls of `rank`'s queries with the keys that `source` holds. `lengths`: those of whole
    documents.
    """
    pairs: list[list[tuple[Span, Span, Band]]] = []
    for length, row in _rows(lengths, size):
        own = rank_parts(length, row, size, rank)
        other = rank_parts(length, row, size, source)
        pairs.append(_meet(own, other, causal, window, same=rank == source))
    return _calls(pairs)


@functools.lru_cache(_CACHED)
def gathered_calls(
    lengths: tuple[int, ...], size: int, rank: int, causal: bool, window: int
) -> tuple[Call, ...]:
    """Calls of `rank`'s queries with all keys, which lie whole and in order."""
    pairs: list[list[tuple[Span, Span, Band]]] = []
    starts = itertools.accumulate(lengths, initial=0)
    for (length, row), start in zip(_rows(lengths, size), starts, strict=False):
        whole = (_Part(0, row, length),)  # one rank need not cut: any length will do
        own = whole if size == 1 else rank_parts(length, row, size, rank)
        pairs.append([_with_prefix(part, start, length, causal, window) for part in own])
    return _calls(pairs)


def _rows(lengths: Sequence[int], size: int) -> Iterable[tuple[int, int]]:
    """(length, first local row) of every document."""
    row = 0
    for length in lengths:
        yield length, row
        row += length // size


def _with_prefix(
    part: _Part, start: int, length: int, causal: bool, window: int
) -> tuple[Span, Span, Band]:
    """Queries of one part with the keys of the whole document that it can see."""
    first = max(0, part.position - window + 1) if window else 0
    last = part.position + part.length if causal else length
    queries = (part.row, part.row + part.length)
    band = Band(window - 1 if window else None, 0) if causal else FULL
    return queries, (start + first, start + last), band


def _meet(
    own: tuple[_Part, _Part], other: tuple[_Part, _Part], causal: bool, window: int, *, same: bool
) -> list[tuple[Span, Span, Band]]:
    if window:
        return [
            met
            for query, key in itertools.product(own, other)
            if (met := _windowed(query, key, window)) is not None
        ]
    every = (own[0].row, own[1].row + own[1].length)
    keys = (other[0].row, other[1].row + other[1].length)
    if not causal or same:
        return [(every, keys, FULL if not causal else CAUSAL)]
    # Blocks of a lower rank: its low block is before both of ours, its high block after both.
    # Blocks of a higher rank: both are before our high block and after our low block.
    if other[0].position < own[0].position:
        return [(every, (keys[0], keys[0] + other[0].length), FULL)]
    return [((own[1].row, every[1]), keys, FULL)]


def _windowed(query: _Part, key: _Part, window: int) -> tuple[Span, Span, Band] | None:
    """Causal attention to the last `window` keys, between two blocks that are equal or disjoint."""
    distance = query.position - key.position
    nearest = distance - key.length + 1
    if distance < 0 or nearest >= window:
        return None
    if distance == 0:
        band = Band(window - 1 if window < query.length else None, 0)
        return _span(query, 0, query.length), _span(key, 0, key.length), band
    if distance + query.length - 1 < window:
        return _span(query, 0, query.length), _span(key, 0, key.length), FULL
    # Query i sees key j from i + distance - window + 1 on: drop keys and queries that see nothing.
    first_key = max(0, distance - window + 1)
    num_queries = min(query.length, window - nearest)
    num_keys = key.length - first_key
    left = num_keys - num_queries - (distance - window + 1 - first_key)
    band = Band(left, None)
    return _span(query, 0, num_queries), _span(key, first_key, key.length), band


def _span(part: _Part, start: int, stop: int) -> Span:
    return part.row + start, part.row + stop


def _calls(documents: Iterable[list[tuple[Span, Span, Band]]]) -> tuple[Call, ...]:
    """Join pairs with one band into one call; a call takes at most one pair of a document, so that
    no query is in it twice.
    """
    grouped: dict[tuple[int, Band], list[tuple[Span, Span]]] = {}
    for pairs in documents:
        for number, (queries, keys, band) in enumerate(pairs):
            grouped.setdefault((number, band), []).append((queries, keys))
    return tuple(
        Call(tuple(q for q, _ in pairs), tuple(k for _, k in pairs), band)
        for (_, band), pairs in grouped.items()
    )


@functools.lru_cache(_CACHED)
def joined(spans: tuple[Span, ...]) -> tuple[Span, ...]:
    """The same rows with neighbouring spans made one."""
    merged: list[Span] = []
    for start, stop in spans:
        if merged and merged[-1][1] == start:
            merged[-1] = (merged[-1][0], stop)
        else:
            merged.append((start, stop))
    return tuple(merged)


@functools.lru_cache(_CACHED)
def span_index(spans: tuple[Span, ...], device: torch.device) -> Tensor:
    """Row numbers of the spans, int64."""
    return to_device(
        list(itertools.chain.from_iterable(range(*span) for span in spans)), torch.int64, device
    )


@functools.lru_cache(_CACHED)
def boundaries(spans: tuple[Span, ...], device: torch.device) -> Tensor:
    """Where each span begins when they are put in a row, and where the last ends: int32."""
    lengths = [stop - start for start, stop in spans]
    return to_device(list(itertools.accumulate(lengths, initial=0)), torch.int32, device)


def to_device(numbers: Sequence[Any] | Tensor, dtype: torch.dtype, device: torch.device) -> Tensor:
    """A tensor of `numbers` on the device; the host doesn't wait for what runs there. It may be
    kept for later calls, in training too.
    """
    with torch.inference_mode(False):
        made = torch.as_tensor(numbers, dtype=dtype)
        return made.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else made
