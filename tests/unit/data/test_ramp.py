"""Batch sizes that grow, against Megatron's formula and step-by-step counting."""

import numpy as np
import pytest

from megatron_lightning.data import GlobalBatchSampler, PretrainingDataModule
from megatron_lightning.data.ramp import BatchSizeSchedule


def megatron(start: int, increment: int, samples: int, final: int, consumed: int) -> int:
    """`RampupBatchsizeNumMicroBatchesCalculator.update` of Megatron-Core, in a line."""
    each = samples / ((final - start) // increment)
    return final if consumed > samples else start + int(consumed / each) * increment


def test_rampup_is_megatrons() -> None:
    random = np.random.default_rng(0)
    for _ in range(300):
        start, increment, steps, samples = (int(n) for n in random.integers(1, [9, 9, 40, 3000]))
        final = start + steps * increment
        schedule = BatchSizeSchedule.parse([start, increment, samples], final)
        for consumed in [*random.integers(0, 3200, 20).tolist(), samples, samples + 1]:
            wanted = megatron(start, increment, samples, final, consumed)
            assert schedule.at(consumed) == wanted, (start, increment, samples, final, consumed)


@pytest.mark.parametrize("rampup", [None, [2, 3, 100], [[0, 1], [7, 4], [60, 17]]])
def test_counts_of_batches(rampup: list | None) -> None:
    schedule = BatchSizeSchedule.parse(rampup, 17)
    for begin in (0, 5, 61):
        consumed = begin
        for batches in range(40):
            assert schedule.samples_after(batches, begin) == consumed
            assert schedule.batches_until(consumed, begin) == batches
            assert schedule.batches_until(consumed + schedule.at(consumed) - 1, begin) == batches
            consumed += schedule.at(consumed)


@pytest.mark.parametrize("drop_last", [True, False])
def test_ranks_share_each_batch(drop_last: bool) -> None:
    schedule = BatchSizeSchedule.parse([[0, 4], [10, 8], [30, 12]], 12)
    ranks = [
        list(GlobalBatchSampler(53, schedule, dp_rank=r, dp_size=4, drop_last=drop_last))
        for r in range(4)
    ]
    steps = [[i for part in step for i in part] for step in zip(*ranks, strict=True)]
    assert [len(step) for step in steps] == [4, 4, 4, 8, 8, 8, 12] + [12] * (not drop_last)
    assert sorted(i for step in steps for i in step if i >= 0) == list(
        range(48 if drop_last else 53)
    )
    assert len(steps) == len(GlobalBatchSampler(53, schedule, dp_size=4, drop_last=drop_last))


@pytest.mark.parametrize(
    ("rampup", "message"),
    [
        ([2, 4, 100], "does not reach global_batch_size=16"),
        ([0, 4, 100], "does not reach"),
        ([16, 4, 100], "start below it"),
        ([2, 2], r"give \[start, increment, samples\]"),
        ([[5, 8], [9, 16]], "steps begin at sample 0"),
        ([[0, 8], [9, 12]], "the last size is 12"),
        ([[0, 3], [9, 16]], "rampup_batch_size: 3 must be a multiple of micro_batch_size=2"),
    ],
)
def test_refused(rampup: list, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        PretrainingDataModule("corpus", 8, 2, 16, rampup_batch_size=rampup)


def test_sizes_that_do_not_divide_by_the_layout() -> None:
    data = PretrainingDataModule("corpus", 8, 2, 16, rampup_batch_size=[4, 4, 100])
    errors = data._batch_sizes.layout_errors(4)
    assert [error.split(" must")[0] for error in errors] == [
        "rampup_batch_size: 4",
        "rampup_batch_size: 12",
    ]
