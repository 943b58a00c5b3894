"""What settings of overlap come to beside others."""

from dataclasses import replace
from typing import Any

import pytest

from megatron_lightning.config import QuantizationConfig, RuntimeConfig
from megatron_lightning.config.parallel import ParallelConfig


@pytest.mark.parametrize("wanted", [None, True, False])
@pytest.mark.parametrize(
    ("changes", "where_not_said"),
    [
        (dict(sequence_parallel=True), None),
        (dict(sequence_parallel=True, quantization=QuantizationConfig()), False),
    ],
)
def test_low_precision_hides_tensor_messages_on_request(
    changes: dict[str, Any], where_not_said: bool | None, wanted: bool | None
) -> None:
    runtime = RuntimeConfig(overlap_tensor_parallel=wanted)
    config = ParallelConfig(tensor_parallel_size=2, runtime=runtime, **changes)
    assert config.overlaps_tensor_parallel is (where_not_said if wanted is None else wanted)
    for other in (
        replace(config, sequence_parallel=False),
        replace(config, runtime=replace(runtime, cuda_graphs="layers")),
    ):
        assert other.overlaps_tensor_parallel is False
