"""The cores that context parallelism puts into a network (see `apply.py`)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron_lightning.config.context import ContextForm
from megatron_lightning.parallel.axes import MeshAxis
from megatron_lightning.parallel.context.all_to_all import HeadExchange, check_heads
from megatron_lightning.parallel.context.exchange import (
    Neighbours,
    exchanged_attention,
    groups_of,
)
from megatron_lightning.parallel.context.gather import gather_documents, gathered_attention
from megatron_lightning.parallel.context.kernels import BlockKernel, choose_kernel
from megatron_lightning.parallel.context.ring import ring_attention
from megatron_lightning.parallel.context.slices import local_index
from megatron_lightning.parallel.core_attention import CoreAttention
from megatron_lightning.parallel.mesh import ParallelMesh
from megatron_lightning.parallel.sequence import SequenceInfo


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


class ContextAttention(CoreAttention):
    """A core over the parts of all context ranks, in one of the four forms.

    Called like the core that it replaces, with the tokens that this rank holds: (S/cp, B, N, D),
    (S/cp, B, G, D), (S/cp, B, G, Dv) -> (S/cp, B, N * Dv). `sequence` describes whole rows. Unless
    parts are `contiguous`, every document in it is a multiple of 2 x cp tokens long.
    """

    splits_sequence = True

    def __init__(
        self,
        core: CoreAttention,
        axes: ContextAxes,
        form: ContextForm,
        *,
        contiguous: bool = False,
    ) -> None:
        super().__init__(
            scale=core.scale,
            window_size=core.window_size,
            dropout=core.get_submodule("dropout"),
            score_cap=core.score_cap,
        )
        self.inner = core
        self.axes = axes
        self.form = form
        self.contiguous = contiguous

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
        batch = query.shape[1]
        whole = _whole(query.shape[0] * self.axes.whole.size, batch, sequence)
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
        pieces = whole.pieces(self.contiguous)
        exchange = HeadExchange(
            pieces, axis.size, range(axis.size), axis, contiguous=self.contiguous
        )
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


class DealtAttention(ContextAttention):
    """All-to-all over slices of neighbouring tokens, its exchanges hidden behind attention; within
    compiled layers, where samples are no packed documents.
    """

    def __init__(
        self,
        core: CoreAttention,
        axes: ContextAxes,
        form: ContextForm,
        *,
        contiguous: bool = True,
        ranks: Neighbours,
        head_groups: int = 1,
    ) -> None:
        super().__init__(core, axes, form, contiguous=contiguous)
        assert contiguous and form == "all_to_all"  # noqa: PT018
        self.head_groups = head_groups
        self._ranks = ranks

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
        """See `ContextAttention`."""
        same = query.dtype is key.dtype is value.dtype
        if sinks is not None or self.drops or not same:
            plainly: Any = super().forward
            return plainly(query, key, value, sequence, rows=rows, sinks=sinks)
        size = self.axes.whole.size
        check_heads(key.shape[2], size)
        groups = groups_of(key.shape[2] // size, self.head_groups)
        settings = self._ranks, groups, self.scale, self.window_size
        if sequence is None:
            return exchanged_attention(query, key, value, *settings)
        return _eagerly(query, key, value, *settings, sequence)


def _within_documents(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    ranks: Neighbours,
    groups: int,
    scale: float,
    window: int,
    sequence: SequenceInfo,
) -> Tensor:
    whole = _whole(query.shape[0] * ranks.axis.size, query.shape[1], sequence)
    return exchanged_attention(query, key, value, ranks, groups, scale, window, whole.flat)


# Lengths change with each micro-batch, and compiled code would be made anew for each.
_eagerly: Any = torch.compiler.disable(_within_documents)


def _whole(length: int, batch: int, sequence: SequenceInfo | None) -> SequenceInfo:
    """Documents of whole samples. ValueError where they are of other sizes."""
    whole = SequenceInfo(((length,),) * batch) if sequence is None else sequence
    if sum(whole.lengths[0]) != length or len(whole.lengths) != batch:
        raise ValueError(
            f"cu_seqlens describes {len(whole.lengths)} samples of {sum(whole.lengths[0])}"
            f" tokens, but attention has {batch} of {length}"
        )
    return whole


def _own_heads(sinks: Tensor | None, axis: MeshAxis) -> Tensor | None:
    """Those of the heads that an exchange over `axis` brings here."""
    return None if sinks is None else sinks.chunk(axis.size)[axis.rank]
