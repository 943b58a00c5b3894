"""Which parts of a cut network run as CUDA graphs."""

from __future__ import annotations

import functools

import torch
from torch import nn

from megatron_lightning.config.plan import ParallelPlan
from megatron_lightning.layers.moe.layer import MoELayer
from megatron_lightning.parallel.streams import Streams
from megatron_lightning.runtime.graph_recorder import CudaRecorder
from megatron_lightning.runtime.layer_graphs import LayerGraphs
from megatron_lightning.runtime.sharded import layers_of
from megatron_lightning.utils.logging import warn_once

_NOT_CUDA = (
    "runtime.cuda_graphs='layers' has no effect on the CPU, which has no such graphs: layers run"
    " as ever"
)


def graph_layers(
    network: nn.Module, plan: ParallelPlan, streams: Streams | None, device: torch.device
) -> LayerGraphs | None:
    """Let each layer run as graphs; of one whose experts wait for the host, its attention. None on
    the CPU, with a warning.
    """
    if device.type != "cuda":
        warn_once(_NOT_CUDA)
        return None
    graphs = LayerGraphs(functools.partial(CudaRecorder, device), streams)
    add_layers(graphs, network, plan)
    return graphs


def add_layers(graphs: LayerGraphs, network: nn.Module, plan: ParallelPlan) -> None:
    """Choose what runs as graphs: the layers, or the attention of those whose experts wait for the
    host.
    """
    for path, layer in layers_of(network, plan):
        experts = [module for module in layer.modules() if isinstance(module, MoELayer)]
        if all(module.is_static for module in experts):
            graphs.add(layer, path)
            continue
        attention = dict(layer.named_children()).get("self_attention")
        if attention is None:
            warn_once(f"runtime.cuda_graphs='layers': {path} has experts and runs without graphs")
            continue
        graphs.add(attention, f"{path}.self_attention")
        graphs.inner_modules.append(attention)
