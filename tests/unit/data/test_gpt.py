"""GPT samples against a token-by-token reference, and at sizes where floating point would fail."""

from pathlib import Path

import numpy as np
import pytest

from megatron_lightning.data import (
    EpochPlan,
    GPTDataset,
    IndexedDataset,
    IndexedDatasetWriter,
    build_document_index,
    build_sample_index,
    build_shuffle_index,
    plan_epochs,
)

EOD = 99


def corpus(folder: Path, documents: list[list[int]]) -> IndexedDataset:
    with IndexedDatasetWriter(folder / "corpus", "int32") as writer:
        for document in documents:
            writer.add_document(document, [len(document)])
    return IndexedDataset(folder / "corpus")


def numbered(lengths: list[int]) -> list[list[int]]:
    """Documents that hold 1000, 1001, ... so that every token names its place."""
    ends = np.cumsum(lengths)
    return [
        list(range(1000 + end - n, 1000 + end))
        for n, end in zip(lengths, ends.tolist(), strict=True)
    ]


@pytest.mark.parametrize("extra", [0, 1])
@pytest.mark.parametrize("drop_last", [True, False])
def test_samples_are_windows_of_the_shuffled_stream(
    tmp_path: Path, extra: int, drop_last: bool
) -> None:
    random = np.random.RandomState(0)
    documents = numbered(random.randint(0, 12, 40).tolist())
    data = GPTDataset(
        corpus(tmp_path, documents),
        range(5, 37),
        70,
        7,
        3,
        add_extra_token=bool(extra),
        drop_last=drop_last,
    )
    assert data.epoch_plan.num_epochs > 1
    stream = [token for i in data.document_index.tolist() for token in documents[i]]
    assert sorted(set(data.document_index.tolist())) == list(range(5, 37))
    windows = {}
    for number, begin in enumerate(range(0, len(stream), 7)):
        window = stream[begin : begin + 7 + extra]
        if len(window) == 7 + extra or (not drop_last and len(window) > extra):
            windows[number] = window
    assert len(data) == len(windows)
    for index in range(len(data)):
        window = windows[int(data.shuffle_index[index])]
        sample = data[index]
        known = len(window) - 1  # labels that exist
        assert sample["tokens"].tolist() == (window + [0] * 8)[:7]
        assert sample["labels"].tolist() == (window[1:] + [0] * 8)[:7]
        assert sample["loss_mask"].tolist() == ([1.0] * known + [0.0] * 8)[:7]
        assert sample["position_ids"].tolist() == list(range(7))


def test_every_label_of_a_pass_comes_once_when_nothing_is_dropped(tmp_path: Path) -> None:
    data = GPTDataset(
        corpus(tmp_path, numbered([5, 3, 9, 0, 4])), range(5), None, 4, 1, drop_last=False
    )
    labels = [
        label
        for i in range(len(data))
        for label, weight in zip(
            data[i]["labels"].tolist(), data[i]["loss_mask"].tolist(), strict=True
        )
        if weight
    ]
    assert len(labels) == len(set(labels)) == 21 - 1


def test_end_of_document_options(tmp_path: Path) -> None:
    indexed = corpus(tmp_path, [[1, 2, EOD], [EOD], [3, EOD, 4]])
    plain = GPTDataset(indexed, range(3), None, 6, 0)
    order = plain[0]["tokens"].tolist()
    sample = GPTDataset(
        indexed, range(3), None, 6, 0, eod_mask_loss=True, reset_position_ids=True, eod_id=EOD
    )[0]
    assert sample["tokens"].tolist() == order
    assert sample["loss_mask"].tolist() == [float(token != EOD) for token in order]
    expected, position = [], 0
    for token in order:
        expected.append(position)
        position = 0 if token == EOD else position + 1
    assert sample["position_ids"].tolist() == expected
    for option in ("eod_mask_loss", "reset_position_ids"):
        with pytest.raises(ValueError, match="eod_id"):
            GPTDataset(indexed, range(3), None, 6, 0, **{option: True})


def test_padding_tokens_carry_no_loss(tmp_path: Path) -> None:
    indexed = corpus(tmp_path, [[5, 7, 7, 6, 8]])
    sample = GPTDataset(indexed, range(1), None, 4, 0, pad_id=7)[0]
    assert sample["tokens"].tolist() == [5, 0, 0, 6]
    assert sample["labels"].tolist() == [0, 0, 6, 8]
    assert sample["loss_mask"].tolist() == [0.0, 0.0, 1.0, 1.0]


def test_epochs_are_counted_in_integers() -> None:
    tokens, length = 16_777_217 * 1000, 4096  # beyond what float32 can count
    samples = (tokens - 1) // length
    assert plan_epochs(tokens, samples, length) == EpochPlan(1, 0, False)
    assert plan_epochs(tokens, samples + 1, length).num_epochs == 2
    assert plan_epochs(tokens, samples + 1, length).separate_final_epoch
    assert plan_epochs(tokens, None, length).num_epochs == 1
    lengths = np.array([2**30 + 1, 2**30 + 2], np.int32)  # 2^31 + 3 tokens
    index = build_sample_index(lengths, np.array([1, 0], np.int32), 2**20)
    assert len(index) - 1 == (2**31 + 3 - 1) // 2**20
    assert index[1024].tolist() == [0, 2**30]
    assert index[1025].tolist() == [1, 2**20 - 2]


def test_partial_last_sample_ends_at_the_last_token_that_exists() -> None:
    lengths = np.array([5, 3, 0], np.int32)
    index = build_sample_index(lengths, np.arange(3, dtype=np.int32), 4, drop_last=False)
    assert index.tolist() == [[0, 0], [0, 4], [1, 2]]  # not a place in the empty last document


def test_separate_final_epoch_keeps_earlier_epochs_whole() -> None:
    # One epoch gives 9 samples; up to 6 of the last one (less than int(0.8 * 9)) separate it.
    assert plan_epochs(100, 19 + 7, 10) == EpochPlan(3, 19, False)
    assert plan_epochs(100, 19 + 6, 10) == EpochPlan(3, 19, True)
    assert plan_epochs(100, 22, 10) == EpochPlan(3, 19, True)
    documents = build_document_index(range(3, 8), EpochPlan(3, 19, True), np.random.RandomState(1))
    assert sorted(documents[:10].tolist()) == sorted([3, 4, 5, 6, 7] * 2)
    assert sorted(documents[10:].tolist()) == [3, 4, 5, 6, 7]
    shuffle = build_shuffle_index(29, EpochPlan(3, 19, True), np.random.RandomState(1))
    assert sorted(shuffle[:19].tolist()) == list(range(19))
    assert sorted(shuffle[19:].tolist()) == list(range(19, 29))


def test_empty_split_and_bad_arguments(tmp_path: Path) -> None:
    indexed = corpus(tmp_path, [[1, 2, 3], [4, 5]])
    empty = GPTDataset(indexed, range(2, 2), None, 4, 0)
    assert len(empty) == 0
    with pytest.raises(IndexError):
        empty[0]
    with pytest.raises(ValueError, match="num_samples=3 samples asked of .*corpus"):
        GPTDataset(indexed, range(2, 2), 3, 4, 0)
    with pytest.raises(ValueError, match="sequence_range"):
        GPTDataset(indexed, range(0, 3), None, 4, 0)
    with pytest.raises(ValueError, match="seq_length=0"):
        GPTDataset(indexed, range(2), None, 0, 0)
    with pytest.raises(ValueError, match="seed=-1"):
        GPTDataset(indexed, range(2), None, 4, -1)


def test_fingerprint_is_of_the_order(tmp_path: Path) -> None:
    indexed = corpus(tmp_path, numbered([50, 30]))

    def fingerprint(samples: int | None = None, length: int = 4, seed: int = 0) -> str:
        return GPTDataset(indexed, range(2), samples, length, seed).fingerprint

    assert fingerprint() == fingerprint(5) == fingerprint(19)  # one epoch each
    assert len({fingerprint(), fingerprint(200), fingerprint(length=5), fingerprint(seed=1)}) == 4
