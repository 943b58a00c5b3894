"""Rules of `RuntimeConfig.cuda_graphs`: what layers that run as CUDA graphs do not go with."""

from __future__ import annotations

from collections.abc import Iterator
from typing import get_args

from megatron_lightning.config.parallel import CudaGraphsName, ParallelConfig
from megatron_lightning.config.quantization import QuantizationConfig


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
            "set both to 1",
        ),
        (
            config.context_parallel_size > 1,
            f"context_parallel_size={config.context_parallel_size}",
            "which parts of a sequence a rank holds is known to the host alone",
            "set context_parallel_size=1",
        ),
        (
            config.expert.overlap_all_to_all,
            "expert.overlap_all_to_all=True",
            "two micro-batches are under way at once and would write to the same memory",
            "set overlap_all_to_all=False",
        ),
        (
            config.data_parallel.sharding == "fsdp",
            "data_parallel.sharding='fsdp'",
            "parameters get other memory at each gather",
            "set sharding='optimizer'",
        ),
        (
            config.recompute.mode != "none" or config.recompute.offload,
            f"recompute.mode={config.recompute.mode!r}, offload={config.recompute.offload}",
            "graphs keep what backward needs in memory of their own",
            "set mode='none' and offload=False",
        ),
        (
            config.runtime.exact_dropout,
            "runtime.exact_dropout=True",
            "masks are computed from positions that the host knows",
            "set exact_dropout=False",
        ),
        (
            bool(config.sequence_parallel and config.runtime.overlap_tensor_parallel),
            "runtime.overlap_tensor_parallel=True",
            "the host tells which of several pieces of memory a product uses",
            "set overlap_tensor_parallel=None",
        ),
    )
    return [
        f"{label} {what}: {why}; {remedy}, or set cuda_graphs='none'"
        for hit, what, why, remedy in (*rules, *_low_precision(config.quantization))
        if hit
    ]


def _low_precision(
    config: QuantizationConfig | None,
) -> Iterator[tuple[bool, str, str, str]]:
    """What a graph would not repeat: whether it is asked for, which, why not, remedy."""
    if config is None:
        return
    yield (
        config.recipe == "nvfp4",
        "quantization.recipe='nvfp4'",
        "its noise is computed from positions that the host knows",
        "choose another recipe",
    )
    yield (
        config.kernels == "transformer_engine",
        "quantization.kernels='transformer_engine'",
        "its casts have never been recorded",
        "set kernels='torch'",
    )
    yield (
        config.experts,
        "quantization.experts=True",
        "the host keeps experts' rounded weights for a window",
        "set experts=False",
    )
