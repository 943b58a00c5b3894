"""Box arithmetic against numpy index sets, exhaustively on small shapes."""

import itertools
import math

import numpy as np
import pytest

from megatron_lightning.checkpoint.boxes import Box, any_overlap, cut_overlaps, split_flat_slice

SHAPES = [
    (),
    (1,),
    (5,),
    (3, 4),
    (4, 1),
    (2, 3, 4),
    (3, 1, 2),
    (2, 2, 2, 2),
    (3, 1, 2, 3),
    (2,) * 5,
]


def elements(box: Box) -> set[tuple[int, ...]]:
    ranges = (range(a, a + n) for a, n in zip(box.offsets, box.sizes, strict=True))
    return set(itertools.product(*ranges))


def all_boxes(shape: tuple[int, ...]) -> list[Box]:
    spans = [[(a, b - a) for a in range(n) for b in range(a + 1, n + 1)] for n in shape]
    return [
        Box(tuple(a for a, _ in choice), tuple(n for _, n in choice))
        for choice in itertools.product(*spans)
    ]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_slice_of_a_flat_tensor_becomes_few_consecutive_boxes(shape: tuple[int, ...]) -> None:
    numel = math.prod(shape)
    tensor = np.arange(numel).reshape(shape)
    worst = 0
    for start, stop in itertools.combinations(range(numel + 1), 2):
        boxes = split_flat_slice(shape, start, stop)
        taken = [tensor[flat.box.slices()].reshape(-1) for flat in boxes]
        assert np.array_equal(np.concatenate(taken), np.arange(start, stop))
        assert all(part[0] == flat.start for part, flat in zip(taken, boxes, strict=True))
        worst = max(worst, len(boxes))
    assert worst <= max(1, 2 * len(shape) - 1)


def test_the_bound_on_the_number_of_boxes_is_reached() -> None:
    assert len(split_flat_slice((3, 3, 3), 1, 26)) == 5
    assert len(split_flat_slice((3, 3), 1, 8)) == 3


def test_empty_slices() -> None:
    assert split_flat_slice((3, 4), 5, 5) == []
    assert split_flat_slice((0, 4), 0, 0) == []


@pytest.mark.parametrize(("start", "stop"), [(-1, 2), (3, 2), (0, 13)])
def test_slices_outside_the_tensor_are_refused(start: int, stop: int) -> None:
    with pytest.raises(ValueError, match=r"shape \[3, 4\] with 12 elements"):
        split_flat_slice((3, 4), start, stop)


@pytest.mark.parametrize("shape", [(4,), (3, 3), (2, 3, 2)], ids=str)
def test_intersection_difference_and_containment_are_those_of_sets(shape: tuple[int, ...]) -> None:
    for one, other in itertools.product(all_boxes(shape), repeat=2):
        common = one.intersect(other)
        assert (elements(common) if common else set()) == elements(one) & elements(other)
        rest = one.subtract(other)
        assert sum(box.numel for box in rest) == len(elements(one) - elements(other))
        assert set().union(*map(elements, rest)) == elements(one) - elements(other)
        assert one.contains(other) == (elements(other) <= elements(one))
        assert any_overlap([one, other]) == bool(common)


@pytest.mark.parametrize("parts", [1, 2, 3, 5, 7, 24, 100])
def test_cutting_gives_about_equal_parts_of_the_same_box(parts: int) -> None:
    box = Box((5, 0, 2), (2, 5, 3))
    pieces = box.cut(parts)
    assert not any_overlap(pieces)
    assert sum(piece.numel for piece in pieces) == 30
    assert all(box.contains(piece) for piece in pieces)
    assert min(parts, 30) / 2 < len(pieces) <= parts
    assert max(p.numel for p in pieces) <= 3 * min(p.numel for p in pieces)


def test_shift_and_back() -> None:
    box = Box((1, 2), (3, 4))
    assert box.shift((10, 20)) == Box((11, 22), (3, 4))
    assert box.shift((10, 20)).shift((10, 20), sign=-1) == box


def test_a_tensor_without_dims_is_one_element() -> None:
    box = Box.whole(())
    assert box.numel == 1
    assert box.intersect(box) == box
    assert box.subtract(box) == []
    assert any_overlap([box, box])


def test_disjoint_boxes_are_left_as_they_are() -> None:
    boxes = [Box((0, 0), (2, 3)), Box((2, 0), (1, 3)), Box((0, 3), (3, 1))]
    assert cut_overlaps(boxes) == boxes
    assert cut_overlaps([*boxes, boxes[0]]) == boxes


def test_overlapping_boxes_are_cut_into_disjoint_ones_with_the_same_union() -> None:
    rng = np.random.default_rng(0)
    choices = all_boxes((4, 3, 3))
    for _ in range(300):
        boxes = [choices[i] for i in rng.integers(len(choices), size=rng.integers(1, 7))]
        pieces = cut_overlaps(boxes)
        assert not any_overlap(pieces)
        assert set().union(*map(elements, pieces)) == set().union(*map(elements, boxes))
        assert all(any(box.contains(piece) for box in boxes) for piece in pieces)
