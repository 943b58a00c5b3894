"""Rank arithmetic: by hand, by brute force, and against recorded groups of Megatron-Core."""

import itertools
import json
import math
from pathlib import Path

import pytest

from megatron_lightning.parallel.mesh import ParallelMesh
from megatron_lightning.parallel.ranks import (
    DENSE_ORDER,
    EXPERT_ORDER,
    mesh_sizes,
    rank_lists,
    shard_rank_lists,
)


def test_neighbours_hold_the_last_axis() -> None:
    sizes = mesh_sizes(16, tensor=2, pipeline=2, context=2)
    assert sizes == {"pp": 2, "dp": 2, "cp": 2, "tp": 2, "edp": 8, "ep": 1, "etp": 1}
    assert rank_lists(sizes, DENSE_ORDER, ["tp"])[:3] == [(0, 1), (2, 3), (4, 5)]
    assert rank_lists(sizes, DENSE_ORDER, ["cp"])[:3] == [(0, 2), (1, 3), (4, 6)]
    assert rank_lists(sizes, DENSE_ORDER, ["dp"])[:3] == [(0, 4), (1, 5), (2, 6)]
    assert rank_lists(sizes, DENSE_ORDER, ["pp"])[:3] == [(0, 8), (1, 9), (2, 10)]
    assert rank_lists(sizes, DENSE_ORDER, ["cp", "dp"])[0] == (0, 2, 4, 6)
    assert rank_lists(sizes, DENSE_ORDER, ["dp", "cp"])[1] == (1, 3, 5, 7)


@pytest.mark.parametrize("replicas", [1, 2, 4, 8])
def test_data_ranks_are_copies_times_shards(replicas: int) -> None:
    sizes = mesh_sizes(16, tensor=2, context=2)
    lists = shard_rank_lists(sizes, DENSE_ORDER, EXPERT_ORDER, replicas)
    for whole, name in ((("dp", "cp"), "dp"), (("edp",), "edp")):
        order = DENSE_ORDER if name == "dp" else EXPERT_ORDER
        for ranks in rank_lists(sizes, order, whole):
            shards = [held for held in lists[f"{name}_shard"] if held[0] in ranks]
            assert [rank for held in shards for rank in held] == list(ranks)  # neighbours
            assert len(shards) == replicas
            copies = [held for held in lists[f"{name}_replica"] if held[0] in ranks]
            assert copies == list(zip(*shards, strict=True))
    with pytest.raises(ValueError, match="data_replicas=3 does not divide 8 data ranks"):
        shard_rank_lists(sizes, DENSE_ORDER, EXPERT_ORDER, 3)


def test_experts_with_few_ranks_keep_fewer_copies() -> None:
    sizes = mesh_sizes(8, expert=4)  # dp 8, edp 2
    lists = shard_rank_lists(sizes, DENSE_ORDER, EXPERT_ORDER, 4)
    assert {len(ranks) for ranks in lists["dp_replica"]} == {4}
    assert {len(ranks) for ranks in lists["edp_replica"]} == {2}
    assert {len(ranks) for ranks in lists["edp_shard"]} == {1}


def test_expert_view_covers_the_same_ranks_and_shares_the_pipeline() -> None:
    sizes = mesh_sizes(16, tensor=2, pipeline=2, context=2, expert=4, expert_tensor=2)
    assert sizes["edp"] == 1
    dense = rank_lists(sizes, DENSE_ORDER, ["pp"])
    assert dense == rank_lists(sizes, EXPERT_ORDER, ["pp"])
    assert rank_lists(sizes, EXPERT_ORDER, ["etp"])[:2] == [(0, 1), (2, 3)]
    assert rank_lists(sizes, EXPERT_ORDER, ["ep"])[:2] == [(0, 2, 4, 6), (1, 3, 5, 7)]


@pytest.mark.parametrize("order", list(itertools.permutations(("pp", "dp", "tp"))))
def test_every_order_partitions_the_world(order: tuple[str, ...]) -> None:
    sizes = {"pp": 3, "dp": 2, "tp": 4}
    for count in range(1, 4):
        for axes in itertools.combinations(order, count):
            lists = rank_lists(sizes, order, axes)
            assert sorted(itertools.chain(*lists)) == list(range(24))
            assert {len(ranks) for ranks in lists} == {math.prod(sizes[name] for name in axes)}
            assert all(list(ranks) == sorted(ranks) for ranks in lists)


def test_groups_equal_recorded_ones(golden: Path) -> None:
    """There orders run from the fastest axis; an expert axis is one more, in the same view."""
    recorded = json.loads((golden / "data" / "schedules" / "rank_groups.json").read_text())
    compared = 0
    for case in recorded:
        order = case["order"].split("-")[::-1]
        for label, groups in case["groups"].items():
            got = rank_lists(case["sizes"], order, label.split("-"))
            assert [list(ranks) for ranks in got] == groups, (case["order"], label)
            compared += 1
    assert compared == sum(len(case["groups"]) for case in recorded) > 90


@pytest.mark.parametrize("axes", [["tp", "tp"], ["tp", "zz"]])
def test_unknown_and_repeated_axes_are_named(axes: list[str]) -> None:
    with pytest.raises(ValueError, match="each must be one of"):
        rank_lists({"tp": 2, "dp": 2}, ("dp", "tp"), axes)


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"tensor": 2, "pipeline": 4}, "tensor x pipeline x context = 8 does not divide .* 12"),
        ({"expert": 8}, "expert x expert_tensor x pipeline = 8 does not divide .* 12"),
    ],
)
def test_sizes_that_do_not_divide_the_world(sizes: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        mesh_sizes(12, **sizes)


def test_mesh_of_one_process() -> None:
    mesh = ParallelMesh.single()
    assert mesh.describe() == "one process (1 rank)"
    for name, axis in mesh.axes.items():
        assert (axis.name, axis.rank, axis.size, axis.group) == (name, 0, 1, None)
        assert axis.is_first
        assert axis.is_last
    with pytest.raises(ValueError, match="axis='zz': this mesh has"):
        mesh.axis("zz")
