"""Context parallelism: each rank holds a zig-zag part of every sequence, and attention alone
reaches beyond it.

`apply_context_parallel` takes every attention core out of a network and puts a `ContextAttention`
in its place; nothing else in a network knows. What a rank holds is said in `context_slices.py`, and
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
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from megatron_lightning.config.context import ContextConfig, ContextForm
from megatron_lightning.config.parallel import ParallelConfig
from megatron_lightning.parallel.context_all_to_all import HeadExchange
from megatron_lightning.parallel.context_exchange import exchanged_attention
from megatron_lightning.parallel.context_gather import gather_documents, gathered_attention
from megatron_lightning.parallel.context_kernels import BlockKernel, choose_kernel
from megatron_lightning.parallel.context_ring import ring_attention
from megatron_lightning.parallel.context_slices import local_index
from megatron_lightning.parallel.core_attention import CoreAttention
from megatron_lightning.parallel.mesh import MeshAxis, ParallelMesh
from megatron_lightning.parallel.sequence import SequenceInfo
from megatron_lightning.parallel.token_shift import TokenShift

FORMS_WITH_DROPOUT: tuple[ContextForm, ...] = ("all_gather", "all_to_all")
"""Forms in which attention probabilities may be dropped."""


@dataclass(frozen=True, kw_only=True)
class ContextAxes:
    """The context axis, and for the hierarchical form its two factors."""

    whole: MeshAxis
    inner: MeshAxis
    """Neighbouring ranks, between which heads are exchanged."""
    outer: MeshAxis
    """Ring of groups of neighbours."""

    @classmethod
    def of(cls, mesh: ParallelMesh) -> ContextAxes:
        """From the mesh."""
        return cls(whole=mesh.cp, inner=mesh.axis("cp_inner"), outer=mesh.axis("cp_outer"))


def apply_context_parallel(network: nn.Module, mesh: ParallelMesh, config: ContextConfig) -> None:
    """Swap every attention core of `network`, in place; nothing on an axis of size 1.

    ValueError when the network holds no core, or a form can't do what a core asks for.
    """
    if mesh.cp.size == 1:
        return
    problems = core_problems(network, config)
    if problems:
        raise ValueError("\n".join(problems))
    axes = ContextAxes.of(mesh)
    for name, core in _cores(network):
        parent, _, attribute = name.rpartition(".")
        context = ContextAttention(core, axes, config.form_of(_layer_of(name)))
        setattr(network.get_submodule(parent) if parent else network, attribute, context)
    for module in network.modules():
        if isinstance(module, TokenShift):
            module.axis = mesh.cp


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
            " swaps: build attention from megatron_lightning.layers.SelfAttention, or use"
            " context_parallel_size=1"
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


class ContextAttention(CoreAttention):
    """A core over the zig-zag parts of all context ranks, in one of the four forms.

    Called like the core that it replaces, with the tokens that this rank holds: (S/cp, B, N, D),
    (S/cp, B, G, D), (S/cp, B, G, Dv) -> (S/cp, B, N * Dv). `sequence` describes whole rows, and
    every document in it is a multiple of 2 x cp tokens long.
    """

    splits_sequence = True

    def __init__(self, core: CoreAttention, axes: ContextAxes, form: ContextForm) -> None:
        super().__init__(
            scale=core.scale,
            window_size=core.window_size,
            dropout=core.get_submodule("dropout"),
            score_cap=core.score_cap,
        )
        self.inner = core
        self.axes = axes
        self.form = form

    @torch.compiler.disable
    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        sequence: SequenceInfo | None = None,
        *,
        rows: Tensor | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """See the class; `rows` is not for this core."""
        assert rows is None
        length, batch = query.shape[0] * self.axes.whole.size, query.shape[1]
        whole = SequenceInfo(((length,),) * batch) if sequence is None else sequence
        if sum(whole.lengths[0]) != length or len(whole.lengths) != batch:
            raise ValueError(
                f"cu_seqlens describes {len(whole.lengths)} samples of {sum(whole.lengths[0])}"
                f" tokens, but attention has {batch} of {length}"
            )
        if self.form == "all_gather" and (self.inner.written_out or self.drops):
            return self._gathered_in_the_open(query, key, value, sequence, whole, sinks)
        query, key, value = (
            x.transpose(0, 1).flatten(0, 1) for x in (query, key, value)
        )  # (B * S/cp, N or G, D)
        if self.form == "all_to_all":
            context = self._exchanged(query, key, value, sequence, whole, sinks)
        elif self.form == "hierarchical":
            context = self._hierarchical(query, key, value, whole, sinks)
        else:
            attention = ring_attention if self.form == "ring" else gathered_attention
            context = attention(
                query,
                key,
                value,
                whole.flat,
                axis=self.axes.whole,
                kernel=self._kernel(query, value),
                scale=self.scale,
                window=self.window_size,
                sinks=sinks,
            )
        return context.unflatten(0, (batch, -1)).transpose(0, 1).flatten(2)  # (S/cp, B, N * Dv)

    def _kernel(self, query: Tensor, value: Tensor) -> BlockKernel:
        return choose_kernel(
            query, value, written_out=self.inner.written_out, score_cap=self.score_cap
        )

    def _gathered_in_the_open(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        sequence: SequenceInfo | None,
        whole: SequenceInfo,
        sinks: Tensor | None,
    ) -> Tensor:
        """The core itself, with all keys and the own queries: for dropout and written-out cores."""
        axis, batch = self.axes.whole, query.shape[1]
        keys, values = (
            gather_documents(x.transpose(0, 1).flatten(0, 1), whole.flat, axis)
            .unflatten(0, (batch, -1))
            .transpose(0, 1)
            for x in (key, value)
        )  # (S, B, G, D)
        own = local_index(whole.flat, axis.size, axis.rank).view(batch, -1)
        rows = own - torch.arange(batch)[:, None] * keys.shape[0]
        rows = rows.to(query.device)
        return self.inner(query, keys, values, sequence, rows=rows, sinks=sinks)

    def _exchanged(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        sequence: SequenceInfo | None,
        whole: SequenceInfo,
        sinks: Tensor | None,
    ) -> Tensor:
        axis, batch = self.axes.whole, len(whole.lengths)
        plain = sinks is None and not self.score_cap and not self.drops
        if plain and not self.inner.written_out and query.dtype is key.dtype is value.dtype:
            return exchanged_attention(
                query,
                key,
                value,
                whole.flat,
                axis=axis,
                kernel=self._kernel(query, value),
                scale=self.scale,
                window=self.window_size,
            )
        exchange = HeadExchange(whole.flat, axis.size, range(axis.size), axis)
        size = value.shape[-1]
        query, key, value = (
            exchange.to_heads(x).unflatten(0, (batch, -1)).transpose(0, 1)
            for x in (query, key, value)
        )  # (S, B, N/cp or G/cp, D)
        own = _own_heads(sinks, axis)
        context = self.inner(query, key, value, sequence, sinks=own)  # (S, B, N/cp * Dv)
        context = context.transpose(0, 1).flatten(0, 1).unflatten(1, (-1, size))
        return exchange.to_tokens(context)

    def _hierarchical(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        whole: SequenceInfo,
        sinks: Tensor | None,
    ) -> Tensor:
        """Heads between neighbours, whose tokens together are one part of a ring of groups."""
        inner, outer, size = self.axes.inner, self.axes.outer, self.axes.whole.size
        first = outer.rank * inner.size
        exchange = HeadExchange(whole.flat, size, range(first, first + inner.size), inner)
        query, key, value = (exchange.to_heads(x) for x in (query, key, value))
        context = ring_attention(
            query,
            key,
            value,
            whole.flat,
            axis=outer,
            kernel=self._kernel(query, value),
            scale=self.scale,
            window=self.window_size,
            sinks=_own_heads(sinks, inner),
        )
        return exchange.to_tokens(context)

    def extra_repr(self) -> str:
        """Form and size."""
        return f"form={self.form}, size={self.axes.whole.size}"


def _own_heads(sinks: Tensor | None, axis: MeshAxis) -> Tensor | None:
    """Those of the heads that an exchange over `axis` brings here."""
    return None if sinks is None else sinks.chunk(axis.size)[axis.rank]
