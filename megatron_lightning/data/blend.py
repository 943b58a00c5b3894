"""Weighted mixture of data sets, in Megatron-Core's deterministic order.

Sample s comes from the source that is furthest behind its share: argmax over d of w_d * max(s, 1) -
count_d in float64, ties to the lowest d, where count_d counts the draws so far. Nothing is shuffled
at this level, and the order depends on weights and size alone, so that every rank has the same.

Without weights the lengths of the sources are the weights and no source is drawn beyond its end;
without a size as well, each is drawn exactly to its end. With weights a source gives as many
samples as its share needs, over several epochs if it is short. A source of weight 0 is neither
opened nor drawn (Megatron's rule would draw it on a tie); a source that cannot give its share is
refused.
"""

import math
import os
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset

from megatron_lightning.data.account import SampleNote, read_sample
from megatron_lightning.data.cache import cached_arrays, key_digest
from megatron_lightning.data.compiled import COMPILED_FROM, kernels

SURPLUS = 0.005  # share of samples asked of each source beyond its due
_INDEX_VERSION = 1  # part of the cache key: raise it when an index function changes
_MANY_SOURCES = 24  # from here on numpy's argmax is faster than a Python loop over the sources


class SampleSource(Protocol):
    """A map-style data set with a length."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> dict[str, Tensor]: ...


class OrderedSource(SampleSource, Protocol):
    """A source that can tell whether its order is the one of an earlier run."""

    @property
    def fingerprint(self) -> str:
        """Digest of what determines the order of the samples."""
        ...


class BlendIndex(NamedTuple):
    """Source of each sample, and its running number within that source; both (size,)."""

    dataset_index: NDArray[np.integer]
    dataset_sample_index: NDArray[np.int64]


def parse_blend(paths: str | Sequence[str | float]) -> tuple[list[str], list[float] | None]:
    """Returns the paths, and the weights of a list `w1 p1 w2 p2 ...` (None for a list of paths
    only).

    Raises:
        ValueError: empty, numbers and paths do not alternate, a negative weight, or all weights
            zero.
    """
    words = [paths] if isinstance(paths, (str, os.PathLike)) else list(paths)
    numbers = [_as_number(word) for word in words]
    if not words:
        raise ValueError(
            "paths is empty: give at least one path of a .bin/.idx pair without suffix"
        )
    if all(number is None for number in numbers):
        return [str(word) for word in words], None
    weights = [number for number in numbers[0::2] if number is not None]
    names = [word for word, number in zip(words, numbers, strict=True) if number is None]
    alternate = [number is None for number in numbers] == [False, True] * len(weights)
    if not alternate:
        raise ValueError(
            f"paths={words} mixes weights and paths: write either paths only, or weight path "
            "weight path ..."
        )
    check_weights(weights)
    return [str(name) for name in names], weights


def check_weights(weights: Sequence[float]) -> None:
    """Refuses weights from which no share can be made.

    Raises:
        ValueError: a weight is negative or not finite, or none is positive.
    """
    if not all(math.isfinite(weight) and weight >= 0 for weight in weights) or sum(weights) <= 0:
        raise ValueError(
            f"weights={list(weights)} must be finite and not negative, and at least one positive"
        )


def normalise(weights: Sequence[float]) -> NDArray[np.float64]:
    """Returns the weights divided by their sum, in float64."""
    check_weights(weights)
    given = np.array(weights, dtype=np.float64)
    return given / given.sum()


def build_blend_index(weights: Sequence[float], size: int) -> BlendIndex:
    """Returns the order of a weighted blend of `size` samples.

    Raises:
        ValueError: see `check_weights`.
    """
    return _draw_positive(normalise(weights), size, None)


def build_exhaustive_index(lengths: Sequence[int], size: int | None = None) -> BlendIndex:
    """Returns the order that draws sources in proportion to their lengths, none beyond its end.

    Args:
        lengths: samples of each source; 0 is allowed.
        size: samples to draw, at most their sum; None draws all of them.
    """
    total = sum(lengths)
    if total == 0:
        return BlendIndex(np.zeros(0, np.int16), np.zeros(0, np.int64))
    return _draw_positive(normalise(lengths), total if size is None else min(size, total), lengths)


def _draw_positive(
    shares: NDArray[np.float64], size: int, limits: Sequence[int] | None
) -> BlendIndex:
    """The rule over the sources of positive share, in the numbering of all sources."""
    kept = np.flatnonzero(shares > 0)
    dtype = np.int16 if len(shares) < 2**15 else np.int32
    ends = None if limits is None else [int(limits[source]) for source in kept.tolist()]
    labels = kept.astype(dtype)
    compiled = kernels() if size * len(kept) >= COMPILED_FROM else None
    if compiled is not None:
        index = BlendIndex(np.empty(size, dtype), np.empty(size, np.int64))
        stops = np.full(len(kept), np.inf) if ends is None else np.array(ends, np.float64)
        compiled.draw(shares[kept], stops, labels, *index)
        return index
    draw = _draw_many if len(kept) >= _MANY_SOURCES else _draw_few
    chosen, number = draw(shares[kept], size, ends)
    return BlendIndex(labels[chosen], number)


def _draw_few(
    shares: NDArray[np.float64], size: int, limits: list[int] | None
) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
    """The rule as a plain loop; with `limits`, a source leaves when it is used up."""
    chosen, number = np.zeros(size, np.int32), np.zeros(size, np.int64)
    share, counts = shares.tolist(), [0] * len(shares)
    alive = list(range(len(shares)))
    for sample in range(size):
        scale = float(max(sample, 1))
        best, furthest = -1, -math.inf
        for source in alive:
            behind = share[source] * scale - counts[source]
            if behind > furthest:
                best, furthest = source, behind
        chosen[sample] = best
        number[sample] = counts[best]
        counts[best] += 1
        if limits is not None and counts[best] == limits[best]:
            alive.remove(best)
    return chosen, number


def _draw_many(
    shares: NDArray[np.float64], size: int, limits: list[int] | None
) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
    """The same rule with the sources in a vector."""
    chosen, number = np.zeros(size, np.int32), np.zeros(size, np.int64)
    counts, used = np.zeros(len(shares)), np.zeros(len(shares))  # used: infinite when used up
    for sample in range(size):
        best = int(np.argmax(shares * float(max(sample, 1)) - counts - used))
        chosen[sample] = best
        number[sample] = counts[best]
        counts[best] += 1
        if limits is not None and counts[best] == limits[best]:
            used[best] = math.inf
    return chosen, number


class BlendedDataset(Dataset[dict[str, Tensor]]):
    """Samples of several data sets in the order of a `BlendIndex`.

    Args:
        sources: the data sets; None for one that is never drawn.
        index: which source and which of its samples each sample is.
        names: of the sources, for errors.
        rule: what the index was made from, as a JSON-able value; it makes the fingerprint.

    Raises:
        ValueError: the index draws a source beyond its end; source, draws and length are named.
    """

    def __init__(
        self,
        sources: Sequence[OrderedSource | None],
        index: BlendIndex,
        names: Sequence[str],
        rule: object,
    ) -> None:
        counts = np.bincount(index.dataset_index, minlength=len(sources))
        lengths = [0 if source is None else len(source) for source in sources]
        short = [
            f"{name} has {length} samples, its share is {count}"
            for name, length, count in zip(names, lengths, counts, strict=True)
            if count > length
        ]
        if short:
            raise ValueError(
                "a blend needs more samples than a source has: "
                + "; ".join(short)
                + ". Lower its weight "
                "or the number of samples, or give it a larger split"
            )
        self.sources, self.index, self.counts, self._rule = list(sources), index, counts, rule
        self.source_names = tuple(names)

    @property
    def dataset_index(self) -> NDArray[np.integer]:
        """Source of each sample, (samples,)."""
        return self.index.dataset_index

    @property
    def dataset_sample_index(self) -> NDArray[np.int64]:
        """Number of each sample within its source, (samples,)."""
        return self.index.dataset_sample_index

    @property
    def fingerprint(self) -> str:
        """Digest of what determines the order of the samples."""
        sources = [None if source is None else source.fingerprint for source in self.sources]
        return key_digest([self._rule, sources])

    def __len__(self) -> int:
        """Number of samples."""
        return len(self.index.dataset_index)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        """Returns the sample of the source that is due."""
        return self.read(index)[0]

    def read(self, index: int) -> tuple[dict[str, Tensor], SampleNote]:
        """Returns the sample of the source that is due, and the note about it."""
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of a blend of {len(self)}")
        number = int(self.index.dataset_index[index])
        source = self.sources[number]
        assert source is not None  # checked against the counts
        sample, note = read_sample(source, int(self.index.dataset_sample_index[index]))
        return sample, note._replace(source=number)


def build_blend(
    make: Sequence[Callable[[int | None], OrderedSource]],
    weights: Sequence[float] | None,
    size: int | None,
    *,
    names: Sequence[str],
    surplus: float = SURPLUS,
    cache_dir: str | os.PathLike[str] | None = None,
) -> OrderedSource:
    """Builds the sources with as many samples as their shares need, and the blend of them.

    Args:
        make: builds each source for a number of samples (None: one epoch).
        weights: of the sources; None means in proportion to their lengths, within one epoch.
        size: samples of the blend, rounded up source by source; None means one epoch of each
            source.
        names: of the sources, for errors.
        surplus: share of samples asked of each source beyond its due.
        cache_dir: folder that keeps the blend's index, see `cache`.

    Raises:
        ValueError: weights without a size, bad weights, or a source too short for its share.
    """
    if weights is None:
        if len(make) == 1:
            return make[0](size)
        whole = [build(None) for build in make]
        lengths = [len(source) for source in whole]
        key = {"what": "exhaustive", "version": _INDEX_VERSION, "lengths": lengths, "size": size}
        index = _cached(cache_dir, key, lambda: build_exhaustive_index(lengths, size))
        return BlendedDataset(whole, index, names, lengths)
    if size is None:
        raise ValueError(
            "weights need a number of samples: give num_train_samples or Trainer(max_steps=...), "
            "or leave the weights out to draw every source once"
        )
    shares = normalise(weights)
    due = [math.ceil(size * share) for share in shares]
    sources = [
        build(math.ceil(count * (1 + surplus))) if count else None
        for build, count in zip(make, due, strict=True)
    ]
    rule = shares.tolist()
    key = {"what": "blend", "version": _INDEX_VERSION, "shares": rule, "size": sum(due)}
    index = _cached(cache_dir, key, lambda: build_blend_index(weights, sum(due)))
    return BlendedDataset(sources, index, names, rule)


def _cached(
    cache_dir: str | os.PathLike[str] | None,
    key: dict[str, object],
    build: Callable[[], BlendIndex],
) -> BlendIndex:
    return BlendIndex(**cached_arrays(cache_dir, key, lambda: build()._asdict()))


def _as_number(word: str | float) -> float | None:
    """Returns the number that a word of a blend list is, None for a path."""
    try:
        return float(word)
    except ValueError:
        return None
