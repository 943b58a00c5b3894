"""Which sentences make up a sample: the recorded mapping, and documents that give none."""

from pathlib import Path

import numpy as np
import pytest

from megatron_lightning.data import IndexedDataset
from megatron_lightning.data.masked import (
    build_sentence_index,
    random64,
    sentence_index,
    usable_documents,
)
from megatron_lightning.data.masked.random64 import shuffled_order, twister64
from tests.unit.data import masked_corpora as corpora


def test_twister_is_the_one_of_the_standard():
    # C++ standard, [rand.predef]: the 10000th number of a default-constructed mt19937_64
    assert twister64(5489, 10_000)[-1] == 9981545732273789042


def test_shuffled_order_is_a_permutation():
    for count in (0, 1, 2, 1000):
        assert np.array_equal(np.sort(shuffled_order(count, 3)), np.arange(count))


@pytest.mark.parametrize("name", corpora.CASES["mapping"])
def test_recorded_mapping(name: str):
    case = corpora.CASES["mapping"][name]
    indexed = IndexedDataset(corpora.FOLDER / "sentences")
    low, high = case["docs"]
    index = build_sentence_index(
        indexed.document_indices[low : high + 1],
        indexed.sequence_lengths,
        num_samples=None if case["epochs"] == 1 else case["num"],
        max_length=case["L"],
        short_seq_prob=case["p"],
        seed=case["seed"],
        min_sentences=case["m"],
    )
    assert index.samples.dtype == np.uint32
    np.testing.assert_array_equal(index.samples, corpora.expected()[f"mapping_{name}"])


def test_each_pass_uses_each_sentence_once():
    indexed = IndexedDataset(corpora.FOLDER / "sentences")
    index = build_sentence_index(
        indexed.document_indices,
        indexed.sequence_lengths,
        num_samples=300,
        max_length=50,
        short_seq_prob=0.2,
        seed=9,
    )
    bounds = indexed.document_indices
    usable, _ = usable_documents(bounds, indexed.sequence_lengths, 1, 512)
    wanted = np.concatenate(
        [np.arange(bounds[d], bounds[d + 1]) for d in np.flatnonzero(usable).tolist()]
    )
    assert index.epochs.max() > 1
    for epoch in range(int(index.epochs.max()) + 1):
        rows = index.samples[index.epochs == epoch]
        read = np.concatenate([np.arange(begin, end) for begin, end, _ in rows.tolist()])
        np.testing.assert_array_equal(np.sort(read), wanted)


def test_documents_are_counted():
    indexed = IndexedDataset(corpora.FOLDER / "sentences")
    sentences = np.diff(indexed.document_indices)
    _, counts = usable_documents(indexed.document_indices, indexed.sequence_lengths, 2, 512)
    assert counts.empty == np.sum(sentences == 0) >= 3
    assert counts.short == np.sum(sentences == 1) >= 3
    assert counts.long == 1  # 520 tokens; 512 are not too many
    assert sum(counts) == 60
    # alone, a long sentence is cut and its document kept
    assert usable_documents(indexed.document_indices, indexed.sequence_lengths, 1, 512)[1].long == 1


def test_long_sentences_can_be_allowed():
    data = corpora.bert(corpora.BERTDataConfig(max_sentence_length=600))
    assert data.document_counts.long == 0
    assert corpora.bert().document_counts.long == 1


@pytest.mark.parametrize("samples", [None, 5])
def test_documents_of_one_sentence_give_no_pairs(tmp_path: Path, samples: int | None):
    indexed = corpora.write(tmp_path, [[[40, 41]], [], [[42]]])
    if samples is None:
        assert len(corpora.bert(indexed=indexed)) == 0
    else:
        wanted = "1 are empty, 2 have fewer than 2 sentences"
        with pytest.raises(ValueError, match=wanted):
            corpora.bert(indexed=indexed, samples=samples)
    config = corpora.BERTDataConfig(classification_head=False)
    assert len(corpora.bert(config, indexed)) == 2


def test_split_without_documents_is_empty(tmp_path: Path):
    indexed = corpora.write(tmp_path, [])
    assert len(corpora.bert(indexed=indexed)) == len(corpora.t5(indexed=indexed)) == 0


def test_seeds_beyond_what_the_peer_takes():
    # there the seed is a signed 32-bit integer above 0 and one is added to it
    for seed in (0, 2**31 - 1, 2**32 - 1):
        data = corpora.bert(seed=seed, samples=30)
        assert data[len(data) - 1]["tokens"].shape == (64,)
    with pytest.raises(ValueError, match="seed=4294967296 must be between 0 and 4294967295"):
        corpora.bert(seed=2**32)


@pytest.mark.parametrize("short_seq_prob", [0.0, 0.3])
def test_compiled_loops_are_the_plain_ones(monkeypatch: pytest.MonkeyPatch, short_seq_prob: float):
    pytest.importorskip("numba")
    indexed = IndexedDataset(corpora.FOLDER / "sentences")
    options = {"max_length": 40, "short_seq_prob": short_seq_prob, "seed": 3, "min_sentences": 2}
    arguments = (indexed.document_indices[7:], indexed.sequence_lengths)
    plain = build_sentence_index(*arguments, num_samples=300, **options)
    monkeypatch.setattr(sentence_index, "COMPILED_FROM", 0)
    monkeypatch.setattr(random64, "COMPILED_FROM", 0)
    compiled = build_sentence_index(*arguments, num_samples=300, **options)
    np.testing.assert_array_equal(compiled.samples, plain.samples)
    np.testing.assert_array_equal(compiled.epochs, plain.epochs)
