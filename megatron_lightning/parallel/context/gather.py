"""Gathered context attention: keys and values of all ranks are gathered, queries stay where they
are (Llama 3, arXiv 2407.21783, section 3.3.2).

Simple and exact with any mask. Keys and values are gathered anew in the backward pass, so that
only the own part lives in between; their gradients are reduce-scattered in float32.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron_lightning.parallel.axes import MeshAxis
from megatron_lightning.parallel.collectives import all_gather, begin_all_gather, reduce_scatter
from megatron_lightning.parallel.context.attend import (
    Merged,
    backward_calls,
    forward_calls,
    sink_gradient,
    zeros_like,
)
from megatron_lightning.parallel.context.kernels import BlockKernel
from megatron_lightning.parallel.context.plan import gathered_calls
from megatron_lightning.parallel.context.slices import joining_index


def gathered_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    lengths: Sequence[int],
    *,
    axis: MeshAxis,
    kernel: BlockKernel,
    scale: float,
    causal: bool = True,
    window: int = 0,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attention of the local queries to all keys before them; arguments as in `ring_attention`."""
    result: Tensor = _Gathered.apply(
        query, key, value, sinks, tuple(lengths), axis, kernel, scale, causal, window
    )
    return result


def gather_documents(x: Tensor, lengths: Sequence[int], axis: MeshAxis) -> Tensor:
    """Whole documents in order from every rank's part, (T, ...) -> (T * size, ...).

    The backward pass is a reduce-scatter, since every rank goes on with other queries.
    """
    result: Tensor = _GatherDocuments.apply(x, tuple(lengths), axis)
    return result


def _joining(lengths: tuple[int, ...], axis: MeshAxis, x: Tensor) -> tuple[Tensor, Tensor]:
    return joining_index(lengths, axis.size, tuple(range(axis.size)), x.device)


class _GatherDocuments(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, lengths: tuple[int, ...], axis: MeshAxis) -> Tensor:
        into, ctx.back = _joining(lengths, axis, x)
        ctx.axis = axis
        return all_gather(x, axis, 0).index_select(0, into)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return reduce_scatter(grad.index_select(0, ctx.back), ctx.axis, 0), None, None


class _Gathered(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        sinks: Tensor | None,
        lengths: tuple[int, ...],
        axis: MeshAxis,
        kernel: BlockKernel,
        scale: float,
        causal: bool,
        window: int,
    ) -> Tensor:
        calls = gathered_calls(lengths, axis.size, axis.rank, causal, window)
        merged = Merged(query, value)
        keys, values = _gather_pair(key, value, lengths, axis)
        forward_calls(merged, calls, query, keys, values, kernel=kernel, scale=scale)
        output, log_sum = merged.result(query.dtype, sinks)
        ctx.save_for_backward(query, key, value, sinks, output, log_sum)
        ctx.settings = lengths, axis, kernel, scale, calls
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, sinks, output, log_sum = ctx.saved_tensors
        lengths, axis, kernel, scale, calls = ctx.settings
        keys, values = _gather_pair(key, value, lengths, axis)
        d_query, d_keys, d_values = zeros_like(query, keys, values)
        backward_calls(
            (d_query, d_keys, d_values),
            calls,
            grad,
            query,
            keys,
            values,
            output,
            log_sum,
            kernel=kernel,
            scale=scale,
        )
        _, back = _joining(lengths, axis, keys)
        d_key, d_value = (
            reduce_scatter(total.index_select(0, back), axis, 0) for total in (d_keys, d_values)
        )
        return (
            d_query.to(query.dtype),
            d_key.to(key.dtype),
            d_value.to(value.dtype),
            sink_gradient(grad, output, log_sum, sinks),
            *(None,) * 6,
        )


def _gather_pair(
    key: Tensor, value: Tensor, lengths: tuple[int, ...], axis: MeshAxis
) -> tuple[Tensor, Tensor]:
    into, _ = _joining(lengths, axis, key)
    finish_key, finish_value = begin_all_gather(key, axis, 0), begin_all_gather(value, axis, 0)
    return finish_key().index_select(0, into), finish_value().index_select(0, into)
