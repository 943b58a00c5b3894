"""Boxes: axis-aligned rectangles of a row-major tensor, and the arithmetic a checkpoint needs on
them.

A rank holds some boxes of each global tensor: one for a tensor-parallel shard, up to 2N-1 for a
slice of a flat optimizer buffer (N dims). Everything here is exact integer arithmetic on tuples: no
tensors, no processes.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Box:
    """The elements `offsets[d] <= index[d] < offsets[d] + sizes[d]` of a tensor with `len(offsets)`
    dims.
    """

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @classmethod
    def whole(cls, shape: Sequence[int]) -> "Box":
        """The box that is all of a tensor of this shape."""
        return cls((0,) * len(shape), tuple(shape))

    @property
    def numel(self) -> int:
        """Number of elements; 1 for a tensor without dims."""
        return math.prod(self.sizes)

    def shift(self, offsets: Sequence[int], *, sign: int = 1) -> "Box":
        """The same box seen from an origin that lies at `-offsets` (`sign=-1`: at `offsets`)."""
        moved = tuple(own + sign * by for own, by in zip(self.offsets, offsets, strict=True))
        return Box(moved, self.sizes)

    def intersect(self, other: "Box") -> "Box | None":
        """The common elements, or None if there are none."""
        offsets, sizes = [], []
        rows = zip(self.offsets, self.sizes, other.offsets, other.sizes, strict=True)
        for start, size, other_start, other_size in rows:
            first = max(start, other_start)
            count = min(start + size, other_start + other_size) - first
            if count <= 0:
                return None
            offsets.append(first)
            sizes.append(count)
        return Box(tuple(offsets), tuple(sizes))

    def contains(self, other: "Box") -> bool:
        """Whether each element of `other` lies in this box."""
        rows = zip(self.offsets, self.sizes, other.offsets, other.sizes, strict=True)
        return all(a <= b and b + n <= a + m for a, m, b, n in rows)

    def subtract(self, other: "Box") -> "list[Box]":
        """This box without `other`, as at most 2N disjoint boxes."""
        common = self.intersect(other)
        if common is None:
            return [self]
        rest: list[Box] = []
        offsets, sizes = list(self.offsets), list(self.sizes)
        for dim, (start, size) in enumerate(zip(common.offsets, common.sizes, strict=True)):
            before, after = start - offsets[dim], offsets[dim] + sizes[dim] - start - size
            for first, count in ((offsets[dim], before), (start + size, after)):
                if count:
                    rest.append(Box(_put(offsets, dim, first), _put(sizes, dim, count)))
            offsets[dim], sizes[dim] = start, size
        return rest

    def cut(self, parts: int) -> "list[Box]":
        """This box as about `parts` boxes of about equal size, cut along the leading dims."""
        dim = next((dim for dim, size in enumerate(self.sizes) if size > 1), None)
        if parts <= 1 or dim is None:
            return [self]
        size = self.sizes[dim]
        count = min(parts, size)
        edges = [size * i // count for i in range(count + 1)]
        pieces = [
            Box(_put(self.offsets, dim, self.offsets[dim] + a), _put(self.sizes, dim, b - a))
            for a, b in zip(edges, edges[1:], strict=False)
        ]
        return [part for piece in pieces for part in piece.cut(parts // count)]

    def slices(self) -> tuple[slice, ...]:
        """The index expression that takes this box out of a tensor."""
        return tuple(slice(a, a + n) for a, n in zip(self.offsets, self.sizes, strict=True))


@dataclass(frozen=True, slots=True)
class FlatBox:
    """A box whose elements are consecutive in the row-major flattening of its tensor."""

    box: Box
    start: int
    """Index of its first element in the flattened tensor."""


def split_flat_slice(shape: Sequence[int], start: int, stop: int) -> list[FlatBox]:
    """Elements `start <= i < stop` of the flattened tensor of `shape` as at most `max(1, 2 *
    len(shape) - 1)` boxes.

    The boxes come in flat order, each consecutive, so that box k holds `flat[boxes[k].start :
    boxes[k].start + boxes[k].box.numel]`. They grow from single elements to whole leading rows and
    shrink again, each dim being used at most once on the way up and once on the way down.
    """
    if not 0 <= start <= stop <= math.prod(shape):
        raise ValueError(
            f"slice [{start}, {stop}) does not lie in a tensor of shape {list(shape)}"
            f" with {math.prod(shape)} elements; give 0 <= start <= stop <= number of elements"
        )
    strides = row_major_strides(shape)
    boxes: list[FlatBox] = []
    position = start
    while position < stop:
        index = tuple(
            position // stride % size for stride, size in zip(strides, shape, strict=True)
        )
        box = _largest_box(shape, strides, index, position, stop)
        boxes.append(FlatBox(box, position))
        position += box.numel
    return boxes


def row_major_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """Elements between neighbours along each dim of a contiguous tensor of this shape."""
    return tuple(math.prod(shape[dim + 1 :]) for dim in range(len(shape)))


def any_overlap(boxes: Sequence[Box]) -> bool:
    """Whether two of these non-empty boxes of one tensor share an element (a sweep along the dim
    with most cuts).
    """
    if len(boxes) < 2:
        return False
    dims = range(len(boxes[0].offsets))
    sweep = max(dims, key=lambda dim: len({box.offsets[dim] for box in boxes}), default=None)
    if sweep is None:
        return True  # a tensor without dims has one element
    active: list[Box] = []
    for box in sorted(boxes, key=lambda box: box.offsets[sweep]):
        active = [a for a in active if a.offsets[sweep] + a.sizes[sweep] > box.offsets[sweep]]
        if any(a.intersect(box) is not None for a in active):
            return True
        active.append(box)
    return False


def cut_overlaps(boxes: Iterable[Box]) -> list[Box]:
    """Disjoint boxes with the same union, each inside one of the given ones; disjoint input comes
    back as it is.

    Replicas that are cut in different places (copies of a tensor in flat buffers of unequal
    contents) overlap without being equal. The larger box is kept whole, the smaller is written
    where the larger ones leave gaps.
    """
    distinct = list(dict.fromkeys(boxes))
    if not any_overlap(distinct):
        return distinct
    kept: list[Box] = []
    for box in sorted(distinct, key=lambda box: (-box.numel, box.offsets)):
        pieces = [box]
        for other in kept:
            pieces = [rest for piece in pieces for rest in piece.subtract(other)]
        kept += pieces
    return kept


def _largest_box(
    shape: Sequence[int], strides: Sequence[int], index: tuple[int, ...], position: int, stop: int
) -> Box:
    """The largest box of whole trailing dims that begins at `position` and ends by `stop`."""
    for dim, stride in enumerate(strides):
        count = min((stop - position) // stride, shape[dim] - index[dim])
        if position % stride == 0 and count > 0:
            return Box(index, (1,) * dim + (count,) + tuple(shape[dim + 1 :]))
    return Box((), ())


def _put(values: Sequence[int], dim: int, value: int) -> tuple[int, ...]:
    return (*values[:dim], value, *values[dim + 1 :])
