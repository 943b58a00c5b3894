"""Rules of expert parallelism: its choices and sizes against the layout and the world. What a
network's experts need is in `parallel/tensor_checks.py`.
"""

from __future__ import annotations

from importlib.util import find_spec

from megatron_lightning.config.parallel import ParallelConfig
from megatron_lightning.utils.wording import counted


def expert_problems(config: ParallelConfig) -> list[str]:
    """Violations that need no world size."""
    problems = config.expert.check()
    if config.expert.dispatcher == "deep_ep":
        problems += _deep_ep_problems(config)
    if config.expert.overlap_all_to_all:
        problems += _pair_problems(config)
    if not config.expert.overlap_shared_experts:
        return problems
    reason = {
        "pipeline.schedule": config.pipeline.schedule if _splits_backward(config) else None,
        "data_parallel.sharding": "fsdp" if config.data_parallel.sharding == "fsdp" else None,
    }
    return problems + [
        f"expert.overlap_shared_experts=True with {field}={value!r}: it moves weights or their"
        " gradients without waiting for a second stream; set overlap_shared_experts=False"
        for field, value in reason.items()
        if value is not None
    ]


def _deep_ep_problems(config: ParallelConfig) -> list[str]:
    """What DeepEP can't do, or that it is not there."""
    refused = [
        (
            find_spec("deep_ep") is None,
            ": that package is not installed; install DeepEP (https://github.com/deepseek-ai/DeepEP)"
            ' or choose "all_to_all"',
        ),
        (
            config.expert_tensor_size > 1,
            f" with expert_tensor_parallel_size={config.expert_tensor_size}: it needs whole"
            " experts; set expert_tensor_parallel_size=1",
        ),
        (
            config.expert.overlap_all_to_all,
            " with expert.overlap_all_to_all=True: it has one buffer and two micro-batches would"
            " use it at a time; set overlap_all_to_all=False",
        ),
    ]
    return [f'expert.dispatcher="deep_ep"{text}' for applies, text in refused if applies]


def _pair_problems(config: ParallelConfig) -> list[str]:
    """What doesn't go together with a backward and a forward side by side on two streams."""
    label = "expert.overlap_all_to_all=True with"
    sharding = config.data_parallel.sharding
    refused = [
        (
            config.expert_parallel_size == 1,
            "expert_parallel_size=1: tokens don't travel, so there is nothing to hide; set"
            " expert_parallel_size to 2 or more, or overlap_all_to_all=False",
        ),
        (
            config.pipeline.schedule != "1f1b",
            f"pipeline.schedule={config.pipeline.schedule!r}: pairs of a forward and a backward are"
            " a form of 1F1B, also of the interleaved one; set schedule='1f1b', or"
            " overlap_all_to_all=False",
        ),
        (
            config.context_parallel_size > 1,
            f"context_parallel_size={config.context_parallel_size}: its tables are shared by"
            " micro-batches on one stream; set context_parallel_size=1, or"
            " overlap_all_to_all=False",
        ),
        (
            sharding == "fsdp",
            "data_parallel.sharding='fsdp': it gathers and frees weights that both would read;"
            " set sharding='optimizer', or overlap_all_to_all=False",
        ),
        (
            config.expert.overlap_shared_experts,
            "expert.overlap_shared_experts=True: shared experts of both would queue on one stream;"
            " set one of the two to False",
        ),
        (
            config.recompute.offload,
            "recompute.offload=True: copies to the CPU follow one stream; set offload=False, or"
            " overlap_all_to_all=False",
        ),
        (
            config.quantization is not None,
            "quantization: its scales and copies of weights are kept for one stream; set"
            " quantization=None, or overlap_all_to_all=False",
        ),
    ]
    return [f"{label} {text}" for applies, text in refused if applies]


def _splits_backward(config: ParallelConfig) -> bool:
    return config.pipeline.schedule.startswith("zb-")


def expert_world_problems(config: ParallelConfig, world_size: int) -> list[str]:
    """Violation of world = expert tensor x expert x pipeline x a whole number; the dense sizes
    divide the world.
    """
    product = config.expert_model_size
    if not config.folds_experts or product < 1 or world_size % product == 0:
        return []
    remedy = "use other sizes"
    stage = world_size // config.pipeline_parallel_size
    rest = stage // config.expert_parallel_size
    if config.expert_tensor_parallel_size is None and stage % config.expert_parallel_size == 0:
        remedy = (
            "set expert_tensor_parallel_size=1 (experts stay whole; None stands for"
            f" tensor_parallel_size) or another divisor of {rest}"
        )
    else:
        fits = [n for n in range(1, stage + 1) if stage % (n * config.expert_tensor_size) == 0]
        if fits:
            remedy = f"use expert_parallel_size of {fits}"
    return [
        f"devices x num_nodes = {counted(world_size, 'rank')}: expert_parallel_size="
        f"{config.expert_parallel_size} x expert_tensor_parallel_size={config.expert_tensor_size}"
        f" x pipeline_parallel_size={config.pipeline_parallel_size} = {product} does not divide"
        f" it; {remedy}"
    ]
