"""Context parallelism: each rank holds a part of every sequence, and attention alone reaches
beyond it.

`apply_context_parallel` takes every attention core out of a network and puts a `ContextAttention`
in its place; nothing else in a network knows. What a rank holds is said in `slices.py`, and
batches are cut accordingly in `runtime/context_batch.py`. Four forms:

| form | what travels | limits |
|---|---|---|
| ring | keys and values, hop by hop, while attention is computed | no dropout of probabilities |
| all_gather | keys and values, at once | every rank holds all keys of one layer for a moment |
| all_to_all | queries, keys, values and outputs, by heads | heads must divide |
| hierarchical | all_to_all between neighbours, ring between such groups | both |
"""

from __future__ import annotations

import re

from torch import nn

from megatron_lightning.config.context import ContextConfig, ContextForm
from megatron_lightning.config.parallel import ParallelConfig
from megatron_lightning.parallel.context.cores import (
    ContextAttention,
    ContextAxes,
    DealtAttention,
)
from megatron_lightning.parallel.context.neighbours import neighbours
from megatron_lightning.parallel.core_attention import CoreAttention
from megatron_lightning.parallel.mesh import ParallelMesh
from megatron_lightning.parallel.token_shift import TokenShift

FORMS_WITH_DROPOUT: tuple[ContextForm, ...] = ("all_gather", "all_to_all")
"""Forms in which attention probabilities may be dropped."""


def apply_context_parallel(
    network: nn.Module,
    mesh: ParallelMesh,
    config: ContextConfig,
    *,
    timeout_seconds: float = 600.0,
) -> None:
    """Swap every attention core of `network`, in place; nothing on an axis of size 1. All ranks of
    the mesh must call it.

    ValueError when the network holds no core, or a form can't do what a core asks for.
    """
    if mesh.cp.size == 1:
        return
    problems = core_problems(network, config)
    if problems:
        raise ValueError("\n".join(problems))
    axes = ContextAxes.of(mesh)
    ranks = neighbours(mesh, config, timeout_seconds) if config.contiguous else None
    for name, core in _cores(network):
        parent, _, attribute = name.rpartition(".")
        form = config.form_of(_layer_of(name))
        if ranks is not None and not core.written_out and not core.score_cap:
            groups = config.head_groups
            context = DealtAttention(core, axes, form, ranks=ranks, head_groups=groups)
        else:
            context = ContextAttention(core, axes, form, contiguous=config.contiguous)
        setattr(network.get_submodule(parent) if parent else network, attribute, context)
    for module in network.modules():
        if isinstance(module, TokenShift):
            module.axis, module.contiguous = mesh.cp, config.contiguous


def check_context_parallel(network: nn.Module, config: ParallelConfig) -> list[str]:
    """What context parallelism can't do with this network, as sentences; the network may be on the
    meta device.
    """
    if config.context_parallel_size == 1:
        return []
    problems = core_problems(network, config.context)
    if config.runtime.exact_dropout:
        problems += [
            f"runtime.exact_dropout=True with attention_dropout={core.dropout.p} and the context"
            f" form {form!r}: masks by global position need form='all_gather'"
            for _, core, form in _forms(network, config.context)
            if core.dropout.p > 0 and form != "all_gather"
        ]
    return list(dict.fromkeys(problems))


def core_problems(network: nn.Module, config: ContextConfig) -> list[str]:
    """What keeps the cores of a network from being swapped."""
    found = _forms(network, config)
    if not found:
        return [
            f"{type(network).__name__} holds no CoreAttention, which context_parallel_size > 1"
            " swaps: build attention from megatron_lightning.layers.SelfAttention, or around a core"
            " such as layers.FusedAttention, and take positions from the batch's position_ids; or"
            " use context_parallel_size=1"
        ]
    problems: list[str] = []
    for name, core, form in found:
        if core.dropout.p > 0 and form not in FORMS_WITH_DROPOUT:
            problems.append(
                f"attention_dropout={core.dropout.p} with the context form {form!r}: it can't drop"
                f" attention probabilities; use one of {FORMS_WITH_DROPOUT}, or"
                " attention_dropout=0"
            )
        if config.layer_forms and _layer_of(name) is None:
            problems.append(
                f"context.layer_forms={tuple(config.layer_forms)}: the core {name!r} lies in no"
                " numbered layer; use context.form for all of them"
            )
    return list(dict.fromkeys(problems))


def _forms(
    network: nn.Module, config: ContextConfig
) -> list[tuple[str, CoreAttention, ContextForm]]:
    return [(name, core, config.form_of(_layer_of(name))) for name, core in _cores(network)]


def _cores(network: nn.Module) -> list[tuple[str, CoreAttention]]:
    return [
        (name, module)
        for name, module in network.named_modules()
        if isinstance(module, CoreAttention) and not name.endswith(".inner")
    ]


def _layer_of(name: str) -> int | None:
    """Number of the layer that a module lies in, from its path; None when none is numbered."""
    numbers = re.findall(r"(?:^|\.)(\d+)(?=\.)", name)
    return int(numbers[-1]) if numbers else None
