"""Attention kernels for sequences one by one, or as a batch where their lengths are equal: the
written-out mathematics on any device, and torch's flash attention for CPUs.

The interface is `BlockKernel` in `kernels.py`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_lightning.parallel.context.plan import Band, Span

_SLICE_ELEMENTS = 1 << 25
"""Scores that `MathKernel` makes at once: 128 MiB of float32."""

Gradients = tuple[Tensor, Tensor, Tensor]


class EachSequence(ABC):
    """A kernel that works on sequences of equal length, as a batch (B, heads, S, D), or one by
    one.
    """

    @abstractmethod
    def forward_batch(
        self, query: Tensor, key: Tensor, value: Tensor, scale: float, band: Band
    ) -> tuple[Tensor, Tensor]:
        """(B, N, S, D), (B, G, S', D), (B, G, S', Dv) -> (B, N, S, Dv), (B, N, S)."""

    @abstractmethod
    def backward_batch(
        self,
        grad: Tensor,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        output: Tensor,
        log_sum: Tensor,
        scale: float,
        band: Band,
    ) -> Gradients:
        """Gradients of query, key and value."""

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        queries: tuple[Span, ...],
        keys: tuple[Span, ...],
        scale: float,
        band: Band,
    ) -> tuple[Tensor, Tensor]:
        """See `BlockKernel.forward`."""
        outputs: list[Tensor] = []
        log_sums: list[Tensor] = []
        for number, (q, k) in _batches(queries, keys):
            output, log_sum = self.forward_batch(
                _batch(query[q], number),
                _batch(key[k], number),
                _batch(value[k], number),
                scale,
                band,
            )
            outputs.append(_flat(output))
            log_sums.append(log_sum.transpose(0, 1).flatten(1))  # (N, B * S)
        return torch.cat(outputs), torch.cat(log_sums, dim=1)

    def backward(
        self,
        grad: Tensor,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        output: Tensor,
        log_sum: Tensor,
        *,
        queries: tuple[Span, ...],
        keys: tuple[Span, ...],
        scale: float,
        band: Band,
    ) -> Gradients:
        """See `BlockKernel.backward`."""
        found: tuple[list[Tensor], list[Tensor], list[Tensor]] = ([], [], [])
        for number, (q, k) in _batches(queries, keys):
            gradients = self.backward_batch(
                _batch(grad[q], number),
                _batch(query[q], number),
                _batch(key[k], number),
                _batch(value[k], number),
                _batch(output[q], number),
                log_sum[:, q].unflatten(1, (number, -1)).transpose(0, 1),  # (B, N, S)
                scale,
                band,
            )
            for into, gradient in zip(found, gradients, strict=True):
                into.append(_flat(gradient))
        return torch.cat(found[0]), torch.cat(found[1]), torch.cat(found[2])


def _batches(
    queries: tuple[Span, ...], keys: tuple[Span, ...]
) -> Iterator[tuple[int, tuple[slice, slice]]]:
    """(number of sequences, rows of queries and keys): all at once where lengths are equal."""
    q_lengths = [stop - start for start, stop in queries]
    k_lengths = [stop - start for start, stop in keys]
    if len(set(q_lengths)) == 1 and len(set(k_lengths)) == 1:
        yield len(queries), (slice(0, sum(q_lengths)), slice(0, sum(k_lengths)))
        return
    q_row = k_row = 0
    for q_length, k_length in zip(q_lengths, k_lengths, strict=True):
        yield 1, (slice(q_row, q_row + q_length), slice(k_row, k_row + k_length))
        q_row, k_row = q_row + q_length, k_row + k_length


def _batch(x: Tensor, number: int) -> Tensor:
    """(B * S, heads, D) -> (B, heads, S, D)."""
    return x.unflatten(0, (number, -1)).transpose(1, 2)


def _flat(x: Tensor) -> Tensor:
    """(B, heads, S, D) -> (B * S, heads, D)."""
    return x.transpose(1, 2).flatten(0, 1)


@dataclass(frozen=True)
class MathKernel(EachSequence):
    """The formulas written out with float32 scores, for slices of queries: on any device, and the
    oracle of the others.
    """

    score_cap: float = 0.0
    """Scores s become cap * tanh(s / cap); 0: they stay."""

    def forward_batch(
        self, query: Tensor, key: Tensor, value: Tensor, scale: float, band: Band
    ) -> tuple[Tensor, Tensor]:
        """(B, N, S, D), (B, G, S', D), (B, G, S', Dv) -> (B, N, S, Dv), (B, N, S)."""
        heads = query.shape[1]
        key, value = _repeat(key, heads), _repeat(value, heads)
        outputs: list[Tensor] = []
        log_sums: list[Tensor] = []
        for rows in _query_slices(query, key):
            keys = _key_slice(query, key, rows, band)
            scores = self._scores(query, key, rows, keys, scale, band)
            log_sum = scores.logsumexp(dim=-1)
            weights = (scores - log_sum[..., None]).exp().to(value.dtype)
            outputs.append(weights @ value[:, :, keys])
            log_sums.append(log_sum)
        return torch.cat(outputs, dim=2), torch.cat(log_sums, dim=2)

    def backward_batch(
        self,
        grad: Tensor,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        output: Tensor,
        log_sum: Tensor,
        scale: float,
        band: Band,
    ) -> Gradients:
        """Gradients, with P = exp(scores - log_sum) and dS = P * (dP - sum(grad * output))."""
        heads, groups = query.shape[1], key.shape[1]
        key_all, value_all = _repeat(key, heads), _repeat(value, heads)
        d_query = torch.empty_like(query)
        exact = torch.promote_types(query.dtype, torch.float32)
        d_key = torch.zeros_like(key_all, dtype=exact)
        d_value = torch.zeros_like(value_all, dtype=exact)
        for rows in _query_slices(query, key_all):
            keys = _key_slice(query, key_all, rows, band)
            scores = self._scores(query, key_all, rows, keys, scale, band)
            weights = (scores - log_sum[:, :, rows, None]).exp()
            part = grad[:, :, rows]
            delta = (part.to(exact) * output[:, :, rows].to(exact)).sum(dim=-1, keepdim=True)
            d_weights = (part @ value_all[:, :, keys].transpose(-1, -2)).to(exact)
            d_scores = weights * (d_weights - delta) * scale
            if self.score_cap:
                seen = scores > -torch.inf  # where it is not, the weight is 0
                d_scores *= 1 - (scores / self.score_cap).square().where(seen, 0.0)
            d_scores = d_scores.to(query.dtype)
            d_query[:, :, rows] = d_scores @ key_all[:, :, keys]
            d_key[:, :, keys] += d_scores.transpose(-1, -2) @ query[:, :, rows]
            d_value[:, :, keys] += weights.to(grad.dtype).transpose(-1, -2) @ part
        return d_query, _sum_repeated(d_key, groups), _sum_repeated(d_value, groups)

    def _scores(
        self, query: Tensor, key: Tensor, rows: slice, keys: slice, scale: float, band: Band
    ) -> Tensor:
        exact = torch.promote_types(query.dtype, torch.float32)
        scores = (query[:, :, rows] @ key[:, :, keys].transpose(-1, -2)).to(exact) * scale
        if self.score_cap:
            scores = self.score_cap * torch.tanh(scores / self.score_cap)
        if band.is_full:
            return scores
        seen = band_mask(query.shape[2], key.shape[2], band, query.device)[rows, keys]
        return scores.masked_fill(~seen, -torch.inf)


def _key_slice(query: Tensor, key: Tensor, rows: slice, band: Band) -> slice:
    """The keys that any query of `rows` sees."""
    length = key.shape[2]
    shift = length - query.shape[2]
    first = 0 if band.left is None else max(0, rows.start + shift - band.left)
    last = length if band.right is None else min(length, rows.stop + shift + band.right)
    return slice(min(first, length), max(last, 0))


def band_mask(num_queries: int, num_keys: int, band: Band, device: torch.device) -> Tensor:
    """(queries, keys) bool, True where a query sees a key."""
    row = torch.arange(num_queries, device=device)[:, None] + (num_keys - num_queries)
    offset = torch.arange(num_keys, device=device)[None, :] - row
    seen = torch.ones_like(offset, dtype=torch.bool)
    if band.left is not None:
        seen &= offset >= -band.left
    if band.right is not None:
        seen &= offset <= band.right
    return seen


def _query_slices(query: Tensor, key: Tensor) -> Iterator[slice]:
    batch, heads, length, _ = query.shape
    step = max(1, _SLICE_ELEMENTS // max(1, batch * heads * key.shape[2]))
    for start in range(0, length, step):
        yield slice(start, min(length, start + step))


def _repeat(x: Tensor, heads: int) -> Tensor:
    return x if x.shape[1] == heads else x.repeat_interleave(heads // x.shape[1], dim=1)


def _sum_repeated(x: Tensor, groups: int) -> Tensor:
    return x if x.shape[1] == groups else x.unflatten(1, (groups, -1)).sum(dim=2)


class CpuKernel(EachSequence):
    """torch's flash attention for CPUs. Bands other than a causal square take a mask in memory."""

    def forward_batch(
        self, query: Tensor, key: Tensor, value: Tensor, scale: float, band: Band
    ) -> tuple[Tensor, Tensor]:
        """As `MathKernel.forward_batch`."""
        size = max(query.shape[-1], value.shape[-1])
        square, mask = self._masking(query, key, band)
        output, log_sum = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            *(pad_heads(x, size) for x in (query, key, value)),
            0.0,
            square,
            attn_mask=mask,
            scale=scale,
        )
        return output[..., : value.shape[-1]], log_sum

    def backward_batch(
        self,
        grad: Tensor,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        output: Tensor,
        log_sum: Tensor,
        scale: float,
        band: Band,
    ) -> Gradients:
        """As `MathKernel.backward_batch`."""
        qk_size, v_size = query.shape[-1], value.shape[-1]
        size = max(qk_size, v_size)
        square, mask = self._masking(query, key, band)
        d_query, d_key, d_value = (
            torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
                *(pad_heads(x, size) for x in (grad, query, key, value, output)),
                log_sum.contiguous(),
                0.0,
                square,
                attn_mask=mask,
                scale=scale,
            )
        )
        return d_query[..., :qk_size], d_key[..., :qk_size], d_value[..., :v_size]

    @staticmethod
    def _masking(query: Tensor, key: Tensor, band: Band) -> tuple[bool, Tensor | None]:
        """(causal flag, added mask) for the operator."""
        num_queries, num_keys = query.shape[2], key.shape[2]
        if band.is_full:
            return False, None
        if band == Band(None, 0) and num_queries == num_keys:
            return True, None
        seen = band_mask(num_queries, num_keys, band, query.device)
        mask = torch.zeros(seen.shape, dtype=query.dtype, device=query.device)
        return False, mask.masked_fill_(~seen, -torch.inf)


def pad_heads(x: Tensor, size: int) -> Tensor:
    """Zeros at the end of the last dim: products of queries and keys stay, values gain zeros."""
    return x if x.shape[-1] == size else F.pad(x, (0, size - x.shape[-1]))
