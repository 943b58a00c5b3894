"""Sequential, validation and cyclic batches are those of Megatron-Core.

All 45 recorded cases are accounted for: cyclic ones without sharded data are reproduced; with
sharded data they depend on the layout, which a test shows, and are refused; where Megatron refuses
to begin behind the data's end, our sampler does so too.
"""

import itertools
import json

import pytest

from megatron_lightning.data import PADDING, GlobalBatchSampler, PretrainingDataModule
from tests.unit.data.corpora import REFERENCE

RECORDED = json.loads((REFERENCE / "samplers" / "samplers.json").read_text())
CASES = [
    case
    for case in RECORDED
    if case["kind"] in ("sequential", "sequential_keep_last") and "expected_error" not in case
]


@pytest.mark.parametrize("case", CASES, ids=lambda c: "{kind}-dp{data_parallel_size}".format(**c))
def test_sequential_batches(case: dict) -> None:
    ranks = case["data_parallel_size"]
    for rank in range(ranks):
        sampler = GlobalBatchSampler(
            case["total_samples"],
            case["micro_batch_size"] * ranks,
            dp_rank=rank,
            dp_size=ranks,
            drop_last=case["kind"] == "sequential",
        )
        sampler.start = case["consumed_samples"]
        ours = list(sampler)
        assert all(len(batch) == case["micro_batch_size"] for batch in ours)  # filled up
        assert [[i for i in batch if i != PADDING] for batch in ours] == case["batches"][rank][0]


@pytest.mark.parametrize("case", [c for c in RECORDED if c["kind"] == "full_validation"])
def test_whole_validation(case: dict) -> None:
    """One sample at a time, from the first, whatever was consumed in training; no filling."""
    ranks, samples = case["data_parallel_size"], case["total_samples"]
    for rank in range(ranks):
        sampler = GlobalBatchSampler(samples, ranks, dp_rank=rank, dp_size=ranks, drop_last=False)
        ours = [[i for i in batch if i != PADDING] for batch in sampler]
        assert [batch for batch in ours if batch] == case["batches"][rank][0]


def of_kind(kind: str) -> list[dict]:
    return [case for case in RECORDED if case["kind"] == kind]


@pytest.mark.parametrize("case", of_kind("random_global"))
def test_cyclic_batches(case: dict) -> None:
    """Two passes: from the consumed samples to the epoch's end, then the next epoch."""
    ranks, micro = case["data_parallel_size"], case["micro_batch_size"]
    epoch_samples = case["total_samples"] - case["total_samples"] % (micro * ranks)
    epoch, start = divmod(case["consumed_samples"], epoch_samples)
    for rank in range(ranks):
        sampler = GlobalBatchSampler(
            case["total_samples"],
            micro * ranks,
            dp_rank=rank,
            dp_size=ranks,
            cyclic_micro_batch=micro,
        )
        for number, (at, batches) in enumerate(
            zip((start, 0), case["batches"][rank], strict=True), epoch
        ):
            sampler.epoch, sampler.start = number, at
            assert list(sampler) == batches
        assert case["consumed_after_pass"][rank] == [
            epoch_samples * (epoch + passed) for passed in (1, 2)
        ]


def first_of_all_ranks(case: dict, samples: int) -> set[int]:
    """Numbers of the first `samples` samples that the ranks train on together."""
    each = samples // case["data_parallel_size"]
    return {
        number
        for rank in case["batches"]
        for number in itertools.islice(itertools.chain.from_iterable(rank[0]), each)
    }


def test_sharded_cyclic_order_depends_on_the_layout() -> None:
    """Why it is not offered: the recorded ranks train on other samples when their number changes,
    which the order without sharding does not.
    """
    seen = {
        kind: [
            first_of_all_ranks(case, 64)
            for case in of_kind(kind)
            if case["total_samples"] == 203 and case["consumed_samples"] == 0
        ]
        for kind in ("random_sharded", "random_global")
    }
    assert len(seen["random_sharded"]) == len(seen["random_global"]) == 3  # of 1, 2 and 4 ranks
    assert seen["random_global"][0] == seen["random_global"][1] == seen["random_global"][2]
    for one, other in itertools.combinations(seen["random_sharded"], 2):
        assert one != other
    with pytest.raises(ValueError, match=r"cyclic order with sharded data.*is not offered"):
        PretrainingDataModule("corpus", 8, 1, 1, dataloader_type="random_sharded")  # pyright: ignore


@pytest.mark.parametrize("case", [c for c in RECORDED if "expected_error" in c])
def test_beginning_behind_the_end_is_refused(case: dict) -> None:
    ranks = case["data_parallel_size"]
    sampler = GlobalBatchSampler(
        case["total_samples"], case["micro_batch_size"] * ranks, dp_size=ranks
    )
    sampler.start = case["consumed_samples"]
    with pytest.raises(ValueError, match="start=264 is behind the 203 samples of an epoch"):
        list(sampler)


def test_every_recorded_case_is_here() -> None:
    tested = len(CASES) + sum(
        len(of_kind(kind)) for kind in ("full_validation", "random_global", "random_sharded")
    )
    assert tested + sum("expected_error" in case for case in RECORDED) == len(RECORDED)
