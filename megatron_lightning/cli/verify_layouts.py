"""Candidate layouts of `verify`: from a string, or one dimension at a time from a target layout."""

from __future__ import annotations

import dataclasses
import math
import re
from dataclasses import dataclass
from typing import Any, cast, get_args

from megatron_lightning.cli.errors import UserError
from megatron_lightning.config.context import ContextConfig, ContextForm
from megatron_lightning.config.expert import ExpertConfig
from megatron_lightning.config.parallel import (
    DataParallelConfig,
    ParallelConfig,
    PipelineConfig,
    ScheduleName,
)
from megatron_lightning.config.recompute import RecomputeConfig

SIZES = {
    "tp": "tensor_parallel_size",
    "pp": "pipeline_parallel_size",
    "cp": "context_parallel_size",
    "ep": "expert_parallel_size",
    "etp": "expert_tensor_parallel_size",
    "mb": "micro_batch_size",
}
WORDS = (
    "sp, zero1, fsdp, recompute, a schedule (zb-h1), a form of context parallelism (ring), or"
    " gather-tokens"
)


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """One layout and the number of ranks it is run on."""

    name: str
    parallel: ParallelConfig
    world_size: int

    @property
    def data_parallel_size(self) -> int:
        """What is left of the ranks."""
        return self.world_size // self.parallel.model_parallel_size


def parse_layout(text: str, base: ParallelConfig) -> Candidate:
    """A candidate from a string such as "tp2+sp+pp2+vp2+dp2".

    Sizes: tp, pp, cp, dp, vp (virtual stages), ep, etp (as tp unless given), mb (micro-batch);
    words: sp, zero1, fsdp, recompute (whole layers), a schedule's or a context form's name,
    gather-tokens (the dispatcher of experts). What is not named is off, dp is what ep needs;
    everything else (buckets, seed) is `base`'s. UserError says what is wrong with a part.
    """
    sizes: dict[str, int] = {}
    words: list[str] = []
    for part in text.lower().split("+"):
        found = re.fullmatch(r"(tp|pp|cp|dp|vp|mb|ep|etp)(\d+)", part.strip())
        if found is None:
            words.append(part.strip())
        elif found[1] in sizes:
            raise UserError(f"layout {text!r}: {found[1]} is given twice")
        else:
            sizes[found[1]] = int(found[2])
        if found is not None and int(found[2]) < 1:
            raise UserError(f"layout {text!r}: {part.strip()}: sizes are at least 1")
    changes: dict[str, Any] = {field: sizes.get(key, 1) for key, field in SIZES.items()}
    changes["micro_batch_size"] = sizes.get("mb", base.micro_batch_size)
    changes["sequence_parallel"] = False
    changes["expert_tensor_parallel_size"] = sizes.get("etp")
    expert = ExpertConfig()
    pipeline = PipelineConfig(virtual_pipeline_size=sizes.get("vp", 1))
    context, sharding, recompute = ContextConfig(), "none", RecomputeConfig()
    for word in words:
        if word == "sp":
            changes["sequence_parallel"] = True
        elif word == "gather-tokens":
            expert = ExpertConfig(dispatcher="all_gather")
        elif word in ("zero1", "fsdp"):
            sharding = "optimizer" if word == "zero1" else "fsdp"
        elif word == "recompute":
            recompute = RecomputeConfig(mode="full")
        elif word in get_args(ScheduleName):
            pipeline = dataclasses.replace(pipeline, schedule=word)
        elif word in get_args(ContextForm):
            context = ContextConfig(form=cast(ContextForm, word))
        else:
            raise UserError(
                f"layout {text!r}: {word!r} is unknown; join sizes (tp2, pp2, cp2, dp2, vp2, ep2,"
                f" etp1, mb1)"
                f" and words ({WORDS}) by '+'"
            )
    parallel = dataclasses.replace(
        base,
        **changes,
        pipeline=pipeline,
        context=context,
        expert=expert,
        recompute=recompute,
        data_parallel=dataclasses.replace(base.data_parallel, sharding=sharding, replicas=1),
    )
    dense, experts = parallel.model_parallel_size, parallel.expert_model_size
    least = math.lcm(dense, experts) // dense if parallel.folds_experts else 1
    world_size = dense * sizes.get("dp", least)
    return Candidate(name=text, parallel=parallel, world_size=world_size)


def one_dimension_at_a_time(target: ParallelConfig, world_size: int) -> list[Candidate]:
    """Every dimension of the target alone, then all together."""
    alone = alone_config(target)
    data = world_size // target.model_parallel_size
    replicas = data * target.context_parallel_size
    found: list[Candidate] = []

    def add(name: str, size: int, **changes: Any) -> None:
        parallel = dataclasses.replace(alone, **changes)
        found.append(Candidate(name=name, parallel=parallel, world_size=size))

    if target.tensor_parallel_size > 1:
        size = target.tensor_parallel_size
        add(f"tp{size}", size, tensor_parallel_size=size)
        if target.sequence_parallel:
            add(f"tp{size}+sp", size, tensor_parallel_size=size, sequence_parallel=True)
    if target.pipeline_parallel_size > 1 or target.pipeline.virtual_pipeline_size > 1:
        size = target.pipeline_parallel_size
        virtual = target.pipeline.virtual_pipeline_size
        name = f"pp{size}" + (f"+vp{virtual}" if virtual > 1 else "")
        name += f"+{target.pipeline.schedule}" if target.pipeline.schedule != "1f1b" else ""
        add(name, size, pipeline_parallel_size=size, pipeline=target.pipeline)
    if target.context_parallel_size > 1:
        size = target.context_parallel_size
        name = f"cp{size}+{target.context.form}"
        add(name, size, context_parallel_size=size, context=target.context)
    if target.folds_experts:
        size, columns = target.expert_parallel_size, target.expert_tensor_size
        name = f"ep{size}" + (f"+etp{columns}" if columns > 1 else "")
        changes = dict(expert_parallel_size=size, expert_tensor_parallel_size=columns)
        add(name, size * columns, **changes, expert=target.expert)
    if data > 1:
        add(f"dp{data}", data)
    if target.data_parallel.sharding != "none" and replicas > 1:
        word = "zero1" if target.data_parallel.sharding == "optimizer" else "fsdp"
        add(f"dp{replicas}+{word}", replicas, data_parallel=target.data_parallel)
    if target.recompute != RecomputeConfig():
        add("recompute", 1, recompute=target.recompute)
    if len(found) != 1 or found[0].parallel != target:
        found.append(Candidate(name="all together", parallel=target, world_size=world_size))
    return found


def alone_config(target: ParallelConfig) -> ParallelConfig:
    """The target's settings with every dimension switched off."""
    return dataclasses.replace(
        target,
        tensor_parallel_size=1,
        pipeline_parallel_size=1,
        context_parallel_size=1,
        expert_parallel_size=1,
        expert_tensor_parallel_size=None,
        expert=ExpertConfig(),
        sequence_parallel=False,
        pipeline=PipelineConfig(),
        context=ContextConfig(),
        recompute=RecomputeConfig(),
        data_parallel=DataParallelConfig(
            bucket_size=target.data_parallel.bucket_size,
            overlap_grad_reduce=target.data_parallel.overlap_grad_reduce,
        ),
    )
