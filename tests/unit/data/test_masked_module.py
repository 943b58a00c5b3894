"""Masked, span and fill-in-the-middle samples through the data module and a Trainer."""

import json
import pickle
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import pytest
import torch

from megatron_lightning.data import IndexedDataset, PretrainingDataModule, preprocess_jsonl
from megatron_lightning.data.loader import stack_samples
from megatron_lightning.data.masked import BERTDataConfig, FIMConfig, T5DataConfig
from megatron_lightning.runtime.batch import split_batch
from megatron_lightning.runtime.context_batch import SEQUENCE_DIMS
from tests.unit.data import masked_corpora as corpora
from tests.unit.data.masked_corpora import FOLDER, TOKENS

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")
SENTENCES, CODE = str(FOLDER / "sentences"), str(FOLDER / "code")


@pytest.fixture
def words(tmp_path: Path) -> str:
    """A tokenizer file with the recorded vocabulary."""
    content = {
        "version": "1.0",
        "model": {"type": "WordLevel", "vocab": TOKENS, "unk_token": "[UNK]"},
        "added_tokens": [],
    }
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    return str(tmp_path / "tokenizer.json")


class Recorder(L.LightningModule):
    """Keeps what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1))
        self.trained: list[dict[str, torch.Tensor]] = []
        self.evaluation: list[dict[str, torch.Tensor]] = []

    def training_step(self, batch: dict, batch_idx: int) -> torch.Tensor:
        self.trained.append(batch)
        return (self.weight * batch["loss_mask"]).sum()

    def validation_step(self, batch: dict, batch_idx: int) -> None:
        self.evaluation.append(batch)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def trainer(**options: Any) -> L.Trainer:
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    return L.Trainer(accelerator="cpu", devices=1, num_sanity_val_steps=0, **quiet, **options)


def module(paths: Any = SENTENCES, **options: Any) -> PretrainingDataModule:
    settings = {"seq_length": 64, "micro_batch_size": 2, "global_batch_size": 4, "split": "8,2,0"}
    return PretrainingDataModule(paths, **{**settings, **options})


def rows(data: PretrainingDataModule, field: str = "tokens", **options: Any) -> list[list[int]]:
    recorder = Recorder()
    options = {"enable_checkpointing": False, "limit_val_batches": 0, **options}
    trainer(**options).fit(recorder, data)
    return [row for batch in recorder.trained for row in batch[field].tolist()]


def test_bert_batches(words: str):
    read = rows(module(dataset="bert", tokenizer=words), max_steps=10)
    config = BERTDataConfig()
    vocabulary = corpora.BERTVocabulary.from_tokens(TOKENS, config)
    indexed = IndexedDataset(SENTENCES)
    data = corpora.BERTDataset(indexed, range(48), 40, 64, 1234, vocabulary, config)
    assert read == [data[number]["tokens"].tolist() for number in range(40)]


def test_t5_batches(words: str):
    config = T5DataConfig(decoder_seq_length=40)
    data = module(dataset=config, tokenizer=words)
    assert {len(row) for row in rows(data, "decoder_tokens", max_steps=3)} == {40}
    assert {len(row) for row in rows(data, max_steps=3)} == {64}


def test_fim_batches():
    data = module(CODE, dataset=FIMConfig(rate=1.0), tokenizer=str(FOLDER / "tokenizer.json"))
    read = rows(data, max_steps=5)
    assert sum(row.count(1) for row in read) > 10  # token <fim_prefix>


def test_validation_reads_every_sample_of_the_split_once(words: str):
    recorder = Recorder()
    data = module(dataset="bert", tokenizer=words)
    trainer(enable_checkpointing=False).validate(recorder, data, verbose=False)
    vocabulary = corpora.BERTVocabulary.from_tokens(TOKENS, BERTDataConfig())
    indexed = IndexedDataset(SENTENCES)
    whole = corpora.BERTDataset(indexed, range(48, 60), None, 64, 1234, vocabulary)
    wanted = sum(int(whole[number]["loss_mask"].sum()) for number in range(len(whole)))
    assert int(sum(batch["loss_mask"].sum() for batch in recorder.evaluation)) == wanted > 0


@pytest.mark.parametrize("kind", ["bert", "t5"])
def test_workers_change_nothing(words: str, kind: str):
    options = {"dataset": kind, "tokenizer": words}
    here = rows(module(**options), max_steps=6)
    assert rows(module(**options, num_workers=2), max_steps=6) == here


def test_fim_in_workers():
    options = {"dataset": "fim", "tokenizer": str(FOLDER / "tokenizer.json")}
    here = rows(module(CODE, **options), max_steps=6)
    assert rows(module(CODE, **options, num_workers=2), max_steps=6) == here


def test_data_sets_travel_to_processes(words: str):
    for dataset, paths, file in (
        ("bert", SENTENCES, words),
        ("t5", SENTENCES, words),
        ("fim", CODE, str(FOLDER / "tokenizer.json")),
    ):
        data = module(paths, dataset=dataset, tokenizer=file)
        data.setup("fit")
        copy = pickle.loads(pickle.dumps(data._train))
        assert torch.equal(copy[3]["tokens"], data._train[3]["tokens"])


def test_blend_of_sentence_corpora(words: str, tmp_path: Path):
    other = corpora.write(tmp_path, [[[150] * 9, [151] * 9, [152] * 5]] * 30)
    paths = [0.75, SENTENCES, 0.25, other.prefix]
    recorder = Recorder()
    data = module(paths, dataset="bert", tokenizer=words)
    trainer(max_steps=10, enable_checkpointing=False, limit_val_batches=0).fit(recorder, data)
    accounts = [batch["account"] for batch in recorder.trained]
    assert accounts[0].names == (SENTENCES, other.prefix)
    sources = np.concatenate([account.source for account in accounts])
    assert np.bincount(sources).tolist() == [30, 10]
    tokens = np.concatenate([batch["tokens"].numpy() for batch in recorder.trained])
    text = np.isin(tokens, [150, 151, 152]).sum(1)
    assert text[sources == 1].mean() > 15 > 3 > text[sources == 0].mean()


def test_resumed_run_reads_on(words: str, tmp_path: Path):
    options = {"dataset": "t5", "tokenizer": words, "num_train_samples": 200}
    whole = rows(module(**options), max_steps=10)
    recorder, run = Recorder(), trainer(max_steps=4, limit_val_batches=0, default_root_dir=tmp_path)
    run.fit(recorder, module(**options))
    run.save_checkpoint(tmp_path / "at4.ckpt")
    rest = Recorder()
    resumed = trainer(max_steps=10, limit_val_batches=0, enable_checkpointing=False)
    changed = module(**options, micro_batch_size=1, num_workers=1)
    resumed.fit(rest, changed, ckpt_path=tmp_path / "at4.ckpt", weights_only=False)
    assert [row for batch in rest.trained for row in batch["tokens"].tolist()] == whole[16:]


def test_index_cache_is_used(words: str, tmp_path: Path):
    options = {"dataset": "bert", "tokenizer": words, "cache_dir": tmp_path / "cache"}
    first = rows(module(**options), max_steps=3)
    assert len(list((tmp_path / "cache").iterdir())) >= 1
    assert rows(module(**options), max_steps=3) == first


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dataset": "bart"}, "dataset='bart': choose one of"),
        ({"paths": None, "mock_data": True, "dataset": "bert"}, "mock_data=True: not with dataset"),
    ],
)
def test_arguments_refused_before_any_file_is_opened(options: dict, message: str):
    with pytest.raises(ValueError, match=message):
        module(**options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dataset": "bert"}, "tokenizer=None: BERTDataConfig needs special tokens"),
        ({"dataset": "t5", "tokenizer": "bytes"}, "its tokens have no names"),
        ({"dataset": "fim", "tokenizer": "WORDS"}, "prefix_token='<fim_prefix>'"),
        (
            {"dataset": "bert", "tokenizer": "WORDS", "eod_mask_loss": True},
            "not with BERTDataConfig, whose samples hold one document",
        ),
        (
            {"dataset": BERTDataConfig(mask_token="[HIDE]"), "tokenizer": "WORDS"},
            r"mask_token='\[HIDE\]': the vocabulary has no token \[HIDE\]",
        ),
    ],
)
def test_wrong_tokenizers_are_reported_before_a_start(options: dict, message: str, words: str):
    given = {key: words if value == "WORDS" else value for key, value in options.items()}
    with pytest.raises(ValueError, match=message):
        module(**given).setup("fit")


def test_from_sentences_to_samples(tmp_path: Path):
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    lines = FOLDER.parent / "corpora" / "fable" / "sentences.jsonl"
    texts = [" ".join(json.loads(line)["text"]) for line in lines.read_text().splitlines()[:100]]
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    trainer = trainers.WordPieceTrainer(vocab_size=500, special_tokens=special, show_progress=False)
    tokenizer.train_from_iterator(texts, trainer)
    file = str(tmp_path / "tokenizer.json")
    tokenizer.save(file)
    preprocess_jsonl(lines, tmp_path / "fable", file, append_eod=False)
    data = module(str(tmp_path / "fable"), dataset="bert", tokenizer=file, seq_length=96)
    data.setup("fit")
    source = data._train
    sample = source[0]
    assert data.vocab_size == 500
    assert int(sample["loss_mask"].sum()) in range(1, 15)
    text = torch.where(sample["labels"] >= 0, sample["labels"], sample["tokens"])
    filled = int(sample["padding_mask"].sum())
    ends = (text == tokenizer.token_to_id("[SEP]")).nonzero().flatten().tolist()
    assert len(ends) == 2
    assert ends[1] == filled - 1
    words = tokenizer.decode(text[1 : ends[0]].tolist()).replace(" ##", "")
    assert sum(words.split()[1] in whole for whole in texts) >= 1


@pytest.mark.parametrize("make", [corpora.bert, corpora.t5])
def test_batches_are_cut_into_micro_batches(make: Any):
    data = make(samples=10)
    batch = stack_samples([data[number] for number in range(4)])
    parts = split_batch(batch, micro_batch_size=2, pipeline_size=1)
    for name, values in batch.items():
        assert torch.equal(torch.cat([part.data[name] for part in parts]), values)


def test_context_ranks_know_the_fields():
    assert set(corpora.bert()[0]) <= set(SEQUENCE_DIMS)
