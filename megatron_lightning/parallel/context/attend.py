"""Loops over `Call`s: merging partial attentions forward, and adding up gradients backward.

All tensors are flattened tokens, (T, heads, D). Sums are float32 whatever the dtype of the tensors.
`attend` is the whole of it for keys that are all here: packed documents on one rank, and the core
of the gathered form.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron_lightning.parallel.context.kernels import BlockKernel, Gradients
from megatron_lightning.parallel.context.plan import (
    Call,
    Span,
    gathered_calls,
    joined,
    span_index,
)


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    lengths: Sequence[int],
    *,
    kernel: BlockKernel,
    scale: float,
    causal: bool = True,
    window: int = 0,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attention within each document of `lengths`, all of them whole and here, with gradients.

    (T, N, D), (T, G, D), (T, G, Dv) -> (T, N, Dv). `sinks` (N,): see `Merged.result`.
    """
    calls = gathered_calls(tuple(lengths), 1, 0, causal, window)
    result: Tensor = _Attend.apply(query, key, value, sinks, calls, kernel, scale)
    return result


class Merged:
    """Output and log-sum-exp over the keys seen so far, in float32 or wider."""

    def __init__(self, query: Tensor, value: Tensor) -> None:
        self._exact = torch.promote_types(query.dtype, torch.float32)
        self._shape = (*query.shape[:2], value.shape[-1])
        self._output: Tensor | None = None
        self._log_sum: Tensor | None = None
        self._device = query.device

    def add(self, spans: tuple[Span, ...], output: Tensor, log_sum: Tensor) -> None:
        """Merge what a kernel gave for the query rows of `spans`."""
        if self._output is None or self._log_sum is None:
            whole = joined(spans) == ((0, self._shape[0]),)
            if whole:
                self._output, self._log_sum = output.to(self._exact), log_sum.to(self._exact)
                return
            self._output = torch.zeros(self._shape, dtype=self._exact, device=self._device)
            log_shape = (self._shape[1], self._shape[0])
            self._log_sum = torch.full(
                log_shape, -torch.inf, dtype=self._exact, device=self._device
            )
        rows = _rows(spans, self._device)
        before, was = self._output[rows], self._log_sum[:, rows]
        total = torch.logaddexp(was, log_sum.to(self._exact))
        kept = (was - total).exp().t()[..., None]
        new = (log_sum - total).exp().t()[..., None]
        self._output[rows] = before * kept + output.to(self._exact) * new
        self._log_sum[:, rows] = total

    def result(self, dtype: torch.dtype, sinks: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """(output in `dtype`, log-sum-exp).

        `sinks` (N,) are scores of one more key a head, whose value is zero: they join the
        log-sum-exp, so that the backward pass of all other keys follows from what is returned.
        """
        output, log_sum = self._output, self._log_sum
        assert output is not None
        assert log_sum is not None
        if sinks is not None:
            total = torch.logaddexp(log_sum, sinks.to(self._exact)[:, None])
            output, log_sum = output * (log_sum - total).exp().t()[..., None], total
        return output.to(dtype), log_sum


def forward_calls(
    merged: Merged,
    calls: Sequence[Call],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    kernel: BlockKernel,
    scale: float,
) -> None:
    """Run `calls` and merge what they give."""
    for call in calls:
        output, log_sum = kernel.forward(
            take(query, call.queries),
            take(key, call.keys),
            take(value, call.keys),
            queries=call.queries,
            keys=call.keys,
            scale=scale,
            band=call.band,
        )
        merged.add(call.queries, output, log_sum)


def backward_calls(
    sums: Gradients,
    calls: Sequence[Call],
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    output: Tensor,
    log_sum: Tensor,
    *,
    kernel: BlockKernel,
    scale: float,
) -> None:
    """Run `calls` backward and add to the `sums` of query, key and value gradients."""
    for call in calls:
        rows = _rows(call.queries, query.device)
        gradients = kernel.backward(
            take(grad, call.queries),
            take(query, call.queries),
            take(key, call.keys),
            take(value, call.keys),
            take(output, call.queries),
            log_sum[:, rows],
            queries=call.queries,
            keys=call.keys,
            scale=scale,
            band=call.band,
        )
        for into, spans, gradient in zip(
            sums, (call.queries, call.keys, call.keys), gradients, strict=True
        ):
            into[_rows(spans, into.device)] += gradient  # no row twice in one call


def sink_gradient(
    grad: Tensor, output: Tensor, log_sum: Tensor, sinks: Tensor | None
) -> Tensor | None:
    """Gradient of `sinks` (N,), from that of the output (T, N, D): the share of each sink times
    its score's derivative, 0 - sum(grad * output).
    """
    if sinks is None:
        return None
    delta = (grad.to(log_sum.dtype) * output.to(log_sum.dtype)).sum(dim=-1)  # (T, N)
    share = (sinks.to(log_sum.dtype)[:, None] - log_sum).exp()  # (N, T)
    return -(share * delta.t()).sum(dim=1).to(sinks.dtype)


def zeros_like(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Sums to add gradients to, float32 or wider."""
    return tuple(
        torch.zeros(x.shape, dtype=torch.promote_types(x.dtype, torch.float32), device=x.device)
        for x in tensors
    )


def take(x: Tensor, spans: tuple[Span, ...]) -> Tensor:
    """Rows of the spans: a view when they are neighbours."""
    rows = _rows(spans, x.device)
    return x[rows] if isinstance(rows, slice) else x.index_select(0, rows)


def _rows(spans: tuple[Span, ...], device: torch.device) -> slice | Tensor:
    merged = joined(spans)
    return slice(*merged[0]) if len(merged) == 1 else span_index(merged, device)


def _is_all(calls: Sequence[Call], query: Tensor, key: Tensor) -> bool:
    """Whether there is one call, of all queries with all keys in order: nothing is to be merged."""
    return (
        len(calls) == 1
        and joined(calls[0].queries) == ((0, query.shape[0]),)
        and joined(calls[0].keys) == ((0, key.shape[0]),)
    )


def whole_forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    sinks: Tensor | None,
    calls: tuple[Call, ...],
    kernel: BlockKernel,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """Output (T, N, Dv) in the query's dtype and log-sum-exp (N, T) over all `calls`."""
    if sinks is None and _is_all(calls, query, key):
        only = calls[0]
        return kernel.forward(
            query, key, value, queries=only.queries, keys=only.keys, scale=scale, band=only.band
        )
    merged = Merged(query, value)
    forward_calls(merged, calls, query, key, value, kernel=kernel, scale=scale)
    return merged.result(query.dtype, sinks)


def whole_backward(
    kept: tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor],
    calls: tuple[Call, ...],
    kernel: BlockKernel,
    scale: float,
) -> Gradients:
    """Gradients of query, key and value in their dtypes; `kept`: the output's gradient, query,
    key, value, output and log-sum-exp.
    """
    _, query, key, value, *_ = kept
    if _is_all(calls, query, key):
        only = calls[0]
        sums = kernel.backward(
            *kept, queries=only.queries, keys=only.keys, scale=scale, band=only.band
        )
    else:
        d_query, d_key, d_value = zeros_like(query, key, value)
        sums = d_query, d_key, d_value
        backward_calls(sums, calls, *kept, kernel=kernel, scale=scale)
    d_query, d_key, d_value = sums
    return d_query.to(query.dtype), d_key.to(key.dtype), d_value.to(value.dtype)


class _Attend(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        sinks: Tensor | None,
        calls: tuple[Call, ...],
        kernel: BlockKernel,
        scale: float,
    ) -> Tensor:
        output, log_sum = whole_forward(query, key, value, sinks, calls, kernel, scale)
        ctx.save_for_backward(query, key, value, sinks, output, log_sum)
        ctx.calls, ctx.kernel, ctx.scale = calls, kernel, scale
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, sinks, output, log_sum = ctx.saved_tensors
        given = whole_backward(
            (grad, query, key, value, output, log_sum), ctx.calls, ctx.kernel, ctx.scale
        )
        d_sinks = sink_gradient(grad, output, log_sum, sinks)
        return *given, d_sinks, None, None, None
