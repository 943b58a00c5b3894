"""What accounts say of samples, against plain counting."""

from pathlib import Path

import numpy as np
import pytest
import torch

from megatron_lightning.data import (
    GlobalBatchSampler,
    GPTDataset,
    IndexedDataset,
    IndexedDatasetWriter,
    PretrainingDataModule,
    StatefulLoader,
)
from megatron_lightning.data.account import ACCOUNT, BatchAccount, plain_note
from tests.data_runs import EOD, write_corpus


@pytest.mark.parametrize("extra", [True, False])
@pytest.mark.parametrize("drop_last", [True, False])
def test_documents_that_begin_in_a_sample(tmp_path: Path, extra: bool, drop_last: bool) -> None:
    random = np.random.default_rng(0)
    with IndexedDatasetWriter(tmp_path / "c", "int32") as writer:
        for length in [1, 1, 8, 16, 7, 1, *random.integers(1, 30, 40).tolist()]:
            writer.add_document(list(range(length)), [length])
    data = IndexedDataset(tmp_path / "c")
    samples = GPTDataset(
        data, range(len(data)), None, 8, 1, add_extra_token=extra, drop_last=drop_last
    )
    begins = np.concatenate(
        [np.arange(data.sequence_lengths[n]) == 0 for n in samples.document_index]
    )
    for index, place in enumerate(samples.shuffle_index.tolist()):
        sample, note = samples.read(index)
        assert note.documents == begins[place * 8 : place * 8 + 8].sum()
        real = min(8, len(begins) - place * 8)
        assert note.padding == 8 - real
        assert (sample["tokens"][:real] >= 0).all()


def test_padding_tokens_are_not_counted(tmp_path: Path) -> None:
    with IndexedDatasetWriter(tmp_path / "c", "int32") as writer:
        writer.add_document([5, 6, 7, 9, 9, 9, 5, 6, 7, 8, 9], [11])
    data = IndexedDataset(tmp_path / "c")
    samples = GPTDataset(data, range(1), None, 5, 1, pad_id=9)
    paddings = {int(p): samples.read(i)[1].padding for i, p in enumerate(samples.shuffle_index)}
    assert paddings == {0: 2, 1: 1}


def test_accounts_of_ranks_and_epochs(tmp_path: Path) -> None:
    """3 samples an epoch in batches of 2: one is left out of each epoch, and said to be."""
    with IndexedDatasetWriter(tmp_path / "c", "int32") as writer:
        writer.add_document(list(range(13)), [13])
    samples = GPTDataset(IndexedDataset(tmp_path / "c"), range(1), None, 4, 1, name="corpus")
    accounts: list[list[BatchAccount]] = []
    for rank in range(2):
        sampler = GlobalBatchSampler(3, 2, dp_rank=rank, dp_size=2, shuffle=True)
        loader = StatefulLoader(samples, sampler)
        accounts.append([batch[ACCOUNT] for _ in range(3) for batch in loader])
    for step in range(3):
        of_step = [rank[step] for rank in accounts]
        assert [account.left_out for account in of_step] == [int(step > 0)] * 2
        assert all(account.epoch.tolist() == [step] for account in of_step)
        assert all(list(a.totals()) == [("corpus", step)] for a in of_step)
    assert [len({int(r[s].sample_id[0]) for r in accounts}) for s in range(3)] == [2, 2, 2]


def test_samples_that_fill_up_a_batch_count_nothing(tmp_path: Path) -> None:
    path = write_corpus(tmp_path / "c", 20, 3)
    module = PretrainingDataModule(path, 16, 1, 4, split="1,1", tokenizer="bytes")
    module.setup("validate")
    loader = module.val_dataloader()
    accounts = [batch[ACCOUNT] for batch in loader]
    ids = np.concatenate([account.sample_id for account in accounts])
    assert sorted(ids[ids >= 0]) == list(range(len(module._evaluation["valid"][""])))
    tokens = sum(int(sums[3]) for account in accounts for sums in account.totals().values())
    corpus = IndexedDataset(path)
    valid = corpus.sequence_lengths[10:]
    # every token of the split is an input once, except a last one that is only a label
    assert tokens in (int(valid.sum()), int(valid.sum()) - 1)
    assert EOD in corpus[0]


def test_plain_notes() -> None:
    """Data sets without notes: documents by their boundaries, padding by the attention mask."""
    note = plain_note(
        {
            "tokens": torch.zeros(8, dtype=torch.int64),
            "cu_seqlens": torch.tensor([0, 3, 6, 8, 8]),
            "attention_mask": torch.tensor([1, 1, 1, 1, 1, 1, 0, 0]),
        }
    )
    assert (note.documents, note.padding, note.source) == (3, 2, 0)
