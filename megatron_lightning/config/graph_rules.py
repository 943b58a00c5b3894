"""Rules of `RuntimeConfig.cuda_graphs`: what layers that run as CUDA graphs do not go with."""

from __future__ import annotations

from collections.abc import Iterator
from typing import get_args

from megatron_lightning.config.parallel import CudaGraphsName, ParallelConfig

REFUSE_UNTRIED = True
"""Whether what is built, and equal on the CPU to runs without graphs, but has never been recorded
on GPUs is refused: compiled layers with tensor or expert parallelism, and experts split over tensor
ranks. False in the test that records them (tests/gpu/test_cuda_graphs.py).
"""


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
            config.quantization is not None,
            "quantization",
            "rounded weights and scales are kept by the host for a window",
            "leave quantization out",
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
        for hit, what, why, remedy in (*rules, *_untried(config))
        if hit
    ]


def _untried(config: ParallelConfig) -> Iterator[tuple[bool, str, str, str]]:
    """What has never been recorded on GPUs: whether it is asked for, which, why not, remedy."""
    never = "collectives have never been recorded on GPUs"
    for name in ("tensor_parallel_size", "expert_parallel_size"):
        size = getattr(config, name)
        yield (
            REFUSE_UNTRIED and config.runtime.compile_layers and size > 1,
            f"compile_layers=True and {name}={size}",
            f"compiled layers' {never}",
            "set compile_layers=False",
        )
    size = config.expert_tensor_parallel_size
    yield (
        REFUSE_UNTRIED and size is not None and size > 1,
        f"expert_tensor_parallel_size={size}",
        f"their {never}",
        "set expert_tensor_parallel_size=1",
    )
