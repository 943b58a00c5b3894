"""Checks of a layout against itself and the world. One small function a rule; all violations are
reported at once.

A rule returns None or one explained error: field, value, what would fit. Pure: usable before any
process exists.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import get_args

from megatron_lightning.config.data_parallel_rules import data_parallel_problems, replica_problems
from megatron_lightning.config.expert_rules import expert_problems, expert_world_problems
from megatron_lightning.config.field_types import type_problems
from megatron_lightning.config.graph_rules import graph_problems
from megatron_lightning.config.parallel import ParallelConfig, ScheduleName
from megatron_lightning.utils.wording import counted

Rule = Callable[[ParallelConfig], str | None]


class ConfigurationError(ValueError):
    """Bad input, found before anything was started. Its message lists every violation."""

    def __init__(self, problems: Iterable[str]) -> None:
        self.problems = tuple(problems)
        lines = "\n".join(f"  - {problem}" for problem in self.problems)
        count = f"{len(self.problems)} problem{'s' if len(self.problems) > 1 else ''}"
        super().__init__(f"{count} in the configuration:\n{lines}")

    def __reduce__(self) -> tuple[type[ConfigurationError], tuple[tuple[str, ...]]]:
        """By its problems: ranks hand it to the process that started them."""
        return type(self), (self.problems,)


def raise_if_any(problems: Iterable[str]) -> None:
    """Raise one ConfigurationError that lists all `problems`; do nothing when there are none."""
    found = list(dict.fromkeys(problems))
    if found:
        raise ConfigurationError(found)


def _tensor_size(config: ParallelConfig) -> str | None:
    return _positive("tensor_parallel_size", config.tensor_parallel_size)


def _pipeline_size(config: ParallelConfig) -> str | None:
    return _positive("pipeline_parallel_size", config.pipeline_parallel_size)


def _context_size(config: ParallelConfig) -> str | None:
    return _positive("context_parallel_size", config.context_parallel_size)


def _expert_size(config: ParallelConfig) -> str | None:
    return _positive("expert_parallel_size", config.expert_parallel_size)


def _expert_tensor_size(config: ParallelConfig) -> str | None:
    if config.expert_tensor_parallel_size is None:
        return None
    return _positive("expert_tensor_parallel_size", config.expert_tensor_parallel_size)


def _virtual_size(config: ParallelConfig) -> str | None:
    return _positive("pipeline.virtual_pipeline_size", config.pipeline.virtual_pipeline_size)


def _micro_batch_size(config: ParallelConfig) -> str | None:
    if config.micro_batch_size is None:
        return None
    return _positive("micro_batch_size", config.micro_batch_size)


def _sequence_parallel(config: ParallelConfig) -> str | None:
    if config.sequence_parallel and config.tensor_parallel_size == 1:
        return (
            "sequence_parallel=True with tensor_parallel_size=1: it splits the sequence over the "
            "tensor axis;"
            " set tensor_parallel_size to 2 or more, or sequence_parallel=False"
        )
    return None


def _overlap_tensor(config: ParallelConfig) -> str | None:
    label = "runtime.overlap_tensor_parallel=True"
    if not config.runtime.overlap_tensor_parallel:
        return None
    if not config.sequence_parallel:
        return (
            f"{label} with sequence_parallel=False: only parts of a sequence can be on their way"
            " while others are multiplied; set sequence_parallel=True, or None"
        )
    if config.expert.overlap_all_to_all:
        return (
            f"{label} with expert.overlap_all_to_all=True: the moves of two passes that run side by"
            " side would mix; set one of them to False"
        )
    return None


def _schedule(config: ParallelConfig) -> str | None:
    known = get_args(ScheduleName)
    if config.pipeline.schedule not in known:
        return f"pipeline.schedule={config.pipeline.schedule!r}: choose one of {known}"
    return None


def _schedule_chunks(config: ParallelConfig) -> str | None:
    schedule, chunks = config.pipeline.schedule, config.pipeline.virtual_pipeline_size
    label = f"pipeline.schedule={schedule!r} with pipeline.virtual_pipeline_size={chunks}:"
    if schedule in ("gpipe", "zb-h1") and chunks > 1:
        return (
            f"{label} only '1f1b' (interleaved) and 'zb-v' run virtual stages; set one of these, or"
            " virtual_pipeline_size=1"
        )
    if schedule == "zb-v" and chunks != 2:
        return f"{label} its stages lie in a V of two chunks a rank; set virtual_pipeline_size=2"
    return None


def _message_ctas(config: ParallelConfig) -> str | None:
    ctas = config.pipeline.message_ctas
    if ctas is None:
        return None
    if not 1 <= ctas <= 32:
        return f"pipeline.message_ctas={ctas}: give 1 to 32 thread blocks, or None: NCCL's choice"
    if config.pipeline_parallel_size == 1:
        return (
            f"pipeline.message_ctas={ctas} with pipeline_parallel_size=1: there are no messages"
            " between stages; leave it out, or set pipeline_parallel_size to 2 or more"
        )
    return None


def _head_gradient(config: ParallelConfig) -> str | None:
    pipeline = config.pipeline
    if pipeline.defer_head_gradient or pipeline.schedule in ("zb-h1", "zb-v"):
        return None
    return (
        f"pipeline.defer_head_gradient=False with pipeline.schedule={pipeline.schedule!r}: this"
        " schedule puts off no weight gradient; leave it out, or choose zb-h1 or zb-v"
    )


def _schedule_ranks(config: ParallelConfig) -> str | None:
    if config.pipeline.schedule in ("zb-h1", "zb-v") and config.pipeline_parallel_size == 1:
        return (
            f"pipeline.schedule={config.pipeline.schedule!r} with pipeline_parallel_size=1: there"
            " is no bubble to fill; set pipeline_parallel_size to 2 or more, or schedule='1f1b'"
        )
    return None


def _launcher(config: ParallelConfig) -> str | None:
    known = ("auto", "script", "fork")
    if config.runtime.launcher not in known:
        return f"runtime.launcher={config.runtime.launcher!r}: choose one of {known}"
    return None


def _axis_order(config: ParallelConfig) -> str | None:
    order = tuple(config.runtime.axis_order)
    if sorted(order) != ["cp", "dp", "pp", "tp"]:
        return (
            f"runtime.axis_order={order}: it must name each of pp, dp, cp and tp once, e.g."
            " ('pp', 'dp', 'cp', 'tp')"
        )
    return None


def _timeout(config: ParallelConfig) -> str | None:
    if config.runtime.timeout_seconds <= 0:
        return (
            f"runtime.timeout_seconds={config.runtime.timeout_seconds}: it must be above 0 seconds"
        )
    return None


def _bucket(config: ParallelConfig) -> str | None:
    return _positive("data_parallel.bucket_size", config.data_parallel.bucket_size)


def _positive(field: str, value: object) -> str | None:
    if isinstance(value, int) and not isinstance(value, bool) and value >= 1:
        return None
    return f"{field}={value!r}: it must be a whole number of at least 1"


RULES: tuple[Rule, ...] = (
    _tensor_size,
    _pipeline_size,
    _context_size,
    _expert_size,
    _expert_tensor_size,
    _virtual_size,
    _micro_batch_size,
    _sequence_parallel,
    _overlap_tensor,
    _schedule,
    _schedule_chunks,
    _head_gradient,
    _message_ctas,
    _schedule_ranks,
    _launcher,
    _axis_order,
    _timeout,
    _bucket,
)


def check_layout(config: ParallelConfig) -> list[str]:
    """Every violation that the layout has in itself."""
    if wrong := type_problems(config):
        return wrong  # the other rules would stumble over them
    problems = [problem for rule in RULES if (problem := rule(config)) is not None]
    problems += config.context.check(config.context_parallel_size)
    problems += expert_problems(config)
    problems += config.loss_scale.check()
    problems += config.quantization.check() if config.quantization is not None else []
    problems += data_parallel_problems(config)
    problems += graph_problems(config)
    return problems + config.recompute.check() + config.checkpoint.check()


def check_world(config: ParallelConfig, world_size: int) -> list[str]:
    """Every violation of the layout against the number of ranks (devices x nodes)."""
    product = config.model_parallel_size
    if product < 1 or world_size % product == 0:
        found = expert_world_problems(config, world_size)
        return found + (replica_problems(config, world_size) if product >= 1 else [])
    nearest = sorted(
        {max(product, world_size // product * product), (world_size // product + 1) * product}
    )
    return [
        f"devices x num_nodes = {counted(world_size, 'rank')}: "
        f"tensor_parallel_size={config.tensor_parallel_size} x"
        f" pipeline_parallel_size={config.pipeline_parallel_size} x"
        f" context_parallel_size={config.context_parallel_size} = {product} does not divide it;"
        f" use {' or '.join(map(str, nearest))} ranks, or other sizes"
    ]


def check_batch_sizes(
    config: ParallelConfig, world_size: int, micro_batch_size: int, global_batch_size: int
) -> list[str]:
    """Violations of global_batch_size = micro_batch_size x data_parallel_size x a whole number of
    micro-batches.
    """
    if world_size % config.model_parallel_size:
        return []
    data_parallel_size = world_size // config.model_parallel_size
    step = micro_batch_size * data_parallel_size
    if global_batch_size % step == 0:
        return []
    fits = sorted(
        {max(step, global_batch_size // step * step), (global_batch_size // step + 1) * step}
    )
    return [
        f"global_batch_size={global_batch_size}: not a multiple of "
        f"micro_batch_size={micro_batch_size} x"
        f" data_parallel_size={data_parallel_size} = {step}; use {' or '.join(map(str, fits))}"
    ]
