"""`dataloader_type="cyclic"` of the data module: one global order in every layout, exact resume,
and a warning where the order changes.
"""

import itertools
import json
import warnings

import pytest

from megatron_lightning.data import PretrainingDataModule, cyclic_order, preprocess_jsonl
from megatron_lightning.data.account import ACCOUNT


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("corpus")
    lines = folder / "in.jsonl"
    with lines.open("w") as out:
        for number in range(60):
            out.write(json.dumps({"text": f"document {number} " + "x" * (number % 7)}) + "\n")
    preprocess_jsonl(lines, folder / "corpus", "bytes")
    return str(folder / "corpus")


class At(PretrainingDataModule):
    """One rank of a data-parallel axis, without processes."""

    rank, ranks = 0, 1

    def _dp(self) -> tuple[int, int]:
        return self.rank, self.ranks


def module(corpus: str, rank: int = 0, ranks: int = 1, **options) -> At:
    settings = {"seq_length": 16, "micro_batch_size": 2, "global_batch_size": 8, "split": "1"}
    data = At(corpus, **{**settings, "dataloader_type": "cyclic", **options})
    data.rank, data.ranks = rank, ranks
    data.setup("fit")
    return data


def sample_ids(data: PretrainingDataModule, batches: int) -> list[list[int]]:
    taken = itertools.islice(iter(data.train_dataloader()), batches)  # pyright: ignore
    return [batch[ACCOUNT].sample_id.tolist() for batch in taken]  # pyright: ignore


def test_global_batches_do_not_depend_on_the_ranks(corpus: str) -> None:
    alone = sample_ids(module(corpus), 5)
    for ranks in (2, 4):
        shares = [sample_ids(module(corpus, rank, ranks), 5) for rank in range(ranks)]
        dealt = [
            [number for turn in zip(*batch, strict=True) for number in turn]
            for batch in zip(*shares, strict=True)
        ]
        assert dealt == alone
    assert list(itertools.chain(*alone)) == cyclic_order(_permuted(corpus), 0)[:40].tolist()


def _permuted(corpus: str) -> int:
    data = module(corpus)
    return data.train_dataloader().batch_sampler.num_samples  # pyright: ignore


def test_resumes_in_another_layout_and_goes_into_the_next_epoch(corpus: str) -> None:
    epoch = _permuted(corpus) // 8
    data = module(corpus)
    first = sample_ids(data, 3)
    resumed = module(corpus, 1, 2)
    resumed.load_state_dict(data.state_dict())
    rest = sample_ids(resumed, epoch - 3)
    whole = sample_ids(module(corpus), epoch)
    assert first == whole[:3]
    assert rest == [batch[1::2] for batch in whole[3:]]
    second = sample_ids(resumed, 1)  # the next pass is the next epoch's order
    assert second == [cyclic_order(_permuted(corpus), 1)[1:8:2].tolist()]


def test_a_changed_order_is_warned_of(corpus: str) -> None:
    data = module(corpus)
    sample_ids(data, 2)
    state = data.state_dict()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        module(corpus, 1, 4).load_state_dict(state)
    with pytest.warns(UserWarning, match="dataloader_type"):
        module(corpus, dataloader_type="single").load_state_dict(state)


def test_other_types_are_refused(corpus: str) -> None:
    with pytest.raises(ValueError, match=r'dataloader_type="external" must be "single" or'):
        module(corpus, dataloader_type="external")
