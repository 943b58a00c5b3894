"""Corpora of `PretrainingDataModule`: how mixtures and validation sets are written, mock data, and
what is refused. Reported case C48.
"""

from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import pytest
from lightning.pytorch.callbacks import GradientAccumulationScheduler

from megatron_lightning.data import IndexedDatasetWriter, PretrainingDataModule
from megatron_lightning.data.account import ACCOUNT
from megatron_lightning.data.blend_spec import read_blend, read_sets
from tests.data_runs import write_corpus


@pytest.fixture(scope="module")
def corpora(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    folder = tmp_path_factory.mktemp("corpora")
    return write_corpus(folder / "a", 30, 1), write_corpus(folder / "b", 20, 2)


def module(paths: Any, rank: int = 0, ranks: int = 1, **options: Any) -> PretrainingDataModule:
    values = dict(seq_length=16, micro_batch_size=1, global_batch_size=4, tokenizer="bytes")
    made = PretrainingDataModule(paths, **{**values, **options})
    made._dp = lambda: (rank, ranks)  # type: ignore[method-assign]
    return made


@pytest.mark.parametrize(
    "written",
    [
        {"a": 0.7, "b": 3},
        ["0.7", "a", "3", "b"],
        [0.7, "a", 3, "b"],
        "0.7 a 3 b",
        "  0.7  a 3.0 b",
    ],
)
def test_forms_of_a_blend(written: Any) -> None:
    assert read_blend(written) == (["a", "b"], [0.7, 3.0])


def test_forms_without_weights() -> None:
    assert read_blend("a b") == (["a b"], None)  # a path with a space
    assert read_blend(Path("x/a")) == (["x/a"], None)
    assert read_blend(["a", "b"]) == (["a", "b"], None)
    assert read_sets({"a": 1, "b": 2}, "valid_paths") == {"": (["a", "b"], [1.0, 2.0])}
    assert read_sets({"x": "a", "y": {"b": 2}}, "valid_paths") == {
        "x": (["a"], None),
        "y": (["b"], [2.0]),
    }


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"paths": {"a": 1, "b": "c"}}, "give a number as the weight of each path, which 'b'"),
        ({"paths": {"a": 0}}, "at least one positive"),
        ({"paths": {"a": -1, "b": 2}}, "not negative"),
        ({"paths": []}, "paths is empty"),
        ({"paths": None}, "paths=None: give the path"),
        ({"paths": "a", "mock_data": True}, "mock_data=True: leave paths=None"),
        ({"paths": "a", "valid_paths": "b", "split": "9,1"}, "these are used whole"),
        ({"paths": "a", "valid_paths": {"x": "b", "y": 2}}, "either a weight for every path"),
        ({"paths": "a", "valid_paths": {"": "b"}}, "or a name"),
        ({"paths": "a", "test_paths": {"x": ["1", "2"]}}, r"test_paths\['x'\]"),
    ],
)
def test_refused_by_name(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        module(**options)


def test_missing_files_of_every_part_are_named(corpora: tuple[str, str]) -> None:
    errors = " ".join(module(corpora[0], valid_paths="no-v", test_paths={"t": "no-t"}).validate())
    assert "no-v.bin" in errors
    assert "no-t.bin" in errors


def test_sets_of_validation(corpora: tuple[str, str]) -> None:
    a, b = corpora
    named = module(a, valid_paths={"one": a, "two": {a: 1, b: 0}}, test_paths=b)
    named.setup("fit")
    assert named.evaluation_names("valid") == ["one", "two"]
    assert [len(loader) for loader in named.val_dataloader()] == [
        len(named.val_dataloader()[0])
    ] * 2
    named.setup("test")
    assert named.evaluation_names("test") == [None]
    separate = module([a, b], split="1,1", multiple_validation_sets=True)
    separate.setup("validate")
    assert separate.evaluation_names("valid") == [None, None]
    both = module(a, valid_paths={"x": [a, b], "y": b}, multiple_validation_sets=True)
    both.setup("validate")
    assert both.evaluation_names("valid") == ["x/a", "x/b", "y/b"]
    only_test = module(a, test_paths=b)
    only_test.setup("fit")
    assert only_test.val_dataloader() == []


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_each_validation_sample_comes_once(corpora: tuple[str, str], ranks: int) -> None:
    found: list[tuple[int, int]] = []
    for rank in range(ranks):
        data = module(
            [*corpora], rank, ranks, valid_paths={"x": [*corpora]}, global_batch_size=4 * ranks
        )
        data.setup("validate")
        for batch in data.val_dataloader():
            account = batch[ACCOUNT]
            found += [(s, int(t)) for s, t in zip(*account.rows.T[:2], strict=True) if s >= 0]
            assert not batch["loss_mask"][np.flatnonzero(account.sample_id < 0)].any()
    source: Any = data._evaluation["valid"]["x"]
    assert sorted(found) == list(enumerate(source.dataset_index.tolist()))


def test_mock_data_are_the_same_everywhere() -> None:
    batches = []
    for _ in range(2):
        data = module(None, mock_data=True, tokenizer=None, num_train_samples=64)
        assert data.validate() == []
        data.setup("fit")
        batches.append([batch["tokens"] for batch in data.train_dataloader()])
    assert len(batches[0]) == 16
    assert all((x == y).all() for x, y in zip(*batches, strict=True))
    assert data.vocab_size == 257
    assert max(int(batch.max()) for batch in batches[0]) < 257


def test_case_c48(tmp_path: Path) -> None:
    """Two sets of 10 samples with weights 0.001 and 0.999, a weight of 0, a set without samples."""
    for name in ("a", "b"):
        with IndexedDatasetWriter(tmp_path / name, "int32") as writer:
            writer.add_document(list(range(10 * 4 + 1)), [41])
    with IndexedDatasetWriter(tmp_path / "none", "int32") as writer:
        writer.add_document([], [])
    a, b, none = (str(tmp_path / name) for name in ("a", "b", "none"))
    options = dict(split="1", seq_length=4, global_batch_size=1, num_train_samples=15)
    orders = []
    for rank in range(2):
        data = module({a: 0.001, b: 0.999}, rank, 2, **{**options, "global_batch_size": 2})
        data.setup("fit")
        source: Any = data._train
        orders.append((source.dataset_index.tolist(), source.dataset_sample_index.tolist()))
        counts = np.bincount(source.dataset_index[:15], minlength=2)
        assert abs(counts[0] - 15 * 0.001) <= 1
        assert abs(counts[1] - 15 * 0.999) <= 1
        assert len(list(data.train_dataloader())) == 7
    assert orders[0] == orders[1]
    data = module({a: 0, b: 1}, **options)
    data.setup("fit")
    assert {int(n) for batch in data.train_dataloader() for n in batch[ACCOUNT].source} == {1}
    with pytest.raises(ValueError, match=r"none.*hold no token"):
        module({a: 0.5, none: 0.5}, **options).setup("fit")


def test_a_ramp_with_accumulation_is_refused(corpora: tuple[str, str]) -> None:
    data = module(corpora[0], rampup_batch_size=[2, 2, 20])
    quiet = dict(accelerator="cpu", logger=False, enable_checkpointing=False, barebones=False)
    assert data.check_trainer(L.Trainer(**quiet)) == []
    for options in (
        {"accumulate_grad_batches": 2},
        {"callbacks": [GradientAccumulationScheduler({3: 2})]},
    ):
        errors = data.check_trainer(L.Trainer(**quiet, **options))
        assert len(errors) == 1
        assert "leave accumulate_grad_batches at 1" in errors[0]
    assert module(corpora[0]).check_trainer(L.Trainer(**quiet, accumulate_grad_batches=2)) == []


def test_a_source_without_weight_need_not_exist(corpora: tuple[str, str]) -> None:
    data = module({corpora[0]: 1, "nowhere": 0}, num_train_samples=8)
    assert data.validate() == []
    data.setup("fit")
    assert next(iter(data.train_dataloader()))["tokens"].shape == (4, 16)


def test_documents_apart(corpora: tuple[str, str]) -> None:
    """`reset_attention_mask`: a document begins behind each end-of-document token."""
    data = module(corpora[0], reset_attention_mask=True, num_train_samples=8)
    data.setup("fit")
    batch = next(iter(data.train_dataloader()))
    for tokens, found in zip(batch["tokens"].tolist(), batch["cu_seqlens"].tolist(), strict=True):
        begins = [0, *(place + 1 for place, token in enumerate(tokens[:-1]) if token == 256)]
        assert found == begins + [16] * (17 - len(begins))
    with pytest.raises(ValueError, match="reset_attention_mask=True: only with dataset='gpt'"):
        module(corpora[0], reset_attention_mask=True, dataset="fim")
