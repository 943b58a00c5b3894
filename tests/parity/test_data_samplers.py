"""Sequential and validation batches are those of Megatron-Core (its random orders depend on the
layout, ours do not and are tested elsewhere).
"""

import json

import pytest

from megatron_lightning.data import PADDING, GlobalBatchSampler
from tests.unit.data.corpora import REFERENCE

CASES = [
    case
    for case in json.loads((REFERENCE / "samplers" / "samplers.json").read_text())
    if case["kind"] in ("sequential", "sequential_keep_last", "full_validation")
    and "expected_error" not in case
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
