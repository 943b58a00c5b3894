"""Blends: exact counts, no draw beyond an end, zero weights and empty sources."""

from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import torch

from megatron_lightning.data import (
    BlendedDataset,
    BlendIndex,
    GPTDataset,
    IndexedDataset,
    IndexedDatasetWriter,
    build_blend,
    build_blend_index,
    build_exhaustive_index,
    parse_blend,
)
from megatron_lightning.data.blend import _draw_few, _draw_many, normalise


class Numbers:
    """Source whose samples are its letter and their number."""

    def __init__(self, letter: int, length: int) -> None:
        self.letter, self.length = letter, length

    fingerprint = "numbers"

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        assert 0 <= index < self.length
        return {"tokens": torch.tensor([self.letter, index])}


@pytest.mark.parametrize("numerators", [[1, 2, 4, 1], [3, 5], [1], [7, 1, 7, 1]])
def test_greedy_rule_in_exact_arithmetic(numerators: list[int]) -> None:
    """With weights that are exact in binary, float64 and fractions must agree."""
    total = sum(numerators)
    weights = [Fraction(n, total) for n in numerators]
    exact = total & (total - 1) == 0
    counts = [0] * len(weights)
    index = build_blend_index(numerators, 500)
    for sample in range(500):
        behind = [w * max(sample, 1) - c for w, c in zip(weights, counts, strict=True)]
        source = int(index.dataset_index[sample])
        assert behind[source] == max(behind) or (not exact and max(behind) - behind[source] < 1e-9)
        if exact:
            assert source == behind.index(max(behind))
        assert index.dataset_sample_index[sample] == counts[source]
        counts[source] += 1


def test_loop_and_vector_agree() -> None:
    random = np.random.RandomState(0)
    for sources in (1, 2, 5, 40):
        shares = normalise(random.rand(sources).tolist())
        lengths = random.randint(1, 50, sources).tolist()
        for size, limits in ((700, None), (sum(lengths), lengths)):
            few, many = _draw_few(shares, size, limits), _draw_many(shares, size, limits)
            assert np.array_equal(few[0], many[0])
            assert np.array_equal(few[1], many[1])


def test_c48_zero_weights_are_never_drawn() -> None:
    index = build_blend_index([0, 1, 0, 1], 100)
    assert sorted(set(index.dataset_index.tolist())) == [1, 3]

    def forbidden(samples: int | None) -> Numbers:
        raise AssertionError("a source of weight 0 was opened")

    def ten(samples: int | None) -> Numbers:
        return Numbers(1, 10)

    blend = build_blend([forbidden, ten], [0.0, 2.0], 8, names=["a", "b"])
    assert [blend[i]["tokens"].tolist() for i in range(8)] == [[1, i] for i in range(8)]


@pytest.mark.parametrize("weights", [[0, 0], [-1, 2], [float("nan"), 1], [float("inf"), 1], []])
def test_bad_weights_are_refused(weights: list[float]) -> None:
    with pytest.raises(ValueError, match="weights="):
        build_blend_index(weights, 5)


def ten_samples(folder: Path, name: str, first: int) -> IndexedDataset:
    with IndexedDatasetWriter(folder / name, "int32") as writer:
        writer.add_document(range(first, first + 41))  # 10 samples of 4 tokens
    return IndexedDataset(folder / name)


def test_c48_blend_of_two_small_sets_repeats_the_one_that_is_too_short(tmp_path: Path) -> None:
    """Weights 0.001 and 0.999 of two 10-sample sets, 15 samples: the second goes into another
    epoch.
    """
    sets = [ten_samples(tmp_path, "a", 0), ten_samples(tmp_path, "b", 1000)]
    make = [lambda n, s=s: GPTDataset(s, range(1), n, 4, 1) for s in sets]
    blend = build_blend(make, [0.001, 0.999], 15, names=["a", "b"])
    again = build_blend(make, [0.001, 0.999], 15, names=["a", "b"])
    rows = [blend[i]["tokens"].tolist() for i in range(len(blend))]
    assert len(rows) == 16  # rounded up source by source: 1 + 15
    assert rows == [again[i]["tokens"].tolist() for i in range(len(blend))]
    from_first = sum(row[0] < 1000 for row in rows)
    assert abs(from_first - 0.001 * 16) <= 1
    assert abs((16 - from_first) - 0.999 * 16) <= 1


def test_c48_a_weighted_source_without_samples_is_refused_by_name(tmp_path: Path) -> None:
    with IndexedDatasetWriter(tmp_path / "empty", "int32") as writer:
        writer.add_document([])
    sets = [ten_samples(tmp_path, "a", 0), IndexedDataset(tmp_path / "empty")]
    make = [lambda n, s=s: GPTDataset(s, range(len(s)), n, 4, 1) for s in sets]
    with pytest.raises(ValueError, match=r"samples asked of .*empty"):
        build_blend(make, [1, 1], 6, names=["a", "empty"])
    blend = build_blend(make, None, None, names=["a", "empty"])
    assert len(blend) == 10


def test_a_source_that_cannot_repeat_is_refused_with_the_numbers() -> None:
    index = build_blend_index([1, 1], 12)
    with pytest.raises(ValueError, match="b has 5 samples, its share is 6"):
        BlendedDataset([Numbers(0, 6), Numbers(1, 5)], index, ["a", "b"], None)


def test_lengths_as_weights_never_pass_an_end() -> None:
    random = np.random.RandomState(0)
    for _ in range(20):
        lengths = random.randint(0, 9, 6).tolist()
        for size in (None, max(sum(lengths) - 1, 0), 3, 1000):
            index = build_exhaustive_index(lengths, size)
            counts = np.bincount(index.dataset_index, minlength=6)
            assert (counts <= lengths).all()
            assert counts.sum() == min(sum(lengths), sum(lengths) if size is None else size)
    assert isinstance(build_exhaustive_index([0, 0]), BlendIndex)
    assert len(build_exhaustive_index([0, 0]).dataset_index) == 0


def test_build_without_weights() -> None:
    make = [lambda n, k=k: Numbers(k, [4, 2][k]) for k in range(2)]
    whole = build_blend(make, None, None, names=["a", "b"])
    seen = [tuple(whole[i]["tokens"].tolist()) for i in range(len(whole))]
    assert sorted(seen) == [(0, 0), (0, 1), (0, 2), (0, 3), (1, 0), (1, 1)]
    assert len(build_blend(make, None, 3, names=["a", "b"])) == 3
    with pytest.raises(ValueError, match="num_train_samples"):
        build_blend(make, [1, 1], None, names=["a", "b"])


def test_parse_blend() -> None:
    assert parse_blend("a") == (["a"], None)
    assert parse_blend(["a", "b"]) == (["a", "b"], None)
    assert parse_blend([0.3, "a", "0.7", "b"]) == (["a", "b"], [0.3, 0.7])
    assert parse_blend(["3", "a"]) == (["a"], [3.0])
    for bad in ([], ["a", "1"], ["1", "a", "b"], ["1", "2", "a", "b"], ["1", "2"], ["0", "a"]):
        with pytest.raises(ValueError, match="paths|weights"):
            parse_blend(bad)
    with pytest.raises(ValueError, match="weights"):
        parse_blend([-1, "a", 2, "b"])
