"""The order of samples does not depend on the layout, and continues anywhere."""

import numpy as np
import pytest

from megatron_lightning.data import PADDING, GlobalBatchSampler, epoch_order


def stream(batch: int, ranks: int, start: int = 0, epoch: int = 0, **options: object) -> list[int]:
    """What all ranks read together, in order."""
    per_rank = []
    for rank in range(ranks):
        sampler = GlobalBatchSampler(53, batch, dp_rank=rank, dp_size=ranks, seed=3, **options)
        sampler.epoch, sampler.start = epoch, start
        per_rank.append(list(sampler))
    assert len({len(batches) for batches in per_rank}) == 1
    return [i for step in zip(*per_rank, strict=True) for part in step for i in part]


@pytest.mark.parametrize("shuffle", [True, False])
def test_order_is_independent_of_ranks(shuffle: bool) -> None:
    one = stream(12, 1, shuffle=shuffle)
    for ranks in (2, 3, 4, 6, 12):
        assert stream(12, ranks, shuffle=shuffle) == one
    assert len(one) == len(set(one)) == 48


def test_resumes_at_any_sample_with_any_batch_size() -> None:
    whole = epoch_order(53, 3, 2).tolist()
    for start in (0, 1, 12, 40, 47, 53, 56):
        for batch, ranks in ((12, 3), (4, 1), (6, 2)):
            rest = stream(batch, ranks, start, epoch=2, shuffle=True)
            assert rest == whole[start : start + len(rest)]
            assert len(rest) == max(53 - start, 0) // batch * batch


def test_epochs_have_their_own_order() -> None:
    orders = [stream(1, 1, epoch=epoch, shuffle=True) for epoch in range(3)]
    assert all(sorted(order) == list(range(53)) for order in orders)
    assert len({tuple(order) for order in orders}) == 3
    assert stream(1, 1, epoch=1, shuffle=True) == orders[1]
    kept = [stream(1, 1, epoch=e, shuffle=True, shuffle_first_epoch=False) for e in range(2)]
    assert kept == [list(range(53)), orders[1]]
    assert stream(1, 1, epoch=7, shuffle=False) == list(range(53))


def test_order_is_frozen() -> None:
    """A stored order: another numpy or torch must not change what a resumed run reads."""
    assert epoch_order(10, 1234, 1).tolist() == [3, 9, 7, 6, 4, 1, 8, 2, 5, 0]
    assert epoch_order(10, 1234, 1).dtype == np.uint32


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_every_sample_comes_once_when_nothing_is_dropped(ranks: int) -> None:
    seen = stream(8, ranks, drop_last=False)
    assert len(seen) == 56  # 7 batches on every rank
    assert [i for i in seen if i != PADDING] == list(range(53))
    assert seen.count(PADDING) == 3


def test_lengths() -> None:
    sampler = GlobalBatchSampler(53, 8, drop_last=True)
    assert (len(sampler), sampler.batches_after(8), sampler.batches_after(50)) == (6, 5, 0)
    sampler = GlobalBatchSampler(53, 8, drop_last=False)
    assert (len(sampler), sampler.batches_after(50), sampler.batches_after(53)) == (7, 1, 0)
    assert len(GlobalBatchSampler(0, 8, drop_last=False)) == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"global_batch_size": 8, "dp_size": 3}, "3 data-parallel ranks, such as 6"),
        ({"global_batch_size": 0}, "global_batch_size=0"),
        ({"global_batch_size": 8, "dp_rank": 2, "dp_size": 2}, "dp_rank=2"),
        ({"num_samples": -1, "global_batch_size": 8}, "num_samples=-1"),
    ],
)
def test_bad_arguments_are_refused(arguments: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        GlobalBatchSampler(**{"num_samples": 10, **arguments})
