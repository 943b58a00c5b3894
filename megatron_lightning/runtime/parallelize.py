"""From a LightningModule built for one process to this rank's part of it. The one place where
parallelism is seen.

build on meta (the module's configure_model) -> cut stages (pipeline) -> split weights by the plan
(tensor, sequence) -> swap attention cores (context) and token dispatchers (expert)
-> dropout streams -> materialise or cut the user's values -> recompute -> gradient buckets (data)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from megatron_lightning.config.parallel import ParallelConfig
from megatron_lightning.config.plan import ParallelPlan, ParameterInfo, replicated
from megatron_lightning.config.validate import raise_if_any
from megatron_lightning.layers.dropout import apply_random
from megatron_lightning.layers.given import expect_values
from megatron_lightning.layers.moe.remote import apply_expert_parallel
from megatron_lightning.parallel.actions import Placement
from megatron_lightning.parallel.context import apply_context_parallel
from megatron_lightning.parallel.fsdp import (
    ShardOptions,
    expert_units,
    shard_children,
    shard_network,
)
from megatron_lightning.parallel.kept_buffers import puts_off_in_regions
from megatron_lightning.parallel.materialise import initial_values, materialise
from megatron_lightning.parallel.mesh import ParallelMesh
from megatron_lightning.parallel.overlap import Overlap
from megatron_lightning.parallel.overlap_choice import choose_overlap
from megatron_lightning.parallel.pipeline import StageLayout, build_layout
from megatron_lightning.parallel.quantization import apply_quantization, chosen_linears
from megatron_lightning.parallel.recompute import compile_inside
from megatron_lightning.parallel.schedules import SPLIT_SCHEDULES, placement_of
from megatron_lightning.parallel.streams import Streams
from megatron_lightning.parallel.tensor import ExpertAxes, apply_tensor_parallel
from megatron_lightning.parallel.weight_gradient import WeightGradients, apply_weight_sinks
from megatron_lightning.runtime.expert_balance import ExpertBalance
from megatron_lightning.runtime.graph_choice import graph_layers
from megatron_lightning.runtime.layer_graphs import LayerGraphs
from megatron_lightning.runtime.model import ParallelModel
from megatron_lightning.runtime.recompute import apply_recompute
from megatron_lightning.runtime.sharded import enter_sharded, layers_of, shard_options
from megatron_lightning.runtime.stages import (
    PipelinedNetwork,
    cut_network,
    cut_problems,
    layer_names,
)


@dataclass(frozen=True, kw_only=True)
class Target:
    """Which part of a LightningModule is cut, and by which plan."""

    plan: ParallelPlan
    attribute: str
    """Attribute of the LightningModule that holds the network, e.g. `network`."""


def parallelize(
    module: LightningModule,
    target: Target | None,
    mesh: ParallelMesh,
    config: ParallelConfig,
    *,
    seed: int,
    params_dtype: torch.dtype | None,
    main_params_dtype: torch.dtype | None = None,
) -> ParallelModel:
    """Cut `module` in place for this rank and give every parameter its values.

    Without a `target` the whole module is replicated over the data axis. `params_dtype` None keeps
    the parameters' own. Fully sharded parameters are kept in `main_params_dtype`.
    """
    shards = shard_options(mesh, config, params_dtype, main_params_dtype)
    if target is None:
        return _replicate(module, mesh, seed=seed, shards=shards)
    network = module.get_submodule(target.attribute)
    raise_if_any(outside_problems(module, network, target))
    if not _on_meta(network):
        network.to(mesh.device)
        share_first_rank_values(network, mesh)
    low_precision = (
        frozenset(chosen_linears(network, target.plan, config.quantization))
        if config.quantization is not None
        else frozenset()
    )
    pipelined = _cut_stages(module, network, target, mesh, config)
    chunks = [network] if pipelined is None else list(pipelined.chunks)
    tied = {
        f"{target.attribute}.{user}": f"{target.attribute}.{owner}"
        for owner, user in target.plan.tied
    }
    table: dict[str, ParameterInfo] = {}
    streams: Streams | None = None
    roots: list[tuple[FSDPModule, ...]] = []
    graphs: LayerGraphs | None = None
    drawn: dict[nn.Parameter, Callable[[], Tensor]] = {}
    keeps = puts_off_in_regions(target.plan, mesh.tp, config)
    for chunk in chunks:
        rows, streams = _apply_layout(chunk, target, mesh, config, seed=seed, streams=streams)
        fill = partial(
            _fill,
            rows=rows,
            seed=seed,
            device=mesh.device,
            dtype=params_dtype,
            drawn_dtype=None if shards is None else main_params_dtype,
            target=target,
        )
        if shards is None:
            fill(chunk, "")
        else:
            names = [n.removeprefix(f"{target.attribute}.") for n, r in rows.items() if r.expert]
            layers, units = layers_of(chunk, target.plan), expert_units(chunk, names)
            roots.append((shard_network(chunk, layers, shards, fill, units),))
        drawn |= initial_values(chunk, rows, seed=seed, prefix=f"{target.attribute}.")
        table |= {
            row.name: row for row in rows.values() if not (row.tied_copy and row.name in table)
        }
        apply_recompute(
            chunk,
            target.plan,
            config.recompute,
            streams=streams,
            device=mesh.device,
            quantized=low_precision,
        )
        graphs = _graph_and_compile(chunk, target.plan, mesh, config, streams, keeps=keeps)
    _share_tied_within_rank(chunks, target.plan)
    schedule = config.pipeline.schedule
    placement = placement_of(schedule, mesh.pp.size, len(chunks))
    model = _finish(module, target.plan, pipelined, table, tied, streams, mesh, placement)
    model.networks = tuple(chunks)
    model.initial_values = drawn
    model.graphs = graphs
    if graphs is not None and model.expert_balance is not None:
        model.expert_balance.hold_weight()
    model.has_remote_experts = target.plan.has_experts and config.folds_experts
    if config.quantization is not None:
        model.quantization = apply_quantization(
            chunks,
            low_precision,
            target.plan,
            config.quantization,
            mesh,
            table=table,
            streams=streams,
            sequence_parallel=config.sequence_parallel,
            keeps_weights=shards is None,
            seed=seed,
            prefix=f"{target.attribute}.",
            whole=config.data_parallel.sharding == "none",
        )
    if shards is not None:
        enter_sharded(model, roots)
        if params_dtype is not None and params_dtype is not main_params_dtype:
            model.compute_dtypes = dict.fromkeys(model.parameters, params_dtype)
    if schedule in SPLIT_SCHEDULES:
        model.weight_gradients = WeightGradients()
        names = {id(parameter): name for name, parameter in model.parameters.items()}
        at_once = () if config.pipeline.defer_head_gradient else target.plan.last
        for chunk in chunks:
            compiled = target.plan.layers if keeps else None
            apply_weight_sinks(chunk, model.weight_gradients, names, at_once, compiled=compiled)
    return model


def _apply_layout(
    chunk: nn.Module,
    target: Target,
    mesh: ParallelMesh,
    config: ParallelConfig,
    *,
    seed: int,
    streams: Streams | None,
) -> tuple[Mapping[str, ParameterInfo], Streams]:
    """Split the weights of a chunk that has none yet, and swap what communicates. Returns its rows
    of the table and the streams that all chunks share.
    """
    prefix = f"{target.attribute}."
    sequence_parallel = config.sequence_parallel
    rows = apply_tensor_parallel(
        chunk,
        target.plan,
        mesh.tp,
        sequence_parallel=sequence_parallel,
        prefix=prefix,
        experts=ExpertAxes.of(mesh),
        overlap=_overlap(mesh, config),
    )
    apply_context_parallel(
        chunk, mesh, config.context, timeout_seconds=config.runtime.timeout_seconds
    )
    apply_expert_parallel(chunk, mesh, config.expert, sequence_parallel=sequence_parallel)
    streams = apply_random(
        chunk,
        mesh,
        seed=seed,
        exact=config.runtime.exact_dropout,
        sequence_parallel=sequence_parallel,
        streams=streams,
    )
    expect_values(chunk, rows, prefix)
    return rows, streams


def _overlap(mesh: ParallelMesh, config: ParallelConfig) -> Overlap | None:
    """How products hide the collectives of a split sequence; None: not at all."""
    if not config.sequence_parallel:
        return None
    runtime = config.runtime
    return choose_overlap(
        mesh.tp,
        mesh.device,
        wanted=False if runtime.cuda_graphs != "none" else runtime.overlap_tensor_parallel,
        timeout_seconds=config.runtime.timeout_seconds,
    )


def _fill(
    module: nn.Module,
    path: str,
    *,
    rows: Mapping[str, ParameterInfo],
    seed: int,
    device: torch.device,
    dtype: torch.dtype | None,
    drawn_dtype: torch.dtype | None,
    target: Target,
) -> None:
    """Give the module at `path` of the network its values."""
    prefix = f"{target.attribute}.{path}." if path else f"{target.attribute}."
    materialise(
        module,
        rows,
        seed=seed,
        device=device,
        dtype=dtype,
        drawn_dtype=drawn_dtype,
        prefix=prefix,
    )


def _graph_and_compile(
    chunk: nn.Module,
    plan: ParallelPlan,
    mesh: ParallelMesh,
    config: ParallelConfig,
    streams: Streams | None,
    *,
    keeps: bool,
) -> LayerGraphs | None:
    """Graphs of a chunk's layers where they are asked for (there is one chunk then, by a rule), and
    compiled layers.
    """
    graphs = None
    if config.runtime.cuda_graphs == "layers":
        graphs = graph_layers(chunk, plan, streams, mesh.device)
    if config.runtime.compile_layers:
        _compile_layers(chunk, plan, keeps_buffers=keeps)
        for inner in graphs.inner_modules if graphs is not None else ():
            compile_inside(inner)
    return graphs


def _compile_layers(chunk: nn.Module, plan: ParallelPlan, *, keeps_buffers: bool) -> None:
    """Compile each layer in place; names and hooks stay, and equal layers share their code."""
    if plan.layers is None:
        raise ValueError(
            "runtime.compile_layers=True with plan.layers=None: name the container of the layers in"
            " the plan, or compile the network yourself"
        )
    for _, layer in layers_of(chunk, plan):
        compile_inside(layer, keeps_buffers=keeps_buffers)


def _share_tied_within_rank(chunks: Sequence[nn.Module], plan: ParallelPlan) -> None:
    """Where first and last chunk are on one rank (virtual stages without a pipeline or in a V), tie
    them as in one process.
    """
    for owner, user in plan.tied:
        owners = [chunk for chunk in chunks if _parameter(chunk, owner) is not None]
        users = [chunk for chunk in chunks if _parameter(chunk, user) is not None]
        if owners and users and owners[0] is not users[0]:
            module_path, _, name = user.rpartition(".")
            setattr(users[0].get_submodule(module_path), name, _parameter(owners[0], owner))


def _parameter(chunk: nn.Module, name: str) -> nn.Parameter | None:
    return dict(chunk.named_parameters(remove_duplicate=False)).get(name)


def _replicate(
    module: LightningModule, mesh: ParallelMesh, *, seed: int, shards: ShardOptions | None
) -> ParallelModel:
    table = {name: whole(name, parameter) for name, parameter in module.named_parameters()}
    if _on_meta(module):
        materialise(module, table, seed=seed, device=mesh.device, dtype=None, prefix="")
    module.to(mesh.device)
    share_first_rank_values(module, mesh)
    roots = [] if shards is None else [tuple(shard_children(module, shards))]
    model = _finish(module, None, None, table, {}, None, mesh, Placement(mesh.pp.size, 1))
    if shards is not None:
        enter_sharded(model, roots)
    return model


def _finish(
    module: LightningModule,
    plan: ParallelPlan | None,
    pipelined: PipelinedNetwork | None,
    table: Mapping[str, ParameterInfo],
    tied: Mapping[str, str],
    streams: Streams | None,
    mesh: ParallelMesh,
    placement: Placement,
) -> ParallelModel:
    parameters: dict[str, nn.Parameter] = {}
    chunk_of: dict[str, int] = {}
    chunks = [] if pipelined is None else pipelined.chunks
    held_by: dict[int, int] = {}  # the first chunk: a tied parameter is complete when that one is
    for number, chunk in enumerate(chunks):
        for parameter in chunk.parameters():
            held_by.setdefault(id(parameter), number)
    for name, parameter in module.named_parameters():
        canonical = tied.get(name, name)
        parameters.setdefault(canonical, parameter)
        chunk_of.setdefault(canonical, held_by.get(id(parameter), 0))
    sequence_parallel = streams is not None and streams.sequence_parallel
    balance = ExpertBalance(module, mesh, sequence_parallel=sequence_parallel)
    edges_apart = placement.last_rank != placement.owner(0)[0]
    model = ParallelModel(
        plan=plan,
        pipelined=pipelined,
        placement=placement,
        holds_last=placement.last_rank == mesh.pp.rank,
        table=table,
        parameters=parameters,
        chunk_of=chunk_of,
        streams=streams,
        tied=tuple(sorted(set(tied.values()))) if edges_apart else (),
        tied_within_rank=bool(tied) and not edges_apart,
    )
    model.expert_balance = balance if balance.has_routers else None
    return model


def whole(name: str, parameter: nn.Parameter) -> ParameterInfo:
    """Table row of a parameter that this rank holds as a whole."""
    shape = tuple(parameter.shape)
    return ParameterInfo(
        name=name, global_shape=shape, offsets=(0,) * len(shape), sizes=shape, split=replicated()
    )


def stage_layout(network: nn.Module, plan: ParallelPlan, config: ParallelConfig) -> StageLayout:
    """Which layers each pipeline rank and chunk holds; ValueError where they can't be dealt out."""
    has_ends = plan.layers is not None  # an nn.Sequential has neither embedding nor head
    names = layer_names(network, plan)
    further = len(layers_of(network, plan)) - len(names)  # each runs the head once more
    layout = build_layout(
        len(names),
        config.pipeline_parallel_size,
        config.pipeline.virtual_pipeline_size,
        config.pipeline.layout,
        embedding_cost=config.pipeline.embedding_cost if has_ends else 0.0,
        head_cost=config.pipeline.head_cost * (1 + further) + further if has_ends else 0.0,
        v_shaped=config.pipeline.schedule == "zb-v",
    )
    problems = cut_problems(network, plan, layout)
    if problems:
        raise ValueError(" ".join(problems))
    return layout


def _cut_stages(
    module: LightningModule,
    network: nn.Module,
    target: Target,
    mesh: ParallelMesh,
    config: ParallelConfig,
) -> PipelinedNetwork | None:
    if mesh.pp.size == 1 and config.pipeline.virtual_pipeline_size == 1:
        return None
    layout = stage_layout(network, target.plan, config)
    pipelined = cut_network(network, target.plan, layout.chunks(mesh.pp.rank))
    parent, _, name = target.attribute.rpartition(".")
    setattr(module.get_submodule(parent) if parent else module, name, pipelined)
    return pipelined


def share_first_rank_values(module: nn.Module, mesh: ParallelMesh) -> None:
    """Give every rank the parameters and buffers of rank 0, as DDP does with a module that holds
    values.
    """
    if mesh.world_size == 1:
        return
    for tensor in (*module.parameters(), *module.buffers()):
        values = tensor.detach().contiguous()  # channels-last weights are not
        dist.broadcast(values, src=0)
        if values.data_ptr() != tensor.data_ptr():
            tensor.data.copy_(values)


def outside_problems(module: LightningModule, network: nn.Module, target: Target) -> list[str]:
    """Explain which parameters of the module the plan can't know."""
    prefix = f"{target.attribute}."
    inside = {id(p) for p in network.parameters()}
    outside = [
        name
        for name, p in module.named_parameters()
        if id(p) not in inside and not name.startswith(prefix)
    ]
    if not outside:
        return []
    return [
        f"{type(module).__name__}: parameters outside of {target.attribute!r}: {outside[:3]}; with"
        " a plan all parameters must be in the network that it describes, so move them into it and"
        " give them rows in the plan"
    ]


def _on_meta(module: nn.Module) -> bool:
    kinds = {parameter.is_meta for parameter in module.parameters()}
    if len(kinds) > 1:
        names = [name for name, parameter in module.named_parameters() if parameter.is_meta]
        raise ValueError(
            f"{type(module).__name__}: only some parameters are on the meta device: {names[:3]}; "
            f"put all there"
        )
    return kinds == {True}
