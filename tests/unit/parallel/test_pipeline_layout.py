"""Cuts of a model into stages: no layer is ever lost, the dearest stage is as cheap as can be."""

from itertools import combinations

import pytest

from megatron_lightning.parallel.balance import cut_evenly
from megatron_lightning.parallel.pipeline import (
    balanced_layout,
    build_layout,
    parse_layout,
    stage_count_problems,
)


def layers_of(layout):
    return [len(stage.layers) for stage in layout.stages]


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        ((30, 4, 1), [8, 8, 7, 7]),
        ((61, 4, 1), [16, 15, 15, 15]),
        ((10, 2, 2), [3, 3, 2, 2]),
        ((5, 2, 1), [3, 2]),
        ((3, 4, 1), [1, 1, 1, 0]),
        ((32, 4, 2), [4] * 8),
        ((6, 8, 1), [0, 1, 1, 1, 1, 1, 1, 0]),
        ((7, 1, 1), [7]),
        ((7, 1, 2), [4, 3]),
    ],
)
def test_layers_that_do_not_divide(sizes, expected):
    layout = balanced_layout(*sizes)
    assert layers_of(layout) == expected
    assert layout.num_layers == sizes[0]


@pytest.mark.parametrize("num_layers", range(1, 34))
def test_no_layer_is_lost(num_layers):
    for p, v in ((1, 1), (1, 3), (2, 1), (2, 2), (4, 1), (4, 2), (8, 1)):
        if stage_count_problems(num_layers, p, v):
            continue
        layout = balanced_layout(num_layers, p, v, embedding_cost=0.3, head_cost=1.7)
        assert [i for stage in layout.stages for i in stage.layers] == list(range(num_layers))
        assert [s.stage for s in layout.stages if s.has_embedding] == [0]
        assert [s.stage for s in layout.stages if s.has_head] == [p * v - 1]
        for stage in layout.stages:
            assert stage.has_embedding or stage.layers or stage.has_head


def test_chunks_of_a_rank_are_a_pipeline_apart():
    layout = balanced_layout(8, 2, 2)
    assert [chunk.layers for chunk in layout.chunks(0)] == [(0, 1), (4, 5)]
    assert [chunk.layers for chunk in layout.chunks(1)] == [(2, 3), (6, 7)]
    assert layout.chunk(1, 1).has_head
    assert layout.chunk(0, 0).has_embedding


def test_more_stages_than_units_names_both_numbers():
    with pytest.raises(ValueError, match="num_layers=3 .*pipeline_parallel_size=4.* 8 stages"):
        balanced_layout(3, 4, 2)
    assert stage_count_problems(3, 5, 1) == []
    assert len(stage_count_problems(0, 1, 1)) == 1


def test_costs_of_embedding_and_head_count():
    assert layers_of(balanced_layout(32, 4, head_cost=2.5)) == [9, 9, 8, 6]
    assert layers_of(balanced_layout(61, 4, head_cost=1.0)) == [16, 15, 15, 15]
    assert layers_of(balanced_layout(10, 2, embedding_cost=4.0)) == [3, 7]


def test_costs_of_layers_count():
    layout = balanced_layout(5, 2, layer_costs=[4, 1, 1, 1, 1])
    assert layers_of(layout) == [1, 4]
    with pytest.raises(ValueError, match="layer_costs has 2 entries for num_layers=3"):
        balanced_layout(3, 2, layer_costs=[1, 1])
    with pytest.raises(ValueError, match="negative"):
        balanced_layout(3, 2, head_cost=-1.0)


@pytest.mark.parametrize("parts", [1, 2, 3, 4])
def test_the_cut_is_the_best_of_all(parts):
    """Against every possible cut of costs that are easy for no heuristic."""
    for costs in ([3, 1, 4, 1, 5, 9, 2, 6], [0, 1, 1, 1, 1, 1, 2.5], [0, 0, 0, 7, 0, 0], [0.1] * 7):
        sizes = cut_evenly(costs, parts)
        assert sum(sizes) == len(costs)
        assert min(sizes) >= 1

        def largest_and_squares(ends, costs=costs):
            parts = [sum(costs[a:b]) for a, b in zip((0, *ends), (*ends, len(costs)), strict=True)]
            return max(parts), sum(p * p for p in parts)

        every = [
            largest_and_squares(ends) for ends in combinations(range(1, len(costs)), parts - 1)
        ]
        ours = largest_and_squares(tuple(sum(sizes[: i + 1]) for i in range(parts - 1)))
        assert ours == pytest.approx(min(every))


@pytest.mark.parametrize(
    ("text", "p", "v", "expected"),
    [
        ("Et*3|t*4|t*2L", 3, 1, [3, 4, 2]),
        ("Ett | ttL", 2, 1, [2, 2]),
        ("E|t*4|L", 3, 1, [0, 4, 0]),
        ("Et|(tt|)*4tL", 3, 2, [1, 2, 2, 2, 2, 1]),
        ("E,t,t,|,t,L", 2, 1, [2, 1]),
        ("E((t*2|)*2t|)*2L", 7, 1, [2, 2, 1, 2, 2, 1, 0]),
        ("EtttL", 1, 1, [3]),
    ],
)
def test_strings(text, p, v, expected):
    layout = parse_layout(text, sum(expected), p, v)
    assert layers_of(layout) == expected
    assert parse_layout(layout.describe(), sum(expected), p, v) == layout


def test_lists():
    by_string = parse_layout("Et*3|t*2L", 5, 2)
    assert parse_layout([3, 2], 5, 2) == by_string
    names = [["embedding"] + ["decoder"] * 3, ["decoder"] * 2 + ["loss"]]
    assert parse_layout(names, 5, 2) == by_string
    assert parse_layout([["E", "t", "t", "t"], ["t", "t", "L"]], 5, 2) == by_string
    assert build_layout(5, 2, layout=[3, 2]) == by_string
    assert build_layout(5, 2) == balanced_layout(5, 2)


@pytest.mark.parametrize(
    ("layout", "message"),
    [
        ("Ettt|tL", "4 decoder layers, but num_layers=3"),
        ("Et|t|tL", "3 stages, but pipeline_parallel_size=2 x virtual_pipeline_size=1 needs 2"),
        ("Ettt||L", r"stages \[1\] are empty"),
        ("tE|ttL", "embedding must come first"),
        ("EEt|ttL", "embedding must come first"),
        ("Et|tt", "head last"),
        ("Etx|ttL", "'x' is not a unit"),
        ("Etm|ttL", "multi-token prediction"),
        ("E(t|ttL", "parenthesis is not closed"),
        ("Et)|ttL", r"'\)' stands where nothing"),
        ("*2Et|ttL", r"'\*' stands where nothing"),
        ("Et*|ttL", "needs a number"),
        ("Et*0|ttL", "needs a number"),
        ([["embedding", "layer"], ["loss"]], r"stage 0 names \['layer'\]"),
        ([2, 2], "4 decoder layers, but num_layers=3"),
        ([3, -1], "negative"),
    ],
)
def test_wrong_layouts_are_explained(layout, message):
    with pytest.raises(ValueError, match=message):
        parse_layout(layout, 3, 2)


def test_a_layout_at_one_stage_keeps_the_depth():
    for layout in (None, [6], "Et*6L"):
        assert layers_of(build_layout(6, 1, layout=layout)) == [6]
    for layout in ([3], [3, 3], "Et*3|t*3L", "Et*3L"):
        with pytest.raises(ValueError, match=r"num_layers=6|needs 1"):
            build_layout(6, 1, layout=layout)
