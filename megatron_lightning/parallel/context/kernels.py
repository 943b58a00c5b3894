"""Attention kernels behind one interface that gives (output, log-sum-exp) and takes both back.

Two attentions over different keys can be merged exactly when each gives the logarithm of its sum of
exponentials (arXiv 2112.05682); the backward pass of one part needs only the merged output and
log-sum-exp (arXiv 2205.14135, appendix B). So ring and gathered attention are loops over these.

Tokens are packed: queries (T, N, D), keys (T', G, D), values (T', G, Dv), cut into sequences of
which number i of the queries meets number i of the keys. Query head n reads key head n * G // N.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from megatron_lightning.parallel.context.cudnn_attention import CudnnKernel, cudnn_fits
from megatron_lightning.parallel.context.dense import CpuKernel, MathKernel
from megatron_lightning.parallel.context.flash import MAX_HEAD_DIM, FlashKernel
from megatron_lightning.parallel.context.plan import Band, Span

Gradients = tuple[Tensor, Tensor, Tensor]


class BlockKernel(Protocol):
    """One attention implementation. `queries` and `keys`: spans of the sequences, in a row."""

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
        """Output (T, N, Dv) in the query's dtype, and log-sum-exp (N, T) in float32 or wider."""
        ...

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
        """Gradients of query, key and value; `output` and `log_sum` are those of all keys."""
        ...


def choose_kernel(
    query: Tensor, value: Tensor, *, written_out: bool = False, score_cap: float = 0.0
) -> BlockKernel:
    """The fastest kernel for these tensors; `written_out` asks for the plain mathematics, which is
    also what capped scores need.
    """
    if written_out or score_cap:
        return MathKernel(score_cap)
    if query.device.type == "cpu":
        return CpuKernel()
    if cudnn_fits(query, value):
        return CudnnKernel()
    narrow = max(query.shape[-1], value.shape[-1]) <= MAX_HEAD_DIM
    if query.dtype in (torch.float16, torch.bfloat16) and narrow:
        return FlashKernel()
    return MathKernel()
