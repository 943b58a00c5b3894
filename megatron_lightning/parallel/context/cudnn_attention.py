"""cuDNN's fused attention as a `BlockKernel` (see `kernels.py`), where a call is regular.

On Hopper and later it takes half to two thirds of FlashAttention 2's time. Torch's operator has no
form for packed sequences that gives right gradients, so it serves calls whose sequences are all of
one length and see everything, or are plainly causal over as many keys. Others go to cuDNN through
its own front end where that is installed (`ragged.py`), else to the flash kernel. All give
the same output and log-sum-exp, so that a backward pass may use any.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from megatron_lightning.parallel.context.flash import FlashKernel, Gradients
from megatron_lightning.parallel.context.plan import CAUSAL, Band, Span
from megatron_lightning.parallel.context.ragged import RaggedKernel
from megatron_lightning.parallel.context.ragged_plans import front_end_installed

MAX_CUDNN_HEAD_DIM = 128
"""Largest head of cuDNN's kernels for training."""
MIN_LENGTH = 128
"""Shorter sequences gain nothing, each new length costs a plan, and single tokens are refused."""


def cudnn_fits(query: Tensor, value: Tensor) -> bool:
    """Whether the kernel may be used for these dtypes, heads and device."""
    size = query.shape[-1]
    return (
        query.is_cuda
        and query.dtype in (torch.float16, torch.bfloat16)
        and size == value.shape[-1]
        and size % 8 == 0
        and size <= MAX_CUDNN_HEAD_DIM
        and torch.backends.cuda.cudnn_sdp_enabled()
        and not torch.are_deterministic_algorithms_enabled()  # its backward adds in no fixed order
        and _is_recent(query.device)
    )


@functools.lru_cache
def _is_recent(device: torch.device) -> bool:
    capability = torch.cuda.get_device_capability(device)
    return capability >= (9, 0) and torch.backends.cudnn.is_available()


class CudnnKernel:
    """cuDNN for regular calls, and with its front end (`ragged`; None: if installed) for those of
    sequences of any lengths; FlashAttention 2 for others.
    """

    def __init__(self, *, ragged: bool | None = None) -> None:
        self._other = FlashKernel()
        use = front_end_installed() if ragged is None else ragged
        self._ragged = RaggedKernel() if use else None

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
        if not is_regular(queries, keys, band):
            if self._ragged is not None:
                plans = self._ragged.plans(query, key, queries, keys, scale, band)
                if plans is not None:
                    return self._ragged.forward(plans[0], query, key, value, queries, keys)
            return self._other.forward(
                query, key, value, queries=queries, keys=keys, scale=scale, band=band
            )
        output, log_sum, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention(
            _batch(query, queries),
            _batch(key, keys),
            _batch(value, keys),
            None,
            True,
            0.0,
            band == CAUSAL,
            False,
            scale=scale,
        )
        # (B, N, S, D) and (B, N, S, 1) -> (T, N, D) and (N, T)
        return _rows(output), log_sum.squeeze(-1).transpose(0, 1).flatten(1)

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
        if not is_regular(queries, keys, band):
            if self._ragged is not None:
                plans = self._ragged.plans(query, key, queries, keys, scale, band)
                if plans is not None:
                    return self._ragged.backward(
                        plans[1], grad, query, key, value, output, log_sum, queries, keys
                    )
            return self._other.backward(
                grad,
                query,
                key,
                value,
                output,
                log_sum,
                queries=queries,
                keys=keys,
                scale=scale,
                band=band,
            )
        batched = log_sum.unflatten(1, (len(queries), -1)).transpose(0, 1).unsqueeze(-1)
        unused = torch.zeros((), dtype=torch.int64, device=query.device)  # no dropout
        nothing: Any = None
        gradients = torch.ops.aten._scaled_dot_product_cudnn_attention_backward(
            _batch(grad, queries),
            _batch(query, queries),
            _batch(key, keys),
            _batch(value, keys),
            _batch(output, queries),
            batched.contiguous(),
            unused,
            unused,
            nothing,
            nothing,
            nothing,
            _length(queries),
            _length(keys),
            0.0,
            band == CAUSAL,
            scale=scale,
        )
        d_query, d_key, d_value = (_rows(x) for x in gradients)
        return d_query, d_key, d_value


@functools.lru_cache(256)
def is_regular(queries: tuple[Span, ...], keys: tuple[Span, ...], band: Band) -> bool:
    """Whether a call is one of equal long sequences: all keys seen, or causal over as many."""
    lengths = {stop - start for start, stop in queries}, {stop - start for start, stop in keys}
    if len(lengths[0]) != 1 or len(lengths[1]) != 1 or min(*lengths[0], *lengths[1]) < MIN_LENGTH:
        return False
    return band.is_full or (band == CAUSAL and lengths[0] == lengths[1])


def _length(spans: tuple[Span, ...]) -> int:
    return spans[0][1] - spans[0][0]


def _batch(x: Tensor, spans: tuple[Span, ...]) -> Tensor:
    """(T, N, D) -> (B, N, S, D), a view, also of some of the heads; the kernel reads 16 bytes."""
    size = x.element_size()
    starts = (x.storage_offset(), *x.stride()[:-1])
    if x.stride(-1) != 1 or any(start * size % 16 for start in starts):
        x = x.contiguous()
    return x.unflatten(0, (len(spans), -1)).transpose(1, 2)


def _rows(x: Tensor) -> Tensor:
    """(B, N, S, D) -> (T, N, D)."""
    return x.transpose(1, 2).flatten(0, 1)
