"""The data module under real Trainers: what is read, in which order, from where after a restart."""

import json
import pickle
import re
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import EarlyStopping
from lightning.pytorch.trainer.states import TrainerFn

from megatron_lightning.config.validate import ConfigurationError
from megatron_lightning.data import (
    GPTDataset,
    IndexedDataset,
    IndexedDatasetWriter,
    PretrainingDataModule,
    preprocess_jsonl,
    split_ranges,
    train_byte_bpe,
)
from megatron_lightning.data.modules.evaluation_checks import waiting_for_validation

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


@pytest.fixture
def corpus(tmp_path: Path) -> str:
    lines = tmp_path / "in.jsonl"
    with lines.open("w") as out:
        for number in range(60):
            out.write(json.dumps({"text": f"document {number} " + "x" * (number % 7)}) + "\n")
    preprocess_jsonl(lines, tmp_path / "corpus", "bytes")
    return str(tmp_path / "corpus")


class Recorder(L.LightningModule):
    """Keeps what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1))
        self.train_rows: list[list[int]] = []
        self.eval_batches: list[dict[str, torch.Tensor]] = []

    def training_step(self, batch: dict, batch_idx: int) -> torch.Tensor:
        self.train_rows += batch["tokens"].tolist()
        return (self.weight * batch["loss_mask"]).sum()

    def validation_step(self, batch: dict, batch_idx: int) -> None:
        self.eval_batches.append(batch)

    def test_step(self, batch: dict, batch_idx: int) -> None:
        self.eval_batches.append(batch)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def trainer(**options) -> L.Trainer:
    return L.Trainer(
        accelerator="cpu",
        devices=options.pop("devices", 1),
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
        num_sanity_val_steps=0,
        **options,
    )


def module(corpus: str, **options) -> PretrainingDataModule:
    settings = {"seq_length": 16, "micro_batch_size": 2, "global_batch_size": 4, "split": "8,1,1"}
    return PretrainingDataModule(corpus, **{**settings, **options})


def fit(data: PretrainingDataModule, ckpt_path: Path | None = None, **options) -> Recorder:
    recorder = Recorder()
    run = trainer(**options)
    run.fit(recorder, data, ckpt_path=ckpt_path, weights_only=False)
    return recorder


def expected_rows(corpus: str, samples: int | None, count: int) -> list[list[int]]:
    indexed = IndexedDataset(corpus)
    train = split_ranges("8,1,1", len(indexed)).train
    data = GPTDataset(indexed, train, samples, 16, 1234)
    return [data[i]["tokens"].tolist() for i in range(count)]


def test_max_steps_decides_the_number_of_samples(corpus: str) -> None:
    rows = fit(module(corpus), max_steps=40, limit_val_batches=0).train_rows
    assert rows == expected_rows(corpus, 160, 160)  # several epochs of the split in one


def test_accumulation_is_counted(corpus: str) -> None:
    data = module(corpus)
    rows = fit(data, max_steps=10, accumulate_grad_batches=3, limit_val_batches=0).train_rows
    assert rows == expected_rows(corpus, 120, 120)
    assert data.consumed_samples == 120


def test_without_max_steps_an_epoch_is_a_pass_and_the_next_has_its_own_order(corpus: str) -> None:
    rows = fit(module(corpus), max_epochs=2, limit_val_batches=0).train_rows
    half = len(rows) // 2
    assert rows[:half] == expected_rows(corpus, None, half)
    assert rows[half:] != rows[:half]
    assert half % 4 == 0


def test_num_train_samples_is_an_epoch(corpus: str) -> None:
    rows = fit(module(corpus, num_train_samples=10), max_epochs=1, limit_val_batches=0).train_rows
    assert rows == expected_rows(corpus, 10, 8)


def labels_that_count(batches: list[dict[str, torch.Tensor]]) -> int:
    return int(sum(batch["loss_mask"].sum() for batch in batches))


def test_validation_and_test_count_every_token_once(corpus: str) -> None:
    data = module(corpus)
    recorder = Recorder()
    indexed = IndexedDataset(corpus)
    ranges = split_ranges("8,1,1", len(indexed))
    for call, part in ((trainer().validate, ranges.valid), (trainer().test, ranges.test)):
        recorder.eval_batches.clear()
        call(recorder, data, verbose=False)
        tokens = int(indexed.sequence_lengths[part.start : part.stop].sum())
        assert labels_that_count(recorder.eval_batches) == tokens - 1
        assert len({tuple(batch["tokens"].shape) for batch in recorder.eval_batches}) == 1


def test_evaluation_batches_are_no_larger_than_needed(corpus: str) -> None:
    data = module(corpus, global_batch_size=64, num_train_samples=64)
    recorder = Recorder()
    trainer().validate(recorder, data, verbose=False)
    (batch,) = recorder.eval_batches
    indexed = IndexedDataset(corpus)
    valid = split_ranges("8,1,1", len(indexed)).valid
    tokens = int(indexed.sequence_lengths[valid.start : valid.stop].sum())
    samples = -(-(tokens - 1) // 16)
    assert batch["tokens"].shape == (samples + samples % 2, 16)  # micro-batches of 2


def test_empty_splits_are_passed_over(corpus: str) -> None:
    data = module(corpus, split="1")
    assert len(fit(data, max_steps=3).train_rows) == 12
    assert data.val_dataloader() == []
    with pytest.raises(ValueError, match="global_batch_size=4.*only 0 samples"):
        fit(module(corpus, split="0,1,0"), max_epochs=1)
    with pytest.raises(ConfigurationError, match="sequences 0 to 0 hold no token"):
        fit(module(corpus, split="0,1,0"), max_steps=2)  # one message, wherever it is found


def test_validation_without_a_sequence_is_said(
    tmp_path: Path, recwarn: pytest.WarningsRecorder
) -> None:
    lines = tmp_path / "one.jsonl"
    lines.write_text(json.dumps({"text": "word " * 100}) + "\n")
    preprocess_jsonl(lines, tmp_path / "one", "bytes")
    one = str(tmp_path / "one")
    said = r"split='969,30,1' gives validation 0 of 1 sequences; give valid_paths, .*text-lines"
    with pytest.warns(UserWarning, match="No validation: " + said):
        fit(module(one, split=None), max_steps=1)
    with pytest.raises(ConfigurationError, match=r"EarlyStopping\(monitor='val_loss'\) goes by"):
        fit(module(one, split=None), max_steps=1, callbacks=[EarlyStopping("val_loss")])
    others = [
        EarlyStopping("val_loss", strict=False),
        EarlyStopping("val_loss", check_on_train_epoch_end=True),
        EarlyStopping("value_loss"),
        EarlyStopping("val_loss"),
        EarlyStopping("validation/loss"),
    ]
    assert len(waiting_for_validation(others)) == 2
    for call, part in (("validate", "validation"), ("test", "testing")):
        with pytest.raises(ConfigurationError, match=f"gives {part} 0 of 1 sequences"):
            getattr(trainer(), call)(Recorder(), module(one, split=None))
    recwarn.clear()
    fit(module(one, split="1,0,0"), max_steps=1)
    fit(module(one, split=None), max_steps=1, limit_val_batches=0)
    fit(module(one, split=None, valid_paths=one), max_steps=1)
    assert not any("No validation" in str(warning.message) for warning in recwarn)


def test_evaluation_for_which_nothing_is_given(corpus: str) -> None:
    """Refused before any process is started; without a metric it would look as if it had run."""
    ways = [
        ("test", dict(split="90,10,0"), "split='90,10,0' leaves nothing for testing; give it a"),
        ("test", dict(split="90,10"), "a third share, as in '90,5,5', or test_paths in place of"),
        ("validate", dict(split="1"), "a second share, as in '90,10,0', or valid_paths in place"),
        ("test", dict(valid_paths=corpus), "test_paths is not given, so there is nothing for test"),
        ("validate", dict(test_paths=corpus), "valid_paths is not given, so there is nothing for"),
    ]
    for call, options, said in ways:
        data = module(corpus, **{"split": None, **options})
        run = trainer()
        with pytest.raises(ConfigurationError, match=said):
            getattr(run, call)(Recorder(), data)
        assert run.state.fn == call
        (told,) = data.check_trainer(run)  # what the strategy asks before it starts ranks
        assert re.search(said, told)
    for call, options in (("validate", dict(split="90,10,0")), ("test", dict(test_paths=corpus))):
        getattr(trainer(), call)(Recorder(), module(corpus, **{"split": None, **options}))
    run = trainer()
    run.state.fn = TrainerFn.TESTING
    sizes = dict(seq_length=8, micro_batch_size=2, global_batch_size=4)
    own = WithLoader(corpus, **sizes, split="90,10,0")
    assert own.check_trainer(run) == []


class WithLoader(PretrainingDataModule):
    """Tests on data of its own."""

    def test_dataloader(self) -> Any:
        return []


@pytest.mark.parametrize("ranks", [2, 4])
def test_ranks_read_their_slice_of_the_same_batches(
    corpus: str, ranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = fit(module(corpus, micro_batch_size=1), max_steps=5, limit_val_batches=0).train_rows
    parts = []
    for rank in range(ranks):
        layout = property(lambda self, rank=rank: {"num_replicas": ranks, "rank": rank})
        monkeypatch.setattr(L.Trainer, "distributed_sampler_kwargs", layout)
        data = module(corpus, micro_batch_size=1)
        parts.append(fit(data, max_steps=5, limit_val_batches=0).train_rows)
        assert data.consumed_samples == 20
    share = 4 // ranks
    together = [
        row
        for step in range(5)
        for part in parts
        for row in part[step * share : (step + 1) * share]
    ]
    assert together == whole
    with pytest.raises(ValueError, match=rf"micro_batch_size=2 x data_parallel_size={ranks}") as e:
        fit(module(corpus, global_batch_size=6, num_train_samples=6), max_steps=1)
    assert f"such as {2 * ranks * -(-6 // (2 * ranks))}" in str(e.value)


@pytest.mark.parametrize("stop", [3, 7])
def test_a_longer_run_continues_where_the_shorter_ended(
    corpus: str, tmp_path: Path, stop: int
) -> None:
    """Saved after `fit` ended by max_steps: Lightning takes the epoch for over, we must not."""
    whole = fit(module(corpus), max_steps=12, limit_val_batches=0).train_rows
    run = trainer(max_steps=stop, limit_val_batches=0)
    run.fit(Recorder(), module(corpus))
    run.save_checkpoint(tmp_path / "x.ckpt")
    data = module(corpus)
    recorder = fit(data, tmp_path / "x.ckpt", max_steps=12, limit_val_batches=0)
    assert recorder.train_rows == whole[stop * 4 :]
    assert recorder.global_step == 12
    assert data.consumed_samples == 48


def test_resumes_with_another_number_of_ranks(
    corpus: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = fit(module(corpus, micro_batch_size=1), max_steps=8, limit_val_batches=0).train_rows
    run = trainer(max_steps=5, limit_val_batches=0)
    run.fit(Recorder(), module(corpus, micro_batch_size=1))
    run.save_checkpoint(tmp_path / "x.ckpt")
    parts = []
    for rank in range(2):
        layout = property(lambda self, rank=rank: {"num_replicas": 2, "rank": rank})
        monkeypatch.setattr(L.Trainer, "distributed_sampler_kwargs", layout)
        data = module(corpus, micro_batch_size=1)
        parts.append(fit(data, tmp_path / "x.ckpt", max_steps=8, limit_val_batches=0).train_rows)
    rows = [row for step in range(3) for part in parts for row in part[step * 2 : step * 2 + 2]]
    assert rows == whole[20:]


def test_a_changed_order_is_announced(corpus: str, tmp_path: Path) -> None:
    run = trainer(max_steps=2, limit_val_batches=0)
    run.fit(Recorder(), module(corpus))
    run.save_checkpoint(tmp_path / "x.ckpt")
    with pytest.warns(UserWarning, match="continues at sample 8 of the new order"):
        fit(module(corpus, seed=5), tmp_path / "x.ckpt", max_steps=4, limit_val_batches=0)


def test_a_second_fit_begins_at_the_start(corpus: str) -> None:
    data = module(corpus)
    first = fit(data, max_steps=3).train_rows
    assert fit(data, max_steps=3).train_rows == first


def test_reloaded_loaders_continue(corpus: str) -> None:
    plain = fit(module(corpus), max_epochs=3, limit_train_batches=4).train_rows
    reloaded = fit(
        module(corpus), max_epochs=3, limit_train_batches=4, reload_dataloaders_every_n_epochs=1
    ).train_rows
    assert reloaded == plain


def test_overfitting_repeats_the_same_batches(corpus: str) -> None:
    rows = fit(module(corpus), max_epochs=3, overfit_batches=2).train_rows
    assert rows == rows[:8] * 3


def test_weighted_blend(corpus: str, tmp_path: Path) -> None:
    with IndexedDatasetWriter(tmp_path / "other", "int32") as writer:
        for _ in range(30):
            writer.add_document([7] * 40)
    paths = ["0.75", corpus, "0.25", str(tmp_path / "other"), "0", str(tmp_path / "other")]
    rows = fit(module(paths), max_steps=20).train_rows
    assert sum(row == [7] * 16 for row in rows) == 20
    data = module(paths)
    recorder = Recorder()
    trainer().validate(recorder, data, verbose=False)
    valid = sum(
        int(lengths[split_ranges("8,1,1", len(lengths)).valid].sum()) - 1
        for lengths in (
            IndexedDataset(p).sequence_lengths for p in (corpus, str(tmp_path / "other"))
        )
    )
    assert labels_that_count(recorder.eval_batches) == valid  # the weights do not matter here
    with pytest.raises(ValueError, match="weights need a number of samples"):
        fit(module(paths), max_epochs=1)


def test_construction_opens_nothing_and_lists_all_violations() -> None:
    data = module("/nowhere/corpus")
    assert pickle.loads(pickle.dumps(data)).paths == ["/nowhere/corpus"]
    with pytest.raises(ValueError, match="PretrainingDataModule") as error:
        PretrainingDataModule(
            ["1", "a", "b"], 0, 3, 8, split="x", num_train_samples=0, seed=-1, num_workers=-1
        )
    for part in (
        "seq_length=0",
        "global_batch_size=8 must be a multiple of micro_batch_size=3, such as 9",
        'split="x"',
        "num_train_samples=0",
        "seed=-1",
        "num_workers=-1",
        "mixes weights and paths",
    ):
        assert part in str(error.value)


def test_validate_explains_files_cards_and_layout(corpus: str, tmp_path: Path) -> None:
    assert module(corpus).validate() == []
    assert module(corpus, tokenizer="bytes").validate(data_parallel_size=2) == []
    (missing,) = module("/nowhere/corpus").validate()
    assert "/nowhere/corpus.bin, /nowhere/corpus.idx" in missing
    (layout,) = module(corpus).validate(data_parallel_size=3)
    assert "micro_batch_size=2 x data_parallel_size=3 = 6, such as 6" in layout
    train_byte_bpe(["abc"], 300, tmp_path / "tokenizer.json")
    (mismatch,) = module(corpus, tokenizer=str(tmp_path / "tokenizer.json")).validate()
    assert f"{corpus}.card.json" in mismatch
    assert "utf-8-bytes-256" in mismatch
    assert "use the same tokenizer" in mismatch
    (absent,) = module(corpus, tokenizer=str(tmp_path / "absent.json")).validate()
    assert "no tokenizer file" in absent
    with Path(f"{corpus}.bin").open("ab") as file:
        file.write(b"00")
    (size,) = module(corpus).validate()
    assert "belongs to another corpus" in size
    with pytest.raises(ValueError, match="belongs to another corpus"):
        fit(module(corpus), max_steps=1)


def test_a_card_that_was_changed_or_special_tokens_that_were(corpus: str, tmp_path: Path) -> None:
    card = json.loads(Path(f"{corpus}.card.json").read_text())
    for change, message in (
        ({"documents": 61}, "counts 61 documents and 60 sequences, which is an index of"),
        ({"idx_bytes": 7}, f"{corpus}.idx has .* bytes, {corpus}.card.json describes 7"),
        ({"card_version": 1}, "is no data card \\(version 1, known is 2\\)"),
        ({"eod_id": 255}, "says the data was made with the special tokens {'eod': 256}, but"),
        ({"special_ids": {"eod": 256, "pad": 3}}, "special tokens {'eod': 256, 'pad': 3}, but"),
    ):
        Path(f"{corpus}.card.json").write_text(json.dumps(card | change))
        (error,) = module(corpus, tokenizer="bytes").validate()
        assert re.search(message, error), error


def test_vocabulary_comes_from_card_or_tokenizer(corpus: str, tmp_path: Path) -> None:
    assert (module(corpus).vocab_size, module(corpus).eod_id) == (257, 256)
    Path(f"{corpus}.card.json").unlink()
    assert module(corpus).vocab_size is None
    assert module(corpus, tokenizer="bytes").vocab_size == 257
    (needed,) = module(corpus, eod_mask_loss=True).validate()
    assert "name their tokenizer" in needed
    rows = fit(module(corpus, tokenizer="bytes", eod_mask_loss=True), max_steps=2)
    assert rows.global_step == 2


def test_workers_and_cache(corpus: str, tmp_path: Path) -> None:
    plain = fit(module(corpus), max_steps=6).train_rows
    for _ in range(2):
        data = module(corpus, num_workers=1, cache_dir=tmp_path / "cache")
        assert fit(data, max_steps=6).train_rows == plain
    assert len(list((tmp_path / "cache").iterdir())) == 2  # train and valid
