"""Puts activation recompute and offload on a network that is cut already, by the config's choice.

full: a layer's (or group's) input is kept and the rest computed again. selective: the same for
modules by name, inside layers that keep everything else; of an activation it is the output that
isn't kept (`layers/gated_linear.py`). offload: what a layer keeps goes to the
CPU, on top of either.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase

import torch
from torch import nn

from megatron_lightning.config.plan import ParallelPlan
from megatron_lightning.config.recompute import RecomputeConfig
from megatron_lightning.layers.dropout import Dropout, Jitter
from megatron_lightning.layers.linear import Linear
from megatron_lightning.layers.mlp import Activation
from megatron_lightning.layers.moe import Router
from megatron_lightning.layers.staged import LayerGroups, StagedNetwork
from megatron_lightning.parallel.offload import Offloaded
from megatron_lightning.parallel.recompute import (
    Recomputed,
    Region,
    add_region,
    clear_region,
    nested,
)
from megatron_lightning.parallel.streams import Streams
from megatron_lightning.runtime.sharded import layers_of


def apply_recompute(
    network: nn.Module,
    plan: ParallelPlan,
    config: RecomputeConfig,
    *,
    streams: Streams | None,
    device: torch.device,
) -> None:
    """Set the regions of one chunk, in place; those of an earlier call are removed first.

    `streams`: source of the chunk's dropout masks. The chunk may hold no layer (a stage of the
    embedding or the head alone). ValueError where the config needs layers and the plan names none.
    """
    for module in network.modules():
        clear_region(module)
        if isinstance(module, Activation):
            module.recomputed = False
    if isinstance(network, StagedNetwork):
        network.layer_groups = None
    if config.mode == "none" and not config.offload:
        return
    recomputed = Recomputed(streams if _asks(network, streams) else None)
    offloaded = Offloaded(device, min_bytes=config.offload_min_bytes) if config.offload else None
    if _has_groups(config):
        assert isinstance(network, StagedNetwork)
        region: Region = recomputed if offloaded is None else nested(offloaded, recomputed)
        network.layer_groups = LayerGroups(config.num_layers, region)
        return
    for module in _recomputed_modules(network, plan, config):
        if isinstance(module, Activation):
            module.recomputed = True
        else:
            add_region(module, recomputed)
    if offloaded is not None:
        for layer in _layers(network, plan):
            add_region(layer, offloaded)


def _asks(network: nn.Module, streams: Streams | None) -> bool:
    """Whether any mask is drawn from the streams, or a router asks them which tokens it has."""
    parts = streams is not None and streams.mesh.cp.size > 1
    return any(
        (parts and isinstance(module, Router))
        or (isinstance(module, (Dropout, Jitter)) and module.draws)
        for module in network.modules()
    )


def _recomputed_modules(
    network: nn.Module, plan: ParallelPlan, config: RecomputeConfig
) -> list[nn.Module]:
    if config.mode == "selective":
        return [module for _, module in matching_modules(network, config.modules)]
    if config.mode == "none":
        return []
    layers = _layers(network, plan)
    return layers[: config.num_layers] if config.method == "block" else layers


def recompute_problems(
    network: nn.Module, plan: ParallelPlan, config: RecomputeConfig, *, quantized: bool = False
) -> list[str]:
    """What the whole network can't do of the config, as sentences; it may be on the meta device.
    `quantized`: its linear layers are to run in low precision.
    """
    problems = []
    if config.mode == "full" or config.offload:
        try:
            _layers(network, plan)
        except ValueError as error:
            problems.append(str(error))
    if _has_groups(config) and not isinstance(network, StagedNetwork):
        problems.append(
            f"recompute.num_layers={config.num_layers}: groups of layers need a network derived"
            f" from megatron_lightning.layers.StagedNetwork, {type(network).__name__} is none;"
            " use num_layers=1"
        )
    if config.mode == "selective":
        for glob in config.modules:
            if not matching_modules(network, [glob]):
                known = sorted({name.rpartition(".")[2] for name, _ in network.named_modules()})
                known = [name for name in known if name and not name.isdigit()]
                problems.append(
                    f"recompute.modules: {glob!r} matches no module; names in this network are"
                    f" {known}"
                )
        problems += _activation_problems(network, config, quantized)
    return problems


def _activation_problems(
    network: nn.Module, config: RecomputeConfig, quantized: bool
) -> Iterator[str]:
    """Of each kind the first activation that is to be recomputed and can't be."""
    seen: set[str] = set()
    for name, module in matching_modules(network, config.modules):
        if not isinstance(module, Activation):
            continue
        after = network.get_submodule(name.rpartition(".")[0] + ".linear_fc2")
        why = ""
        if not module.can_be_recomputed:
            why = "it is none of gated SiLU"
        elif type(after) is not Linear:
            why = f"a {type(after).__name__} of this back end stands behind it"
        elif after.adapters is not None:
            why = "adapters stand beside the layer behind it"
        elif quantized:
            why = "the layer behind it keeps its input in low precision"
        if why and why not in seen:
            seen.add(why)
            yield f"recompute.modules: {name} can't be recomputed: {why}; name 'mlp' in its place"


def _has_groups(config: RecomputeConfig) -> bool:
    return config.mode == "full" and config.method == "uniform" and config.num_layers > 1


def matching_modules(network: nn.Module, globs: Sequence[str]) -> list[tuple[str, nn.Module]]:
    """Modules whose name, or its end behind a dot, matches a glob; not those inside another."""
    found: list[tuple[str, nn.Module]] = []
    for name, module in network.named_modules():
        inside = found and any(name.startswith(f"{outer}.") for outer, _ in found)
        if name and not inside and any(name_matches(name, glob) for glob in globs):
            found.append((name, module))
    return found


def name_matches(name: str, glob: str) -> bool:
    """Whether a module's name, or its end behind a dot, matches."""
    return fnmatchcase(name, glob) or fnmatchcase(name, f"*.{glob}")


def _layers(network: nn.Module, plan: ParallelPlan) -> list[nn.Module]:
    if isinstance(network, nn.Sequential) and plan.layers is None:
        return list(network.children())
    if plan.layers is None:
        raise ValueError(
            "recompute: plan.layers=None, so it is not known what the layers are; name their"
            " container, e.g. ParallelPlan(layers='decoder.layers'), or use mode='selective'"
            " without offload"
        )
    return [layer for _, layer in layers_of(network, plan)]
