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
    if data.sharding != "optimizer":
        for field, value, plain in (
            ("moments_dtype", data.moments_dtype, "float32"),
            ("offload_optimizer", data.offload_optimizer, False),
        ):
            if value != plain:
                problems.append(
                    f"data_parallel.{field}={value!r} with sharding={data.sharding!r}: only the"
                    " sharded optimizer does that; set sharding='optimizer'"
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
