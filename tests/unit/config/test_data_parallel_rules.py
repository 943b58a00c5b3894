import re
from typing import Any

import pytest

from megatron_lightning.config import DataParallelConfig, PipelineConfig
from megatron_lightning.config.parallel import ParallelConfig
from megatron_lightning.config.validate import check_layout, check_world


def config_of(layout: dict[str, Any] | None = None, **data_parallel: Any) -> ParallelConfig:
    return ParallelConfig(data_parallel=DataParallelConfig(**data_parallel), **(layout or {}))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (
            dict(sharding="zero3"),
            r"sharding='zero3': choose one of \('none', 'optimizer', 'fsdp'\)",
        ),
        (dict(sharding="optimizer", moments_dtype="fp8"), "moments_dtype='fp8': choose one of"),
        (dict(sharding="optimizer", replicas=0), "replicas=0: it must be a whole number"),
        (dict(replicas=2), "replicas=2 with sharding='none': nothing is sharded"),
        (dict(moments_dtype="bfloat16"), "moments_dtype='bfloat16' with sharding='none'"),
        (dict(offload_optimizer=True), "set sharding='optimizer'"),
        (dict(sharding="fsdp", offload_optimizer=True), "offload_optimizer=True with sharding='f"),
        (dict(sharding="optimizer", reshard_after_forward=False), "set sharding='fsdp'"),
        (dict(sharding="optimizer", reduce_each_micro_batch=True), "set sharding='fsdp'"),
    ],
)
def test_bad_values_are_explained(values: dict[str, Any], message: str) -> None:
    problems = check_layout(config_of(**values))
    assert len(problems) == 1
    assert re.search(message, problems[0]), problems[0]


@pytest.mark.parametrize("schedule", ["zb-h1", "zb-v"])
def test_split_backwards_need_whole_parameters(schedule: Any) -> None:
    chunks = 2 if schedule == "zb-v" else 1
    pipeline = PipelineConfig(schedule=schedule, virtual_pipeline_size=chunks)
    layout = dict(pipeline_parallel_size=2, pipeline=pipeline)
    [problem] = check_layout(config_of(layout, sharding="fsdp"))
    assert f"pipeline.schedule={schedule!r} with data_parallel.sharding='fsdp'" in problem
    assert "schedule='1f1b', or sharding='optimizer'" in problem
    assert not check_layout(config_of(layout, sharding="optimizer"))


def test_chunks_of_one_rank_may_share_parameters() -> None:
    layout = dict(pipeline=PipelineConfig(virtual_pipeline_size=2))
    [problem] = check_layout(config_of(layout, sharding="fsdp"))
    assert "virtual_pipeline_size=2" in problem


def test_replicas_divide_the_ranks_with_equal_parameters() -> None:
    layout = dict(tensor_parallel_size=2, context_parallel_size=2)
    config = config_of(layout, sharding="optimizer", replicas=3)
    [problem] = check_world(config, 16)
    assert "replicas=3: it does not divide the 8 ranks" in problem
    assert "[1, 2, 4, 8]" in problem
    assert not check_world(config, 24)
    assert len(check_world(config, 18)) == 1  # tensor x context does not divide it, said once
