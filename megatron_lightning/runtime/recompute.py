"""Puts activation recompute and offload on a network that is cut already, by the config's choice.

full: a layer's (or group's) input is kept and the rest computed again. selective: the same for
modules by name, inside layers that keep everything else; of an MLP's gated SiLU it is the output
that isn't kept (`layers/gated_linear.py`). offload: what a layer keeps goes to the CPU, on top of
either.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from fnmatch import fnmatchcase

import torch
from torch import nn

from megatron_lightning.config.plan import ParallelPlan
from megatron_lightning.config.recompute import RecomputeConfig
from megatron_lightning.layers.dropout import Dropout, Jitter
from megatron_lightning.layers.hooks import has_hooks
from megatron_lightning.layers.linear import Linear
from megatron_lightning.layers.mlp import MLP, Activation
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
from megatron_lightning.utils.logging import warn_once


def apply_recompute(
    network: nn.Module,
    plan: ParallelPlan,
    config: RecomputeConfig,
    *,
    streams: Streams | None,
    device: torch.device,
    quantized: Collection[str] = (),
) -> None:
    """Set the regions of one chunk, in place; those of an earlier call are removed first.

    `streams`: source of the chunk's dropout masks. `quantized`: paths of linear layers that are to
    run in low precision. The chunk may hold no layer (a stage of the embedding or the head alone).
    ValueError where the config needs layers and the plan names none.
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
    gates = _gates(network, config, quantized)
    for module in _recomputed_modules(network, plan, config):
        if isinstance(module, Activation) and module in gates:
            module.recomputed = True
        elif not (isinstance(module, Activation) and module.can_be_recomputed):
            add_region(module, recomputed)  # a gated SiLU keeps its input alone, as a region would
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
    network: nn.Module, plan: ParallelPlan, config: RecomputeConfig
) -> list[str]:
    """What the whole network can't do of the config, as sentences; it may be on the meta device."""
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
    return problems


def _gates(
    network: nn.Module, config: RecomputeConfig, quantized: Collection[str]
) -> set[nn.Module]:
    """Matching activations that the layer behind computes again, instead of keeping their output;
    the first of each kind of others is named in a warning.
    """
    found: set[nn.Module] = set()
    warned: set[str] = set()
    for name, module in matching_modules(network, config.modules):
        if config.mode != "selective" or not isinstance(module, Activation):
            continue
        why = _kept_output(network, name, module, quantized)
        if why is None:
            found.add(module)
        elif why not in warned:
            warned.add(why)
            what = "keeps its input as ever" if module.can_be_recomputed else "is computed again"
            warn_once(
                f"recompute.modules: {name} {what}, but its output is kept all the same, since"
                f" {why}; name 'mlp' to keep neither"
            )
    return found


def _kept_output(
    network: nn.Module, name: str, activation: Activation, quantized: Collection[str]
) -> str | None:
    """Why the layer behind an activation has to keep what it is given; None: it has not."""
    path = name.rpartition(".")[0]
    mlp = network.get_submodule(path)
    if not isinstance(mlp, MLP) or type(mlp).forward is not MLP.forward:
        return f"{type(mlp).__name__} has a forward of its own"
    if not activation.can_be_recomputed:
        return "it is none of gated SiLU"
    if has_hooks(activation):
        return "it has hooks, for which it has to be called"
    after = mlp.linear_fc2
    if type(after) is not Linear:
        return f"a {type(after).__name__} of this back end stands behind it"
    if after.adapters is not None:
        return "adapters stand beside the layer behind it"
    if f"{path}.linear_fc2".removeprefix(".") in quantized:
        return "the layer behind it runs in low precision"
    return None


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
