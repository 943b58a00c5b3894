"""From a LightningModule built for one process to this rank's part of it. The one place where
parallelism is seen.

build on meta (the module's configure_model) -> cut stages (pipeline) -> split weights by the plan
(tensor, sequence) -> swap attention cores (context) and token dispatchers (expert)
-> dropout streams -> materialise or cut the user's values -> recompute -> gradient buckets (data)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule
from torch import nn

from megatron_lightning.config.parallel import ParallelConfig
from megatron_lightning.config.plan import ParallelPlan, ParameterInfo, replicated
from megatron_lightning.config.validate import raise_if_any
from megatron_lightning.parallel.fsdp import (
    ShardOptions,
    shard_children,
)
from megatron_lightning.parallel.kept_buffers import puts_off_in_regions
from megatron_lightning.parallel.materialise import materialise
from megatron_lightning.parallel.mesh import ParallelMesh
from megatron_lightning.parallel.pipeline import StageLayout, build_layout
from megatron_lightning.parallel.quantized.apply import apply_quantization
from megatron_lightning.parallel.quantized.chosen_layers import chosen_linears
from megatron_lightning.parallel.schedules.actions import Placement
from megatron_lightning.parallel.schedules.build import SPLIT_SCHEDULES, placement_of
from megatron_lightning.parallel.streams import Streams
from megatron_lightning.parallel.weight_gradient import WeightGradients, apply_weight_sinks
from megatron_lightning.runtime.chunks import CutChunks, Target, Values, cut_chunks
from megatron_lightning.runtime.expert_balance import ExpertBalance
from megatron_lightning.runtime.model import ParallelModel
from megatron_lightning.runtime.sharded import enter_sharded, layers_of, shard_options
from megatron_lightning.runtime.stages import (
    PipelinedNetwork,
    cut_network,
    cut_problems,
    layer_names,
)


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
    quantized = (
        frozenset(chosen_linears(network, target.plan, config.quantization))
        if config.quantization is not None
        else frozenset()
    )
    pipelined = _cut_stages(module, network, target, mesh, config)
    chunks = [network] if pipelined is None else list(pipelined.chunks)
    values = Values(seed=seed, dtype=params_dtype, main_dtype=main_params_dtype, shards=shards)
    cut = cut_chunks(chunks, target, mesh, config, values, quantized=quantized)
    _share_tied_within_rank(chunks, target.plan)
    model = _finish(module, target, pipelined, cut, mesh, config)
    if config.quantization is not None:
        model.quantization = apply_quantization(
            chunks,
            quantized,
            target.plan,
            config.quantization,
            mesh,
            table=cut.table,
            streams=cut.streams,
            sequence_parallel=config.sequence_parallel,
            keeps_weights=shards is None,
            seed=seed,
            prefix=f"{target.attribute}.",
            whole=config.data_parallel.sharding == "none",
        )
        if cut.graphs is not None:
            cut.graphs.hold_rounded_weights()
    if shards is not None:
        enter_sharded(model, cut.roots)
        if params_dtype is not None and params_dtype is not main_params_dtype:
            model.compute_dtypes = dict.fromkeys(model.parameters, params_dtype)
    if config.pipeline.schedule in SPLIT_SCHEDULES:
        _put_off_weight_gradients(model, target.plan, mesh, config)
    return model


def _finish(
    module: LightningModule,
    target: Target,
    pipelined: PipelinedNetwork | None,
    cut: CutChunks,
    mesh: ParallelMesh,
    config: ParallelConfig,
) -> ParallelModel:
    """The model of a module whose chunks are cut."""
    prefix = f"{target.attribute}."
    tied = {f"{prefix}{user}": f"{prefix}{owner}" for owner, user in target.plan.tied}
    placement = placement_of(config.pipeline.schedule, mesh.pp.size, len(cut.chunks))
    model = _model(module, target.plan, pipelined, cut.table, tied, cut.streams, mesh, placement)
    model.networks = tuple(cut.chunks)
    model.initial_values = cut.drawn
    model.graphs = cut.graphs
    if cut.graphs is not None and model.expert_balance is not None:
        model.expert_balance.hold_weight()
    model.has_remote_experts = target.plan.has_experts and config.folds_experts
    return model


def _put_off_weight_gradients(
    model: ParallelModel, plan: ParallelPlan, mesh: ParallelMesh, config: ParallelConfig
) -> None:
    """Let linear layers leave their weights' gradients to a schedule that splits backwards."""
    model.weight_gradients = WeightGradients()
    names = {id(parameter): name for name, parameter in model.parameters.items()}
    at_once = () if config.pipeline.defer_head_gradient else plan.last
    compiled = plan.layers if puts_off_in_regions(plan, mesh.tp, config) else None
    for chunk in model.networks:
        apply_weight_sinks(chunk, model.weight_gradients, names, at_once, compiled=compiled)


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
    model = _model(module, None, None, table, {}, None, mesh, Placement(mesh.pp.size, 1))
    if shards is not None:
        enter_sharded(model, roots)
    return model


def _model(
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
