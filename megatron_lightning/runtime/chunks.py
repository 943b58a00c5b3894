"""The chunks of the network that this rank holds: weights split by the plan, what communicates in
them exchanged, their values, and what is set around their layers.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from megatron_lightning.config.parallel import ParallelConfig
from megatron_lightning.config.plan import ParallelPlan, ParameterInfo
from megatron_lightning.layers.dropout import apply_random
from megatron_lightning.layers.given import expect_values
from megatron_lightning.layers.moe.remote import apply_expert_parallel
from megatron_lightning.parallel.context.apply import apply_context_parallel
from megatron_lightning.parallel.fsdp import (
    ShardOptions,
    expert_units,
    shard_network,
)
from megatron_lightning.parallel.kept_buffers import keeps_buffers, puts_off_in_regions
from megatron_lightning.parallel.materialise import initial_values, materialise
from megatron_lightning.parallel.mesh import ParallelMesh
from megatron_lightning.parallel.overlap.choice import choose_overlap
from megatron_lightning.parallel.overlap.layers import Overlap
from megatron_lightning.parallel.recompute import compile_inside
from megatron_lightning.parallel.streams import Streams
from megatron_lightning.parallel.tensor import ExpertAxes, apply_tensor_parallel
from megatron_lightning.runtime.graph_choice import graph_layers
from megatron_lightning.runtime.layer_graphs import LayerGraphs
from megatron_lightning.runtime.recompute import apply_recompute
from megatron_lightning.runtime.sharded import layers_of


@dataclass(frozen=True, kw_only=True)
class Target:
    """Which part of a LightningModule is cut, and by which plan."""

    plan: ParallelPlan
    attribute: str
    """Attribute of the LightningModule that holds the network, e.g. `network`."""


@dataclass(frozen=True, kw_only=True)
class Values:
    """What parameters are given, and in which dtype they are kept."""

    seed: int
    dtype: torch.dtype | None
    """None: the parameters' own."""
    main_dtype: torch.dtype | None
    """Of fully sharded parameters."""
    shards: ShardOptions | None
    """How parameters are sharded; None: they aren't."""


@dataclass(kw_only=True)
class CutChunks:
    """Chunks, and what came of cutting them."""

    chunks: Sequence[nn.Module]
    table: dict[str, ParameterInfo] = field(default_factory=dict)
    streams: Streams | None = None
    """Which all of them share."""
    roots: list[tuple[FSDPModule, ...]] = field(default_factory=list)
    """Sharded modules of each."""
    graphs: LayerGraphs | None = None
    drawn: dict[nn.Parameter, Callable[[], Tensor]] = field(default_factory=dict)
    """How to draw parameters again."""


def cut_chunks(
    chunks: Sequence[nn.Module],
    target: Target,
    mesh: ParallelMesh,
    config: ParallelConfig,
    values: Values,
    *,
    quantized: Collection[str],
) -> CutChunks:
    """Cut chunks that have no values yet, in place. `quantized`: paths in the whole network of the
    linear layers that are to run in low precision.
    """
    cut = CutChunks(chunks=chunks)
    prefix = f"{target.attribute}."
    puts_off = puts_off_in_regions(target.plan, mesh.tp, config)
    for chunk in chunks:
        rows, cut.streams = _apply_layout(
            chunk, target, mesh, config, seed=values.seed, streams=cut.streams
        )
        cut.roots += _give_values(chunk, rows, target, values, mesh.device)
        cut.drawn |= initial_values(chunk, rows, seed=values.seed, prefix=prefix)
        cut.table |= {
            row.name: row for row in rows.values() if not (row.tied_copy and row.name in cut.table)
        }
        apply_recompute(
            chunk,
            target.plan,
            config.recompute,
            streams=cut.streams,
            device=mesh.device,
            quantized=quantized,
        )
        keeps = partial(keeps_buffers, plan=target.plan, quantized=quantized) if puts_off else None
        cut.graphs = _graph_and_compile(chunk, target.plan, mesh, config, cut.streams, keeps)
    return cut


def _give_values(
    chunk: nn.Module,
    rows: Mapping[str, ParameterInfo],
    target: Target,
    values: Values,
    device: torch.device,
) -> list[tuple[FSDPModule, ...]]:
    """Fill a chunk, and shard it layer by layer if asked for; its sharded modules."""
    fill = partial(
        _fill,
        rows=rows,
        seed=values.seed,
        device=device,
        dtype=values.dtype,
        drawn_dtype=None if values.shards is None else values.main_dtype,
        target=target,
    )
    if values.shards is None:
        fill(chunk, "")
        return []
    names = [n.removeprefix(f"{target.attribute}.") for n, r in rows.items() if r.expert]
    layers, units = layers_of(chunk, target.plan), expert_units(chunk, names)
    return [(shard_network(chunk, layers, values.shards, fill, units),)]


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
    """How products hide the collectives of split layers, those of a whole sequence by running
    beside them; None: these are apart.
    """
    return choose_overlap(
        mesh.tp,
        mesh.device,
        wanted=config.overlaps_tensor_parallel,
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
    keeps: Callable[[str, nn.Module], bool] | None,
) -> LayerGraphs | None:
    """Graphs of a chunk's layers where they are asked for (there is one chunk then, by a rule), and
    compiled layers. `keeps`: which of them, by path, keep buffers; None: none.
    """
    graphs = None
    if config.runtime.cuda_graphs == "layers":
        graphs = graph_layers(chunk, plan, streams, mesh.device)
    if config.runtime.compile_layers:
        _compile_layers(chunk, plan, keeps)
        for inner in graphs.inner_modules if graphs is not None else ():
            compile_inside(inner)
    return graphs


def _compile_layers(
    chunk: nn.Module, plan: ParallelPlan, keeps: Callable[[str, nn.Module], bool] | None
) -> None:
    """Compile each layer in place; names and hooks stay, and equal layers share their code."""
    if plan.layers is None:
        raise ValueError(
            "runtime.compile_layers=True with plan.layers=None: name the container of the layers in"
            " the plan, or compile the network yourself"
        )
    for path, layer in layers_of(chunk, plan):
        compile_inside(layer, keeps_buffers=keeps is not None and keeps(path, layer))
