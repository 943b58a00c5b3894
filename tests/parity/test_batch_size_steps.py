"""Batch sizes by steps are those of Megatron-Core along a recorded run."""

import json
from pathlib import Path

import pytest

from megatron_lightning.data.ramp import BatchSizeSchedule


@pytest.mark.parametrize("case", [0, 1])
def test_batch_size_steps(golden: Path, case: int) -> None:
    recorded = json.loads((golden / "data/schedules/batch_size_steps.json").read_text())[case]
    length = recorded["args"]["seq_length"] or 1
    steps = []
    for word in recorded["args"]["schedule"].split():
        start, size = word.split(":")
        tokens = int(start[:-1]) * 1024 if start.endswith("K") else int(start)
        steps.append([-(-tokens // length), int(size)])
    schedule = BatchSizeSchedule.parse(steps, steps[-1][1])
    consumed = 0
    for samples, size, _ in recorded["consumed_batchsize_microbatches"]:
        assert (samples, size) == (consumed, schedule.at(consumed))
        consumed += size
