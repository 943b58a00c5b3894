"""Sequential and validation batches are those of Megatron-Core (its random orders depend on the
layout, ours do not and are tested elsewhere).
"""

import json

import pytest

from megatron_lightning.data import PADDING, GlobalBatchSampler
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
