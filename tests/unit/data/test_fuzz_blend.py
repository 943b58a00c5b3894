"""Index functions against plain loops of the rules, for random weights, sizes and corpora, with the
compiled and the plain paths.
"""

import math
import tempfile
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from megatron_lightning.data import (
    GPTDataset,
    IndexedDataset,
    IndexedDatasetWriter,
    build_blend,
    build_blend_index,
    build_exhaustive_index,
    build_sample_index,
    split_ranges,
)
from megatron_lightning.data import blend as blend_module
from megatron_lightning.data import gpt_index as gpt_module
from megatron_lightning.data.blend import normalise
from megatron_lightning.data.compiled import cut_stream, draw_sources, kernels

QUICK = settings(
    max_examples=200,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
    derandomize=True,
)
PATHS = ["plain", "compiled"]

weights = st.lists(
    st.one_of(
        st.just(0.0),
        st.floats(1e-9, 1e9),
        st.integers(1, 8).map(float),  # many ties
    ),
    min_size=1,
    max_size=40,
)


@pytest.fixture(params=PATHS)
def path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "compiled" and kernels() is None:
        pytest.skip("numba is not installed")
    for module in (blend_module, gpt_module):
        monkeypatch.setattr(module, "COMPILED_FROM", 0 if request.param == "compiled" else 2**62)
    return request.param


def draw(shares: list[float], size: int, ends: list[float]) -> tuple[list[int], list[int]]:
    """The rule, word for word."""
    chosen, number, counts = [], [], [0] * len(shares)
    for sample in range(size):
        alive = [d for d in range(len(shares)) if shares[d] > 0 and counts[d] < ends[d]]
        best = max(alive, key=lambda d: (shares[d] * float(max(sample, 1)) - counts[d], -d))
        chosen.append(best)
        number.append(counts[best])
        counts[best] += 1
    return chosen, number


@given(weights, st.integers(0, 300))
@QUICK
def test_weighted_blends(path: str, given_weights: list[float], size: int) -> None:
    assume(sum(given_weights) > 0)
    index = build_blend_index(given_weights, size)
    shares = normalise(given_weights).tolist()
    chosen, number = draw(shares, size, [math.inf] * len(shares))
    assert index.dataset_index.tolist() == chosen
    assert index.dataset_sample_index.tolist() == number
    counts = np.bincount(index.dataset_index, minlength=len(shares))
    assert (np.abs(counts - np.array(shares) * size) <= len(shares)).all()


@given(st.lists(st.integers(0, 30), min_size=1, max_size=30), st.integers(0, 400))
@QUICK
def test_exhaustive_blends(path: str, lengths: list[int], size: int) -> None:
    total = sum(lengths)
    for asked in (None, size):
        index = build_exhaustive_index(lengths, asked)
        due = total if asked is None else min(asked, total)
        shares = normalise(lengths).tolist() if total else []
        chosen, number = draw(shares, due, [float(length) for length in lengths])
        assert index.dataset_index.tolist() == chosen
        assert index.dataset_sample_index.tolist() == number
    everything = build_exhaustive_index(lengths)
    counts = np.bincount(everything.dataset_index, minlength=len(lengths))
    assert counts.tolist() == lengths  # none lost, none twice


def fill(lengths: list[int], order: list[int], seq_length: int, extra: int, drop: bool) -> list:
    """Sample starts by walking over the stream one token at a time."""
    places = [(p, o) for p, d in enumerate(order) for o in range(lengths[d])]
    rows, at = [[0, 0]], 0
    while at + extra < len(places):
        last = at + seq_length + extra - 1  # token that this sample ends with
        if last >= len(places):
            if drop:
                break
            last = len(places) - 1
        position, offset = places[last]
        rows.append([position, offset + 1 - extra])
        at += seq_length
    return rows


@given(
    st.lists(st.integers(0, 40), min_size=1, max_size=30),
    st.integers(1, 20),
    st.integers(0, 1),
    st.booleans(),
    st.randoms(use_true_random=False),
)
@QUICK
def test_sample_index(
    path: str, lengths: list[int], seq_length: int, extra: int, drop: bool, random: object
) -> None:
    order = [random.randrange(len(lengths)) for _ in range(2 * len(lengths))]  # type: ignore[attr-defined]
    ours = build_sample_index(
        np.array(lengths, np.int32),
        np.array(order, np.int32),
        seq_length,
        extra=extra,
        drop_last=drop,
    )
    assert ours.dtype == np.int32
    assert ours.tolist() == fill(lengths, order, seq_length, extra, drop)


def test_the_loops_themselves_are_what_numba_compiles() -> None:
    """The same functions, run by Python: no result depends on how they were compiled."""
    if kernels() is None:
        pytest.skip("numba is not installed")
    compiled, random = kernels(), np.random.RandomState(0)
    for sources in (1, 3, 17):
        shares = normalise(random.rand(sources).tolist())
        ends = random.randint(50, 100, sources).astype(np.float64)
        labels = np.arange(sources, dtype=np.int16)
        results = []
        for function in (draw_sources, compiled.draw):  # type: ignore[union-attr]
            chosen, number = np.zeros(50, np.int16), np.zeros(50, np.int64)
            function(shares, ends, labels, chosen, number)
            results.append((chosen.tolist(), number.tolist()))
        assert results[0] == results[1]
    lengths, order = random.randint(0, 9, 50).astype(np.int32), np.arange(50, dtype=np.int32)
    rows = [np.zeros((int(lengths.sum() - 1) // 7 + 1, 2), np.int32) for _ in range(2)]
    cut_stream(lengths, order, 7, 1, rows[0])
    compiled.cut(lengths, order, 7, 1, rows[1])  # type: ignore[union-attr]
    assert np.array_equal(rows[0], rows[1])


corpora = st.lists(st.lists(st.integers(0, 30), max_size=5), min_size=1, max_size=4)


@given(
    corpora,
    st.lists(st.sampled_from([0.0, 0.1, 1.0, 3.0]), min_size=4, max_size=4),
    st.one_of(st.none(), st.integers(1, 40)),
    st.booleans(),
    st.sampled_from(["1", "8,1,1", "969,30,1", "0,1"]),
)
@QUICK
def test_blends_of_tiny_corpora_work_or_say_why_not(
    contents: list[list[int]],
    given_weights: list[float],
    size: int | None,
    weighted: bool,
    split: str,
) -> None:
    """Corpora without documents, tokens or a whole sample: every sample can be read, or a
    ValueError says which corpus cannot give its share.
    """
    with tempfile.TemporaryDirectory() as folder:
        makers, names = [], []
        for number, lengths in enumerate(contents):
            prefix = Path(folder) / f"c{number}"
            with IndexedDatasetWriter(prefix, "uint16") as writer:
                for length in lengths:
                    writer.add_document(np.full(length, number + 1))
            data = IndexedDataset(prefix)
            train = split_ranges(split, len(data)).train
            makers.append(partial(make, data, train))
            names.append(f"c{number}")
        chosen = given_weights[: len(contents)] if weighted else None
        try:
            blend = build_blend(makers, chosen, size, names=names)
        except ValueError as error:
            text = str(error)
            assert any(name in text for name in names) or "weight" in text
            assert ":" in text or "must" in text
            return
        for index in range(len(blend)):
            sample = blend[index]
            assert sample["tokens"].shape == (4,)
            assert len(set(sample["tokens"].tolist())) == 1  # of one corpus, no filling


def make(data: IndexedDataset, sequences: range, samples: int | None) -> GPTDataset:
    return GPTDataset(data, sequences, samples, 4, 1)
