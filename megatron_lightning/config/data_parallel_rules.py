"""Rules of `DataParallelConfig`: what may be sharded how, against the layout and the world."""

from __future__ import annotations

from typing import get_args

from megatron_lightning.config.parallel import MomentsName, ParallelConfig, ShardingName


def data_parallel_problems(config: ParallelConfig) -> list[str]:
    """Violations that need no world size: field, value, remedy."""
    data = config.data_parallel
    problems: list[str] = []
    for field, value, known in (
        ("sharding", data.sharding, get_args(ShardingName)),
        ("moments_dtype", data.moments_dtype, get_args(MomentsName)),
    ):
        if value not in known:
            problems.append(f"data_parallel.{field}={value!r}: choose one of {known}")
    if not isinstance(data.replicas, int) or isinstance(data.replicas, bool) or data.replicas < 1:
        problems.append(
            f"data_parallel.replicas={data.replicas!r}: it must be a whole number of at least 1"
        )
    elif data.replicas > 1 and data.sharding == "none":
        problems.append(
            f"data_parallel.replicas={data.replicas} with sharding='none': nothing is sharded, so"
            " every rank is a copy; set sharding='optimizer' or 'fsdp', or replicas=1"
        )
    for field, value, plain, needs in (
        ("moments_dtype", data.moments_dtype, "float32", ("optimizer", "fsdp")),
        ("offload_optimizer", data.offload_optimizer, False, ("optimizer",)),
        ("reshard_after_forward", data.reshard_after_forward, True, ("fsdp",)),
        ("reduce_each_micro_batch", data.reduce_each_micro_batch, False, ("fsdp",)),
    ):
        if value != plain and data.sharding not in needs:
            problems.append(
                f"data_parallel.{field}={value!r} with sharding={data.sharding!r}: it has no"
                f" effect there; set sharding={' or '.join(map(repr, needs))}"
            )
    return problems + (_fsdp_problems(config) if data.sharding == "fsdp" else [])


def _fsdp_problems(config: ParallelConfig) -> list[str]:
    problems: list[str] = []
    pipeline = config.pipeline
    if pipeline.schedule.startswith("zb-"):
        problems.append(
            f"pipeline.schedule={pipeline.schedule!r} with data_parallel.sharding='fsdp': it"
            " computes weight gradients apart from the backward pass, which reduces and frees the"
            " parameters they belong to; use schedule='1f1b', or sharding='optimizer'"
        )
    if pipeline.virtual_pipeline_size > 1 and config.pipeline_parallel_size == 1:
        problems.append(
            f"pipeline.virtual_pipeline_size={pipeline.virtual_pipeline_size} with"
            " pipeline_parallel_size=1 and data_parallel.sharding='fsdp': chunks of one rank may"
            " share parameters, which can't be sharded twice; set virtual_pipeline_size=1"
        )
    return problems


def replica_problems(config: ParallelConfig, world_size: int) -> list[str]:
    """Violation of replicas x shards = data ranks (context ranks among them)."""
    product = config.model_parallel_size // config.context_parallel_size
    replicas = config.data_parallel.replicas
    if world_size % config.model_parallel_size or replicas < 1:
        return []
    ranks = world_size // product
    if ranks % replicas == 0:
        return []
    fits = [n for n in range(1, ranks + 1) if ranks % n == 0]
    return [
        f"data_parallel.replicas={replicas}: it does not divide the {ranks} ranks that hold equal"
        f" parameters (data x context parallel); use one of {fits}"
    ]
