"""The plan of context parallelism: every query meets every key that it sees once, and no other."""

import itertools

import pytest
import torch
from torch import Tensor

from megatron_lightning.parallel.context.dense import band_mask
from megatron_lightning.parallel.context.plan import Call, gathered_calls, joined, ring_calls
from megatron_lightning.parallel.context.slices import joining_index, local_index, padded_length

LENGTHS = [(16,), (8, 8), (8, 24, 16)]
CPU = torch.device("cpu")


def seen_by(calls: tuple[Call, ...], num_queries: int, num_keys: int) -> Tensor:
    """How often each local query (row) meets each key row."""
    seen = torch.zeros(num_queries, num_keys, dtype=torch.int64)
    for call in calls:
        rows = [row for span in call.queries for row in range(*span)]
        assert len(rows) == len(set(rows)), "a query is twice in one call"
        for queries, keys in zip(call.queries, call.keys, strict=True):
            mask = band_mask(queries[1] - queries[0], keys[1] - keys[0], call.band, CPU)
            assert mask.any(dim=1).all(), "a query that sees nothing"
            seen[slice(*queries), slice(*keys)] += mask
    return seen


def expected(lengths: tuple[int, ...], causal: bool, window: int) -> Tensor:
    document = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    row = torch.arange(sum(lengths))
    distance = row[:, None] - row[None, :]
    seen = document[:, None] == document[None, :]
    if causal:
        seen &= distance >= 0
    if window:
        seen &= distance < window
    return seen.long()


@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize(
    ("causal", "window"), [(True, 0), (False, 0), *((True, w) for w in (1, 2, 3, 5, 7, 12, 40))]
)
def test_every_visible_pair_once(
    lengths: tuple[int, ...], size: int, causal: bool, window: int
) -> None:
    want = expected(lengths, causal, window)
    total = sum(lengths)
    for rank in range(size):
        queries = local_index(lengths, size, rank)
        calls = gathered_calls(lengths, size, rank, causal, window)
        assert torch.equal(seen_by(calls, total // size, total), want[queries])
        if size == 1:
            continue
        for source in range(size):
            keys = local_index(lengths, size, source)
            calls = ring_calls(lengths, size, rank, source, causal, window)
            got = seen_by(calls, total // size, total // size)
            assert torch.equal(got, want[queries][:, keys]), (rank, source)


def test_causal_work_is_equal_on_all_ranks() -> None:
    work = [int(expected((64,), True, 0)[local_index((64,), 4, rank)].sum()) for rank in range(4)]
    assert len(set(work)) == 1


def test_documents_are_shared_out_one_by_one() -> None:
    """Two documents of four tokens over two ranks (C20)."""
    lengths = (4, 4)
    held = [local_index(lengths, 2, rank).tolist() for rank in range(2)]
    assert held == [[0, 3, 4, 7], [1, 2, 5, 6]]


def test_a_document_that_cannot_be_cut() -> None:
    with pytest.raises(ValueError, match="a document of 6 tokens .* pad it to 8"):
        local_index((8, 6), 2, 0)


def test_joining_index() -> None:
    lengths, size = (8, 16), 4
    for ranks in ((0, 1, 2, 3), (0, 1), (2, 3)):
        x = torch.cat([local_index(lengths, size, rank) for rank in ranks])
        into, back = joining_index(lengths, size, ranks, CPU)
        assert torch.equal(x[into], x.sort().values)
        assert torch.equal(x[into][back], x)


def test_two_inner_ranks_join_to_the_slices_of_a_smaller_ring() -> None:
    """What the hierarchical form rests on."""
    lengths = (16, 32)
    for outer, inner in itertools.product(range(2), [2]):
        ranks = tuple(range(outer * inner, (outer + 1) * inner))
        x = torch.cat([local_index(lengths, 4, rank) for rank in ranks])
        into, _ = joining_index(lengths, 4, ranks, CPU)
        assert torch.equal(x[into], local_index(lengths, 2, outer))


@pytest.mark.parametrize(
    ("length", "size", "tensor", "padded"),
    [(16, 2, 1, 16), (17, 2, 1, 20), (1, 4, 1, 8), (20, 2, 4, 24), (24, 2, 3, 24)],
)
def test_padded_length(length: int, size: int, tensor: int, padded: int) -> None:
    assert padded_length(length, size, tensor) == padded


def test_contiguous_slices() -> None:
    """Of each sample, and the samples of all ranks joined."""
    lengths = (6, 9)
    held = [local_index(lengths, 3, rank, contiguous=True) for rank in range(3)]
    assert [x.tolist() for x in held] == [[0, 1, 6, 7, 8], [2, 3, 9, 10, 11], [4, 5, 12, 13, 14]]
    into, back = joining_index(lengths, 3, (0, 1, 2), CPU, True)
    x = torch.cat(held)
    assert torch.equal(x[into], torch.arange(15))
    assert torch.equal(x[into][back], x)
    assert [padded_length(7, 2, tensor, contiguous=True) for tensor in (1, 4)] == [8, 8]
    assert padded_length(9, 2, 4, contiguous=True) == 16


def test_joined_spans() -> None:
    assert joined(((0, 2), (2, 5), (6, 7))) == ((0, 5), (6, 7))
