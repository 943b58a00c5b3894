"""FlashAttention 2 as torch has it for CUDA, as a `BlockKernel` (see `kernels.py`)."""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_lightning.parallel.context.dense import pad_heads
from megatron_lightning.parallel.context.plan import Band, Span, boundaries

MAX_HEAD_DIM = 256
"""Largest head that the kernel takes."""

Gradients = tuple[Tensor, Tensor, Tensor]


class FlashKernel:
    """FlashAttention 2 of torch (arXiv 2307.08691) on CUDA, for float16 and bfloat16 and heads of
    up to `MAX_HEAD_DIM`, in its form for packed sequences.
    """

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
        size = _multiple_of_8(max(query.shape[-1], value.shape[-1]))
        left, right = _window(band)
        output, log_sum, *_ = torch.ops.aten._flash_attention_forward(
            *(pad_heads(x, size).contiguous() for x in (query, key, value)),
            boundaries(queries, query.device),
            boundaries(keys, query.device),
            _longest(queries),
            _longest(keys),
            0.0,
            band == Band(None, 0),
            False,
            scale=scale,
            window_size_left=left,
            window_size_right=right,
        )
        return output[..., : value.shape[-1]], log_sum

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
        qk_size, v_size = query.shape[-1], value.shape[-1]
        size = _multiple_of_8(max(qk_size, v_size))
        left, right = _window(band)
        unused = torch.empty(2, dtype=torch.uint64, device=query.device)  # random state: no dropout
        d_query, d_key, d_value = torch.ops.aten._flash_attention_backward(
            *(pad_heads(x, size).contiguous() for x in (grad, query, key, value, output)),
            log_sum.contiguous(),
            boundaries(queries, query.device),
            boundaries(keys, query.device),
            _longest(queries),
            _longest(keys),
            0.0,
            band == Band(None, 0),
            unused,
            unused,
            scale=scale,
            window_size_left=left,
            window_size_right=right,
        )
        return d_query[..., :qk_size], d_key[..., :qk_size], d_value[..., :v_size]


def _window(band: Band) -> tuple[int | None, int | None]:
    """Window arguments of the operator, which knows a causal call by its flag; -1: no limit."""
    if band.is_full or band == Band(None, 0):
        return None, None
    return (-1 if band.left is None else band.left), (-1 if band.right is None else band.right)


def _multiple_of_8(size: int) -> int:
    return -(-size // 8) * 8


def _longest(spans: tuple[Span, ...]) -> int:
    return max(stop - start for start, stop in spans)
