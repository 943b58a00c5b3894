"""All-to-all context attention (DeepSpeed Ulysses, arXiv 2309.14509): tokens of all ranks for a
part of the heads, in place of all heads for a part of the tokens.

With every token here any core attention works as it is, dropout and all. The number of key/value
heads limits the number of ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron_lightning.parallel.axes import MeshAxis
from megatron_lightning.parallel.context.slices import joining_index


class HeadExchange:
    """Moves between all heads of the own tokens and a part of the heads of `axis`' tokens.

    `lengths`: whole documents. `size` and `ranks`: the context size by which documents are cut, and
    the context ranks whose tokens are joined, those of `axis` in its order. `contiguous`: see
    `slices.py`.
    """

    def __init__(
        self,
        lengths: Sequence[int],
        size: int,
        ranks: Sequence[int],
        axis: MeshAxis,
        *,
        contiguous: bool = False,
    ) -> None:
        self.lengths = tuple(lengths)
        self.size = size
        self.ranks = tuple(ranks)
        self.axis = axis
        self.contiguous = contiguous

    def to_heads(self, x: Tensor) -> Tensor:
        """(T, heads, D) -> (T * axis.size, heads / axis.size, D), in the order of the documents."""
        check_heads(x.shape[1], self.axis.size)
        result: Tensor = _ToHeads.apply(x, self)
        return result

    def to_tokens(self, x: Tensor) -> Tensor:
        """(T * axis.size, heads / axis.size, D) -> (T, heads, D): undoes `to_heads`."""
        result: Tensor = _ToTokens.apply(x, self)
        return result

    def spread(self, x: Tensor) -> Tensor:
        """`to_heads` without autograd."""
        into, _ = self._joining(x.device)
        parts = x.unflatten(1, (self.axis.size, -1)).transpose(0, 1)  # (size, T, heads/size, D)
        return _exchange(parts, self.axis).flatten(0, 1).index_select(0, into)

    def collect(self, x: Tensor) -> Tensor:
        """`to_tokens` without autograd."""
        _, back = self._joining(x.device)
        parts = x.index_select(0, back).unflatten(0, (self.axis.size, -1))
        return _exchange(parts, self.axis).transpose(0, 1).flatten(1, 2)

    def _joining(self, device: torch.device) -> tuple[Tensor, Tensor]:
        return joining_index(self.lengths, self.size, self.ranks, device, self.contiguous)


def check_heads(heads: int, size: int) -> None:
    """ValueError where `size` ranks can't share out `heads` heads."""
    if heads % size:
        raise ValueError(
            f"all_to_all over {size} context ranks can't share out {heads} heads"
            " (key/value heads of one tensor rank count too); use ring or all_gather, or a"
            f" size that divides {heads}"
        )


def _exchange(parts: Tensor, axis: MeshAxis) -> Tensor:
    """Part i goes to rank i: (size, ...) -> (size, ...) with the parts of all ranks, in order."""
    received = torch.empty(parts.shape, dtype=parts.dtype, device=parts.device)
    dist.all_to_all_single(received, parts.contiguous(), group=axis.group)
    return received


class _ToHeads(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, exchange: HeadExchange) -> Tensor:
        ctx.exchange = exchange
        return exchange.spread(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return ctx.exchange.collect(grad), None


class _ToTokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, exchange: HeadExchange) -> Tensor:
        ctx.exchange = exchange
        return exchange.collect(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return ctx.exchange.spread(grad), None
