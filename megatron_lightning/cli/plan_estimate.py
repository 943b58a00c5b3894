"""From a request to numbers: mesh, stages, memory, operations, traffic, bubble."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import nn

from megatron_lightning.cli.plan_memory import (
    PipelineRank,
    UnitParameters,
    pipeline_rank,
    unit_parameters,
)
from megatron_lightning.cli.plan_outside import outside_bytes
from megatron_lightning.cli.plan_request import PlanRequest
from megatron_lightning.config.model import GPTConfig
from megatron_lightning.config.parallel import ParallelConfig, PipelineConfig
from megatron_lightning.models.gpt import GPTModel
from megatron_lightning.parallel.pipeline import StageLayout
from megatron_lightning.parallel.ranks import mesh_sizes
from megatron_lightning.parallel.schedules.actions import Action
from megatron_lightning.parallel.schedules.build import ScheduleName, build_schedule
from megatron_lightning.parallel.schedules.simulate import CostModel, SimulationReport, simulate
from megatron_lightning.runtime.parallelize import stage_layout


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Everything that `plan` says about one layout."""

    request: PlanRequest
    sizes: Mapping[str, int]
    layout: StageLayout
    parameters: UnitParameters
    ranks: tuple[PipelineRank, ...]
    model_flops: float
    """Operations of one step (one batch) over all GPUs, as utilisation figures count them."""
    hardware_flops: float
    """The same with what is computed again."""
    simulation: SimulationReport | None
    """None where there is no pipeline."""

    @property
    def peak_bytes(self) -> int:
        """Of the fullest rank."""
        return max(rank.memory.peak for rank in self.ranks)

    @property
    def fits(self) -> bool:
        """Whether every rank fits in the GPU, with what is outside of torch's allocator."""
        return self.peak_bytes + outside_bytes(self.request) <= self.request.hardware.memory_bytes

    @property
    def bubble(self) -> float:
        """Share of the ranks' time that is not compute, unequal stages included."""
        return 0.0 if self.simulation is None else self.simulation.bubble_fraction

    @property
    def layers_per_stage(self) -> list[int]:
        """Layers of each virtual stage, in the order of the forward."""
        return [len(stage.layers) for stage in self.layout.stages]


def make_plan(request: PlanRequest, *, simulated: bool = True) -> Plan:
    """Estimate a request that `problems_of` has nothing against; without `simulated` the bubble is
    left out.
    """
    layout = layout_of(request)
    units = unit_parameters(
        request.model,
        request.parallel.tensor_parallel_size,
        request.parallel.expert_parallel_size,
        request.parallel.expert_tensor_size,
    )
    schedule = actions_of(request, layout)
    ranks = tuple(
        pipeline_rank(request, layout, units, rank, actions)
        for rank, actions in enumerate(schedule)
    )
    tokens = request.batch_size * request.seq_length
    model_flops = tokens * request.model.flops_per_token(request.seq_length)
    return Plan(
        request=request,
        sizes=mesh_sizes(
            request.gpus,
            tensor=request.parallel.tensor_parallel_size,
            pipeline=request.parallel.pipeline_parallel_size,
            context=request.parallel.context_parallel_size,
            expert=request.parallel.expert_parallel_size,
            expert_tensor=request.parallel.expert_tensor_size,
        ),
        layout=layout,
        parameters=units,
        ranks=ranks,
        model_flops=model_flops,
        hardware_flops=model_flops * (1 + recomputed_share(request, layout) / 3),
        simulation=_simulate(request, layout, schedule) if simulated else None,
    )


_schedule = functools.lru_cache(maxsize=64)(build_schedule)


def layout_of(request: PlanRequest) -> StageLayout:
    """The stages; ValueError where the layers can't be dealt out."""
    pipeline, given = request.parallel.pipeline, request.parallel.pipeline.layout
    if given is not None and not isinstance(given, str):
        pipeline = dataclasses.replace(pipeline, layout=tuple(map(tuple, given)))
    model, size = request.model, request.parallel.pipeline_parallel_size
    return _cut(model.num_layers, model.tie_word_embeddings, size, pipeline)


@functools.lru_cache(maxsize=256)
def _cut(num_layers: int, tied: bool, size: int, pipeline: PipelineConfig) -> StageLayout:
    module, network = _narrow(num_layers, tied)
    config = ParallelConfig(pipeline_parallel_size=size, pipeline=pipeline)
    return stage_layout(network, module.parallel_plan(), config)


@functools.lru_cache(maxsize=8)
def _narrow(num_layers: int, tied: bool) -> tuple[GPTModel, nn.Module]:
    """A model of so many layers, as small as can be: their names are all that a cut needs."""
    module = GPTModel(
        GPTConfig(
            vocab_size=8,
            num_layers=num_layers,
            hidden_size=8,
            num_attention_heads=1,
            tie_word_embeddings=tied,
        )
    )
    return module, module.build_network("meta")


def actions_of(request: PlanRequest, layout: StageLayout) -> Sequence[Sequence[Action]]:
    """The schedule of a batch, for each pipeline rank."""
    config = request.parallel.pipeline
    name: ScheduleName = config.schedule
    if name == "1f1b" and layout.virtual_size > 1:
        name = "interleaved"
    if request.parallel.expert.overlap_all_to_all:
        name = "paired"
    return _schedule(
        name,
        pipeline_size=layout.pipeline_size,
        num_chunks=layout.virtual_size,
        num_microbatches=request.num_microbatches,
    )


def recomputed_share(request: PlanRequest, layout: StageLayout) -> float:
    """Share of the forward's operations that is done again (whole layers; modules are left out)."""
    config = request.parallel.recompute
    if config.mode != "full":
        return 0.0
    if config.method == "uniform":
        return 1.0
    done = sum(min(config.num_layers, len(stage.layers)) for stage in layout.stages)
    return done / layout.num_layers


def _simulate(
    request: PlanRequest, layout: StageLayout, schedule: Sequence[Sequence[Action]]
) -> SimulationReport | None:
    if layout.pipeline_size == 1:
        return None
    weights = stage_weights(request.model, request.seq_length, layout)
    return _run(request, layout, schedule, weights)


def _run(
    request: PlanRequest,
    layout: StageLayout,
    schedule: Sequence[Sequence[Action]],
    weights: tuple[float, ...] | None,
) -> SimulationReport:
    again = recomputed_share(request, layout)
    cost = CostModel(backward=2.0 + again, input_grad=1.0 + again, stage_weight=weights)
    return simulate(
        schedule,
        cost,
        num_chunks=layout.virtual_size,
        num_microbatches=request.num_microbatches,
        v_shaped=layout.v_shaped,
    )


def stage_weights(model: GPTConfig, seq_length: int, layout: StageLayout) -> tuple[float, ...]:
    """Operations of each virtual stage in units of one layer."""
    depths = model.prediction_depths
    head = 6 * model.vocab_size * model.hidden_size
    joining = 12 * model.hidden_size**2
    layers = model.flops_per_token(seq_length) - (1 + depths) * head - depths * joining
    layer = layers / (model.num_layers + depths)
    last = (1 + depths) * head / layer + depths * (1 + joining / layer)
    return tuple(len(stage.layers) + stage.has_head * last for stage in layout.stages)


def ideal_bubble(plan: Plan) -> float:
    """Bubble of the same schedule if all stages cost the same."""
    if plan.simulation is None:
        return 0.0
    schedule = actions_of(plan.request, plan.layout)
    return _run(plan.request, plan.layout, schedule, None).bubble_fraction
