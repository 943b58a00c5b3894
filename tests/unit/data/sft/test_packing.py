"""Packing against the plain algorithms, one document after the other."""

import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_lightning.data.sft import Packs, pack


def plain_first_fit_decreasing(lengths: list[int], capacity: int) -> list[list[int]]:
    packs: list[list[int]] = []
    free: list[int] = []
    for document in sorted(range(len(lengths)), key=lambda number: -lengths[number]):
        for place, room in enumerate(free):
            if room >= lengths[document]:
                packs[place].append(document)
                free[place] -= lengths[document]
                break
        else:
            packs.append([document])
            free.append(capacity - lengths[document])
    return packs


def plain_in_order(lengths: list[int], capacity: int) -> list[list[int]]:
    packs: list[list[int]] = []
    for document, length in enumerate(lengths):
        if not packs or sum(lengths[d] for d in packs[-1]) + length > capacity:
            packs.append([])
        packs[-1].append(document)
    return packs


def as_lists(packs: Packs) -> list[list[int]]:
    bounds = zip(packs.offsets, packs.offsets[1:], strict=False)
    return [packs.documents[begin:end].tolist() for begin, end in bounds]


@st.composite
def documents(draw: st.DrawFn) -> tuple[list[int], int]:
    capacity = draw(st.integers(1, 60))
    return draw(st.lists(st.integers(1, capacity), max_size=300)), capacity


@settings(max_examples=150, deadline=None)
@given(documents())
def test_equals_the_plain_algorithms(given_documents: tuple[list[int], int]) -> None:
    lengths, capacity = given_documents
    array = np.array(lengths, np.int64)
    got = as_lists(pack(array, capacity, "first_fit_decreasing"))
    assert got == plain_first_fit_decreasing(lengths, capacity)
    assert as_lists(pack(array, capacity, "in_order")) == plain_in_order(lengths, capacity)
    assert as_lists(pack(array, capacity, "none")) == [[n] for n in range(len(lengths))]


def test_more_packs_than_one_level_of_the_tree_holds() -> None:
    lengths = np.random.default_rng(0).integers(1, 65, 6000)  # over 64 x 64 / 2 packs
    got = as_lists(pack(lengths, 64, "first_fit_decreasing"))
    assert len(got) > 2048
    assert got == plain_first_fit_decreasing(lengths.tolist(), 64)


@pytest.mark.parametrize("spread", ["chats", pytest.param("uniform", marks=pytest.mark.slow)])
def test_a_million_documents(spread: str) -> None:
    random = np.random.default_rng(1)
    if spread == "uniform":
        lengths = random.integers(1, 4097, 1_000_000)
    else:
        lengths = np.clip(random.lognormal(6, 1, 1_000_000).astype(np.int64), 1, 4096)
    start = time.perf_counter()
    packs = pack(lengths, 4096, "first_fit_decreasing")
    seconds = time.perf_counter() - start
    assert np.array_equal(np.sort(packs.documents), np.arange(len(lengths)))
    sums = np.add.reduceat(lengths[packs.documents], packs.offsets[:-1])
    assert sums.max() <= 4096
    assert len(sums) < lengths.sum() / 4096 * 1.01
    print(f"{spread}: {seconds:.2f} s, {sums.sum() / 4096 / len(sums):.3%} filled")
    assert seconds < 10  # half a second when nothing else runs


@pytest.mark.parametrize(
    ("lengths", "how", "message"),
    [
        ([3, 9], "first_fit_decreasing", "a document of 9 tokens doesn't fit a pack of 8"),
        ([3, 0], "in_order", "a document of 0 tokens"),
        ([3], "best", "packing='best' is unknown"),
    ],
)
def test_refusals(lengths: list[int], how: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        pack(np.array(lengths), 8, how)  # type: ignore[arg-type]
