"""`plan --suggest`: every layout of a model on a number of GPUs, ranked, and why others do not fit.

A layout's step time is estimated from operations, bubble and traffic, with the constants below.
They serve to rank; they are no prediction. Of each combination of sizes the fastest variant that
fits is shown (micro-batch size, virtual stages, recompute).
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator
from dataclasses import dataclass

from megatron_lightning.cli.plan_estimate import Plan, layout_of, make_plan, stage_weights
from megatron_lightning.cli.plan_outside import outside_bytes
from megatron_lightning.cli.plan_request import PlanRequest
from megatron_lightning.cli.plan_text import in_unit, sized, table, unit_of
from megatron_lightning.config.parallel import DataParallelConfig, ParallelConfig
from megatron_lightning.config.recompute import RecomputeConfig
from megatron_lightning.config.validate import check_batch_sizes, check_layout, check_world
from megatron_lightning.models.gpt import GPTModel
from megatron_lightning.parallel.ranks import EXPERT_ORDER, expert_rank_lists, rank_lists

EFFICIENCY = 0.6
"""Share of the peak that the products reach, all told."""
EXPOSED = {"tensor": 1.0, "context": 0.5, "pipeline": 0.2, "data": 0.2, "expert": 0.8}
"""Share of each dimension's communication that nothing hides."""
MICRO_BATCH_SIZES = (1, 2, 4, 8)
VIRTUAL_SIZES = (1, 2, 4)
RECOMPUTES = (
    RecomputeConfig(),
    RecomputeConfig(mode="selective", modules=("mlp",)),
    RecomputeConfig(mode="full"),
)
TOKENS_PER_CONTEXT_RANK = 4096
"""Context parallelism is tried as long as each rank keeps so many tokens."""

Sizes = tuple[int, int, int]
"""(tensor, pipeline, context)."""


@dataclass(frozen=True, kw_only=True)
class Suggestion:
    """A layout that fits."""

    plan: Plan
    step_seconds: float
    """Estimated; see the constants of this module."""

    @property
    def utilisation(self) -> float:
        """Model operations over the peak of all GPUs, with the estimated time."""
        request = self.plan.request
        return self.plan.model_flops / (
            self.step_seconds * request.gpus * request.hardware.tflops * 1e12
        )


@dataclass(frozen=True, kw_only=True)
class Suggestions:
    """The answer to `--suggest`."""

    fitting: tuple[Suggestion, ...]
    """One for each combination of sizes, fastest first."""
    refused: tuple[tuple[Sizes, str], ...]
    """Combinations of which no variant works, and why."""


def suggest(request: PlanRequest, most: int = 10) -> Suggestions:
    """Try the layouts for the request's model, batch and GPUs; the request's own layout is not
    looked at. At most `most` suggestions, whose bubble is simulated.
    """
    fitting: list[Suggestion] = []
    refused: list[tuple[Sizes, str]] = []
    for sizes in _all_sizes(request):
        found, reason = _best(request, sizes)
        if found is None:
            refused.append((sizes, reason))
        else:
            fitting.append(found)
    fitting.sort(key=lambda suggestion: suggestion.step_seconds)
    exact = [_estimate(s.plan.request, simulated=True) for s in fitting[:most]]
    exact.sort(key=lambda suggestion: suggestion.step_seconds)
    return Suggestions(fitting=tuple(exact), refused=tuple(refused))


def _all_sizes(request: PlanRequest) -> Iterator[Sizes]:
    powers = [1 << i for i in range(request.gpus.bit_length())]
    contexts = [n for n in powers if request.seq_length // n >= TOKENS_PER_CONTEXT_RANK] or [1]
    pipelines = [n for n in range(1, request.gpus + 1) if request.gpus % n == 0]
    tensors = [n for n in powers if n <= 2 * request.gpus_per_node]
    for sizes in itertools.product(tensors, pipelines, contexts):
        if request.gpus % (sizes[0] * sizes[1] * sizes[2]) == 0:
            yield sizes


def _best(request: PlanRequest, sizes: Sizes) -> tuple[Suggestion | None, str]:
    """The fastest variant that fits, or the reason why there is none."""
    best: Suggestion | None = None
    smallest: Plan | None = None
    reason = ""
    virtual_sizes = VIRTUAL_SIZES if sizes[1] > 1 else (1,)
    for expert_size, micro_batch_size, virtual_size in itertools.product(
        _expert_sizes(request, sizes), MICRO_BATCH_SIZES, virtual_sizes
    ):
        candidate = _with_sizes(request, sizes, expert_size, micro_batch_size, virtual_size)
        problems = _problems(candidate)
        if problems:
            reason = reason or problems[0]
            continue
        for recompute in RECOMPUTES:
            parallel = dataclasses.replace(candidate.parallel, recompute=recompute)
            variant = dataclasses.replace(candidate, parallel=parallel)
            found = _estimate(variant, simulated=False)
            if smallest is None or found.plan.peak_bytes < smallest.peak_bytes:
                smallest = found.plan
            if found.plan.fits:
                if best is None or found.step_seconds < best.step_seconds:
                    best = found
                break  # less memory is slower from here on
    if best is None and smallest is not None:
        states = smallest.ranks[0].memory
        reason = (
            f"needs {sized(smallest.peak_bytes + outside_bytes(smallest.request))} of"
            f" {sized(request.hardware.memory_bytes)} in its smallest variant (parameters,"
            f" gradients and optimizer:"
            f" {sized(states.parameters + states.gradients + states.optimizer)})"
        )
    return best, reason


def _expert_sizes(request: PlanRequest, sizes: Sizes) -> list[int]:
    """Expert parallel sizes to try: powers of 2 that divide the experts and a stage's ranks."""
    moe, ranks = request.model.moe, request.gpus // sizes[1]
    if moe is None:
        return [1]
    powers = [1 << i for i in range(ranks.bit_length())]
    return [n for n in powers if moe.num_experts % n == 0 and ranks % n == 0]


def _with_sizes(
    request: PlanRequest,
    sizes: Sizes,
    expert_size: int,
    micro_batch_size: int,
    virtual_size: int,
) -> PlanRequest:
    tensor, pipeline, context = sizes
    config = request.parallel
    sharded = request.gpus // (tensor * pipeline) > 1
    parallel = ParallelConfig(
        tensor_parallel_size=tensor,
        pipeline_parallel_size=pipeline,
        context_parallel_size=context,
        expert_parallel_size=expert_size,
        expert_tensor_parallel_size=1 if expert_size > 1 else None,
        sequence_parallel=tensor > 1,
        pipeline=dataclasses.replace(
            config.pipeline, schedule="1f1b", virtual_pipeline_size=virtual_size, layout=None
        ),
        data_parallel=DataParallelConfig(sharding="optimizer" if sharded else "none"),
        runtime=config.runtime,
        quantization=config.quantization,
    )
    return dataclasses.replace(
        request,
        parallel=parallel,
        micro_batch_size=micro_batch_size,
        global_batch_size=request.batch_size,
    )


def _problems(request: PlanRequest) -> list[str]:
    """The checks that cost nothing; a chosen layout is checked in full when it is planned."""
    problems = check_layout(request.parallel) + check_world(request.parallel, request.gpus)
    problems += GPTModel(request.model).check_parallel(request.parallel)
    problems += check_batch_sizes(
        request.parallel, request.gpus, request.micro_batch_size, request.batch_size
    )
    if not problems:
        try:
            layout_of(request)
        except ValueError as error:
            problems.append(str(error))
    return problems


def _estimate(request: PlanRequest, *, simulated: bool) -> Suggestion:
    """Without simulation, a shortened batch stands for the whole one: memory peaks repeat."""
    pipeline, virtual = (
        request.parallel.pipeline_parallel_size,
        request.parallel.pipeline.virtual_pipeline_size,
    )
    if simulated:
        plan = make_plan(request)
        stretch = 1 / (1 - plan.bubble)
        return Suggestion(plan=plan, step_seconds=_seconds(plan, request, 1.0, stretch))
    count = min(request.num_microbatches, 2 * pipeline)
    per_rank = request.micro_batch_size * request.data_parallel_size
    short = dataclasses.replace(request, global_batch_size=count * per_rank)
    plan = make_plan(short, simulated=False)
    scale = request.num_microbatches / count
    weights = stage_weights(request.model, request.seq_length, plan.layout)
    ranks = [
        sum(weights[stage.stage] for stage in plan.layout.chunks(rank)) for rank in range(pipeline)
    ]
    stretch = max(ranks) * pipeline / sum(ranks)
    stretch *= 1 + (pipeline - 1) / (virtual * request.num_microbatches)
    seconds = _seconds(plan, request, scale, stretch)
    return Suggestion(plan=dataclasses.replace(plan, request=request), step_seconds=seconds)


def _seconds(plan: Plan, request: PlanRequest, scale: float, stretch: float) -> float:
    """Time of a step: products, stretched by the bubble, and what communication is not hidden."""
    hardware = request.hardware
    products = scale * plan.hardware_flops / request.gpus / (hardware.tflops * 1e12 * EFFICIENCY)
    seconds = products * stretch
    order = tuple(request.parallel.runtime.axis_order)
    axes = {"tensor": "tp", "context": "cp", "pipeline": "pp", "data": "dp", "expert": "ep"}
    for name, axis in axes.items():
        groups = (
            expert_rank_lists(plan.sizes, order, EXPERT_ORDER, [axis])
            if name == "expert"
            else rank_lists(plan.sizes, order, [axis])
        )
        group = groups[0]
        within = len({rank // request.gpus_per_node for rank in group}) == 1
        speed = hardware.node_gb_per_second if within else hardware.network_gb_per_second
        sent: float = max(getattr(rank.traffic, name) for rank in plan.ranks)
        repeated = scale if name != "data" else 1.0
        seconds += EXPOSED[name] * repeated * sent / (speed * 1e9)
    return seconds


# -------------------------------------------------------------------- report


def suggestions_as_values(suggestions: Suggestions) -> dict[str, object]:
    """For JSON."""
    return {
        "constants": {"efficiency": EFFICIENCY, "exposed_share_of_communication": EXPOSED},
        "fitting": [
            {
                "tensor_parallel_size": s.plan.request.parallel.tensor_parallel_size,
                "pipeline_parallel_size": s.plan.request.parallel.pipeline_parallel_size,
                "context_parallel_size": s.plan.request.parallel.context_parallel_size,
                "expert_parallel_size": s.plan.request.parallel.expert_parallel_size,
                "expert_tensor_parallel_size": s.plan.request.parallel.expert_tensor_size,
                "data_parallel_size": s.plan.request.data_parallel_size,
                "virtual_pipeline_size": s.plan.layout.virtual_size,
                "micro_batch_size": s.plan.request.micro_batch_size,
                "recompute": dataclasses.asdict(s.plan.request.parallel.recompute),
                "sharding": s.plan.request.parallel.data_parallel.sharding,
                "peak_bytes": s.plan.peak_bytes,
                "bubble_fraction": s.plan.bubble,
                "step_seconds": s.step_seconds,
                "utilisation": s.utilisation,
            }
            for s in suggestions.fitting
        ],
        "refused": [
            {"tensor_pipeline_context": list(sizes), "reason": reason}
            for sizes, reason in suggestions.refused
        ],
    }


_TIMES = {"seconds": 1, "milliseconds": 10**3, "microseconds": 10**6}


def suggestions_as_text(suggestions: Suggestions) -> str:
    """Two tables."""
    unit = unit_of(s.plan.peak_bytes for s in suggestions.fitting)
    slowest = max((s.step_seconds for s in suggestions.fitting), default=1)
    time, per_second = next(
        ((name, n) for name, n in _TIMES.items() if slowest * n >= 1), ("microseconds", 10**6)
    )
    rows = []
    for s in suggestions.fitting:
        request = s.plan.request
        recompute = request.parallel.recompute
        modules = f" {','.join(recompute.modules)}" if recompute.mode == "selective" else ""
        sizes = request.parallel
        rows.append(
            (
                sizes.tensor_parallel_size,
                sizes.pipeline_parallel_size,
                sizes.context_parallel_size,
                request.data_parallel_size,
                sizes.expert_parallel_size,
                s.plan.layout.virtual_size,
                request.micro_batch_size,
                recompute.mode + modules,
                in_unit(s.plan.peak_bytes, unit),
                f"{s.plan.bubble:.1%}",
                f"{s.step_seconds * per_second:.2f}",
                f"{s.utilisation:.1%}",
            )
        )
    header = (
        *("tensor", "pipeline", "context", "data", "expert"),
        *("virtual", "micro-batch", "recompute"),
        *(unit, "bubble", time, "utilisation"),
    )
    text = (
        "Suggestions, fastest first (times rank the layouts, they are no predictions;"
        " sequence_parallel with tensor > 1, sharding='optimizer' with data x context > 1,"
        " expert_tensor_parallel_size=1 with expert > 1)\n"
    )
    text += table(header, rows) if rows else "none fits"
    if suggestions.refused:
        text += "\n\nThe others (tensor x pipeline x context)\n" + "\n".join(
            f"  {'x'.join(map(str, sizes))}: {reason}" for sizes, reason in suggestions.refused
        )
    return text
