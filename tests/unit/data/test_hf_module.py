"""Data sets of `datasets`: what samples hold, their order, and resume."""

from collections import Counter
from itertools import islice
from typing import Any

import lightning as L
import numpy as np
import pytest
import torch
from lightning.pytorch.trainer.states import TrainerFn

from megatron_lightning.data import HFDataModule
from megatron_lightning.data.account import ACCOUNT

datasets = pytest.importorskip("datasets")

TEXTS = [f"document {number} " + "x" * (number * 7 % 23) for number in range(40)]
EOD = 256


def rows() -> Any:
    return datasets.Dataset.from_dict({"text": TEXTS})


def stream(shards: int = 3) -> Any:
    return rows().to_iterable_dataset(num_shards=shards)


def make(train: Any, rank: int = 0, ranks: int = 1, **options: Any) -> HFDataModule:
    values = dict(seq_length=16, micro_batch_size=1, global_batch_size=4, tokenizer="bytes")
    module = HFDataModule(train, **{**values, **options})
    module._dp = lambda: (rank, ranks)  # type: ignore[method-assign]
    return module


def loader(module: HFDataModule, state: dict[str, Any] | None = None) -> Any:
    module.setup("fit")
    if state is not None:
        module.load_state_dict(state)
    return module.train_dataloader()


def tokens(batches: Any, count: int) -> list[list[int]]:
    return [row for batch in islice(batches, count) for row in batch["tokens"].tolist()]


def texts_of_stream() -> list[str]:
    return [row["text"] for row in stream()]


def whole_stream() -> list[int]:
    return [token for text in texts_of_stream() for token in [*text.encode(), EOD]]


def test_packed_rows_are_windows_of_the_shuffled_documents() -> None:
    module = make(rows())
    data = loader(module)
    found = Counter(map(tuple, tokens(data, 10**9)))
    order = module._train.document_index.tolist()
    text = [token for number in order for token in [*TEXTS[number].encode(), EOD]]
    windows = Counter(tuple(text[start : start + 16]) for start in range(0, len(text) - 16, 16))
    assert found <= windows
    assert windows.total() // 4 * 4 == found.total()  # what fills no batch is left out
    assert module.vocab_size == 257


def test_tokenized_rows_are_the_same_samples() -> None:
    ids = datasets.Dataset.from_dict({"input_ids": [[*t.encode(), EOD] for t in TEXTS]})
    picked = ids.select(range(30)).add_item(ids[35])  # chunks and an index mapping
    again = rows().select([*range(30), 35])
    assert tokens(loader(make(picked, tokenizer=None)), 99) == tokens(loader(make(again)), 99)


def test_one_document_a_sample() -> None:
    module = make(rows(), packing="none", seq_length=24)
    batches = list(loader(module))
    account = np.concatenate([batch[ACCOUNT].rows for batch in batches])
    assert sorted(account[:, 0]) == list(range(40))
    assert account[:, 0].tolist() != list(range(40))  # shuffled
    for batch in batches:
        for row, sample in enumerate(batch[ACCOUNT].sample_id.tolist()):
            text = [*TEXTS[sample].encode(), EOD]
            length = min(len(text), 25)
            assert batch["tokens"][row, : min(length, 24)].tolist() == text[:24]
            assert batch["labels"][row, : length - 1].tolist() == text[1:25]
            assert batch["loss_mask"][row].tolist() == [1.0] * (length - 1) + [0.0] * (25 - length)
            _, _, _, documents, size, real, loss, cut = batch[ACCOUNT].rows[row]
            assert (documents, size, real) == (1, 24, min(length, 24))
            assert (loss, cut) == (length - 1, len(text) > 25)


def test_packed_stream() -> None:
    data = loader(make(stream(), num_train_samples=64))
    text = whole_stream()
    windows = [text[start : start + 16] for start in range(0, len(text) - 16, 16)]
    whole = len(windows) // 4 * 4
    batches = list(data)
    found = [row for batch in batches for row in batch["tokens"].tolist()]
    assert found[:whole] == windows[:whole]
    assert len(found) > whole
    assert found[whole:] == windows[: len(found) - whole]  # the next epoch
    assert len(batches) == 16
    labels = [row for batch in batches for row in batch["labels"].tolist()]
    assert labels[:whole] == [text[s * 16 + 1 : s * 16 + 17] for s in range(whole)]
    counted = sum(int(batch[ACCOUNT].column("documents").sum()) for batch in batches[: whole // 4])
    begins = np.concatenate([np.arange(len(t.encode()) + 1) == 0 for t in texts_of_stream()])
    assert counted == begins[: whole * 16].sum()
    assert sum(batch[ACCOUNT].left_out for batch in batches) == len(windows) - whole


@pytest.mark.parametrize("packing", ["stream", "none"])
@pytest.mark.parametrize("buffer", [0, 7])
def test_resume_of_a_stream(packing: str, buffer: int) -> None:
    """One rank without a process; then two ranks, one of them with, resumed at any batch."""
    options = dict(packing=packing, shuffle_buffer_size=buffer, num_train_samples=80)
    whole = tokens(loader(make(stream(), **options)), 20)
    assert len(whole) == 80
    for stop in (1, 10, 13):
        module = make(stream(), **options)
        head = tokens(loader(module), stop)
        state = module.state_dict()
        parts = [
            [
                batch["tokens"].tolist()
                for batch in loader(make(stream(), rank, 2, **options, num_workers=rank), state)
            ]
            for rank in range(2)
        ]
        tail = [row for step in zip(*parts, strict=True) for part in step for row in part]
        assert head + tail == whole


def test_resume_of_rows_in_another_layout() -> None:
    for packing in ("stream", "none"):
        reference = make(rows(), packing=packing)
        data = loader(reference)
        epoch = len(data)
        whole = tokens(data, epoch) + tokens(data, 5)
        module = make(rows(), packing=packing)
        head = tokens(loader(module), 3)
        parts = []
        for rank in range(2):
            again = loader(make(rows(), rank, 2, packing=packing), module.state_dict())
            first = [batch["tokens"].tolist() for batch in again]
            parts.append(first + [batch["tokens"].tolist() for batch in islice(again, 5)])
        tail = [row for step in zip(*parts, strict=True) for part in step for row in part]
        assert head + tail == whole


@pytest.mark.parametrize("source", ["rows", "stream"])
def test_each_validation_sample_counts_once(source: str) -> None:
    valid = rows() if source == "rows" else stream()
    seen: list[int] = []
    text = whole_stream()
    for rank in range(2):
        module = make(rows(), rank, 2, valid={"one": valid, "two": rows()})
        module.setup("validate")
        loaders = module.val_dataloader()
        assert module.evaluation_names("valid") == ["one", "two"]
        for batch in loaders[0]:
            real = batch[ACCOUNT].sample_id >= 0
            counted = batch[ACCOUNT].column("non_padding_tokens").tolist()
            assert not batch["loss_mask"][torch.from_numpy(~real)].any()
            for row, size in zip(batch["tokens"].tolist(), counted, strict=True):
                seen += row[:size]
    assert len(seen) == len(text)
    assert sorted(seen) == sorted(text)


@pytest.mark.parametrize(
    ("train", "options", "message"),
    [
        (rows, {"tokenizer": None}, "column 'text' holds text; name a tokenizer"),
        (rows, {"text_column": "body"}, "has the columns"),
        (stream, {"num_workers": 2}, "read in order by one process"),
        (stream, {"split": "9,1"}, "a stream has no length; give valid and test"),
        (rows, {"num_train_samples": 8}, "a data set with a length is read as a whole"),
        (rows, {"shuffle_buffer_size": 8}, "shuffled as a whole"),
        (lambda: "/nowhere", {}, "no folder of a saved data set"),
        (lambda: {"path": "json"}, {}, "name a split"),
        (lambda: [1, 2], {}, "list is no data set"),
        (lambda: datasets.DatasetDict(train=rows()), {}, "is no data set"),
        (rows, {"valid": {"v": stream, "w": 5}}, r"valid\['w'\]"),
    ],
)
def test_told_before_a_start(train: Any, options: dict[str, Any], message: str) -> None:
    errors = " ".join(make(train(), **options).validate())
    assert message.strip("\\") in errors or message.replace("\\", "") in errors


def test_bad_arguments() -> None:
    with pytest.raises(ValueError, match="packing='best' must be one of stream, none"):
        make(rows(), packing="best")
    with pytest.raises(ValueError, match="leave it out, or valid and test"):
        make(rows(), split="9,1", valid=rows())


def test_too_small_a_stream() -> None:
    few = rows().select(range(3)).to_iterable_dataset()
    with pytest.raises(ValueError, match="gives only 3 samples, fewer than a batch of 4"):
        list(loader(make(few, packing="none", num_train_samples=8)))


def test_nothing_to_validate_on_is_said() -> None:
    with pytest.raises(
        ValueError, match=r"gives validation 0 of 40 documents; give valid, or more"
    ):
        make(rows(), split="99,0.1,0").setup("validate")
    empty = datasets.Dataset.from_dict({"text": ["", ""]})
    with pytest.raises(ValueError, match="valid holds no token"):
        make(rows(), valid=empty).setup("validate")
    make(rows(), split="1,0,0").setup("validate")  # asks for none


def test_evaluation_for_which_nothing_is_given() -> None:
    train, run = rows(), L.Trainer(accelerator="cpu", logger=False, enable_checkpointing=False)
    for function, part, own in (("validate", "valid", "validation"), ("test", "test", "testing")):
        run.state.fn = TrainerFn(function)
        (told,) = make(train).check_trainer(run)
        assert told == f"{part} is not given, so there is nothing for {own}; give {part}"
        assert make(train, **{part: train}).check_trainer(run) == []
        assert make(train, split="8,1,1").check_trainer(run) == []
    (told,) = make(train, split="9,1").check_trainer(run)
    assert told.startswith("split='9,1' leaves nothing for testing; give it a third share, as in")
    run.state.fn = TrainerFn.FITTING
    assert make(train).check_trainer(run) == []
