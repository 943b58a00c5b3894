"""The plan of a save: every element once, replicas shared out by bytes, faults named."""

import pytest
import torch
from torch.distributed.checkpoint.default_planner import create_default_local_save_plan
from torch.distributed.checkpoint.planner import SavePlan

from megatron_lightning.checkpoint import BoxedTensor, CheckpointError
from megatron_lightning.checkpoint.planner import share_out


def plan(**tensors: BoxedTensor) -> SavePlan:
    return create_default_local_save_plan(dict(tensors), is_coordinator=False)


def bytes_of(shared: SavePlan) -> int:
    return sum(
        i.tensor_data.chunk.sizes.numel() * i.tensor_data.properties.dtype.itemsize
        for i in shared.items
    )  # type: ignore[union-attr]


def flat(start: int, stop: int, shape: tuple[int, ...]) -> BoxedTensor:
    return BoxedTensor.from_flat(torch.zeros(stop - start), shape, (0,) * len(shape), shape, start)


def test_replicas_are_written_once_and_balanced() -> None:
    sizes = [64, 8, 8, 8, 8, 8, 8, 8, 8, 1]
    replicas = {f"w{i}": BoxedTensor.of(torch.zeros(n)) for i, n in enumerate(sizes)}
    shared = share_out([plan(**replicas) for _ in range(2)])
    assert [bytes_of(part) for part in shared] == [4 * 65, 4 * 64]
    names = [item.index.fqn for part in shared for item in part.items]
    assert sorted(names) == sorted(replicas)


def test_one_large_replica_is_shared_by_its_ranks() -> None:
    large = BoxedTensor.of(torch.empty(2, 4096, 1024))  # 32 MiB
    shared = share_out([plan(w=large, b=BoxedTensor.of(torch.zeros(9))) for _ in range(8)])
    assert max(map(bytes_of, shared)) < 1.05 * 32 * 2**20 / 8
    assert sum(map(bytes_of, shared)) == 32 * 2**20 + 36


def test_what_a_rank_must_write_counts_before_replicas_are_given_out() -> None:
    own = BoxedTensor.of(torch.zeros(30))
    both = BoxedTensor.of(torch.zeros(20))
    shared = share_out([plan(both=both, own=own), plan(both=both)])
    assert [[i.index.fqn for i in part.items] for part in shared] == [["own"], ["both"]]


def test_replicas_that_are_cut_in_different_places_are_written_once() -> None:
    shape = (4, 5)
    plans = [
        plan(w=flat(0, 7, shape)),
        plan(w=flat(7, 20, shape)),
        plan(w=flat(0, 12, shape)),
        plan(w=flat(12, 20, shape)),
    ]
    seen = torch.zeros(shape)
    for part in share_out(plans):
        for item in part.items:
            chunk = item.tensor_data.chunk  # type: ignore[union-attr]
            seen[
                tuple(slice(a, a + n) for a, n in zip(chunk.offsets, chunk.sizes, strict=True))
            ] += 1
    assert torch.equal(seen, torch.ones(shape))


def test_a_part_that_no_rank_holds_is_an_error_even_on_one_rank() -> None:
    with pytest.raises(CheckpointError, match=r"'w' of shape \[4, 5\]: 19 of 20 elements"):
        share_out([plan(w=flat(0, 19, (4, 5)))])


def test_ranks_that_disagree_about_a_tensor_are_named() -> None:
    two, three = BoxedTensor.of(torch.zeros(2)), BoxedTensor.of(torch.zeros(3))
    with pytest.raises(CheckpointError, match=r"rank 1 has 'w' with shape \[3\] .* shape \[2\]"):
        share_out([plan(w=two), plan(w=three)])


def test_many_boxes_are_planned_in_reasonable_time() -> None:
    shape, parts = (512, 1024), 256
    size = 512 * 1024 // parts
    cuts = [
        flat(i * size + 3 * (i > 0), (i + 1) * size + 3 * (i < parts - 1), shape)
        for i in range(parts)
    ]
    assert sum(len(part.items) for part in share_out([plan(w=c) for c in cuts])) == 3 * parts - 2
