"""Ring attention (arXiv 2310.01889): keys and values travel round the ranks, and each rank meets
them block by block.

The next keys and values are on their way while the present ones are used. The backward pass goes
round once more with the merged output and log-sum-exp; the gradients of keys and values travel with
them and come home with the last hop. No rank ever holds more than two parts of the keys.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron_lightning.parallel.axes import MeshAxis
from megatron_lightning.parallel.context.attend import (
    Merged,
    backward_calls,
    forward_calls,
    sink_gradient,
    zeros_like,
)
from megatron_lightning.parallel.context.kernels import BlockKernel
from megatron_lightning.parallel.context.plan import ring_calls

Pair = tuple[Tensor, Tensor]


def ring_attention(
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
    """Attention of the local queries to all keys before them, with gradients.

    (T, N, D), (T, G, D), (T, G, Dv) of the own zig-zag part -> (T, N, Dv). `lengths`: those of the
    whole documents, T * axis.size tokens together. `sinks` (N,): see `Merged.result`; each rank's
    gradient of them is that of its own queries.
    """
    result: Tensor = _Ring.apply(
        query, key, value, sinks, tuple(lengths), axis, kernel, scale, causal, window
    )
    return result


def shift(tensors: Sequence[Tensor], axis: MeshAxis) -> Callable[[], tuple[Tensor, ...]]:
    """Start to send contiguous tensors to the next rank; the result waits and gives those of the
    rank before.
    """
    after, before = (axis.rank + 1) % axis.size, (axis.rank - 1) % axis.size
    received = tuple(torch.empty_like(tensor) for tensor in tensors)
    operations = [
        dist.P2POp(dist.isend, tensor, group=axis.group, group_peer=after) for tensor in tensors
    ] + [dist.P2POp(dist.irecv, into, group=axis.group, group_peer=before) for into in received]
    works: Any = dist.batch_isend_irecv(operations)
    kept = [tensors]  # their memory must not be used again before they have been sent

    def finish() -> tuple[Tensor, ...]:
        for work in works:
            work.wait()
        kept.clear()
        return received

    return finish


class _Ring(torch.autograd.Function):
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
        key, value = key.contiguous(), value.contiguous()
        merged = Merged(query, value)
        keys, values = key, value  # those that are here at this step
        for step in range(axis.size):
            last = step == axis.size - 1
            finish = None if last else shift((keys, values), axis)
            source = (axis.rank - step) % axis.size
            calls = ring_calls(lengths, axis.size, axis.rank, source, causal, window)
            forward_calls(merged, calls, query, keys, values, kernel=kernel, scale=scale)
            if finish is not None:
                keys, values = finish()
        output, log_sum = merged.result(query.dtype, sinks)
        ctx.save_for_backward(query, key, value, sinks, output, log_sum)
        ctx.settings = lengths, axis, kernel, scale, causal, window
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, sinks, output, log_sum = ctx.saved_tensors
        lengths, axis, kernel, scale, causal, window = ctx.settings
        (d_query,) = zeros_like(query)
        keys, values = key, value
        arriving: Callable[[], tuple[Tensor, ...]] | None = None
        for step in range(axis.size):
            last = step == axis.size - 1
            finish = None if last else shift((keys, values), axis)
            source = (axis.rank - step) % axis.size
            calls = ring_calls(lengths, axis.size, axis.rank, source, causal, window)
            d_keys, d_values = zeros_like(key, value)
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
            if arriving is not None:  # what the ranks before us added for the keys that are here
                for total, part in zip((d_keys, d_values), arriving(), strict=True):
                    total += part
            arriving = shift((d_keys, d_values), axis)
            if finish is not None:
                keys, values = finish()
        assert arriving is not None
        d_key, d_value = arriving()  # one hop more brings them home
        return (
            d_query.to(query.dtype),
            d_key.to(key.dtype),
            d_value.to(value.dtype),
            sink_gradient(grad, output, log_sum, sinks),
            *(None,) * 6,
        )
