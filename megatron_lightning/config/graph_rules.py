"""Rules of `RuntimeConfig.cuda_graphs`: what layers that run as CUDA graphs do not go with."""

from __future__ import annotations

from typing import get_args

from megatron_lightning.config.parallel import CudaGraphsName, ParallelConfig

NEVER_RUN = (
    "tensor_parallel_size",
    "expert_parallel_size",
    "expert_tensor_parallel_size",
)
"""Sizes for which graphs are built, and equal on the CPU to runs without, but whose collectives
have never been recorded with NCCL over several GPUs (tests/gpu/test_cuda_graphs.py): refused till
then.
"""
_NEVER_RUN = "collectives within graphs have never been run with NCCL"


def graph_problems(config: ParallelConfig) -> list[str]:
    """Violations that need no world size: field, value, remedy."""
    known = get_args(CudaGraphsName)
    wanted = config.runtime.cuda_graphs
    if wanted not in known:
        return [f"runtime.cuda_graphs={wanted!r}: choose one of {known}"]
    if wanted == "none":
        return []
    label = f"runtime.cuda_graphs={wanted!r} with"
    rules = (
        (
            config.pipeline_parallel_size > 1 or config.pipeline.virtual_pipeline_size > 1,
            f"pipeline_parallel_size={config.pipeline_parallel_size} and"
            f" pipeline.virtual_pipeline_size={config.pipeline.virtual_pipeline_size}",
            "several micro-batches are under way at once and would write to the same memory",
        ),
        (
            config.context_parallel_size > 1,
            f"context_parallel_size={config.context_parallel_size}",
            "which parts of a sequence a rank holds is known to the host alone",
        ),
        (
            config.expert.overlap_all_to_all,
            "expert.overlap_all_to_all=True",
            "two micro-batches are under way at once and would write to the same memory",
        ),
        (
            config.data_parallel.sharding == "fsdp",
            "data_parallel.sharding='fsdp'",
            "parameters get other memory at each gather; sharding='optimizer' keeps it",
        ),
        (
            config.recompute.mode != "none" or config.recompute.offload,
            f"recompute.mode={config.recompute.mode!r}, offload={config.recompute.offload}",
            "graphs keep what backward needs in memory of their own",
        ),
        (
            config.runtime.exact_dropout,
            "runtime.exact_dropout=True",
            "masks are computed from positions that the host knows",
        ),
        (
            config.quantization is not None,
            "quantization",
            "rounded weights and scales are kept by the host for a window",
        ),
        (
            bool(config.sequence_parallel and config.runtime.overlap_tensor_parallel),
            "runtime.overlap_tensor_parallel=True",
            "the host tells which of several pieces of memory a product uses; set it to None",
        ),
    )
    untried = [
        (value > 1, f"{name}={value}", f"{_NEVER_RUN}; set {name}=1")
        for name in NEVER_RUN
        if (value := getattr(config, name))
    ]
    found = (*rules, *untried)
    return [f"{label} {what}: {why}, or cuda_graphs='none'" for hit, what, why in found if hit]
