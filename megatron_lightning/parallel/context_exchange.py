"""All-to-all context attention in which exchanges hide behind attention.

Heads don't know of each other. So the heads that a rank gets are dealt to a few groups; queries,
keys and values of a group travel together (one exchange), all groups are sent at once, and while
attention of one group is computed the next ones are under way, and outputs of the former ones
travel back. Backward likewise. What is computed is what `context_all_to_all.py` computes.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron_lightning.parallel.context_attend import whole_backward, whole_forward
from megatron_lightning.parallel.context_kernels import BlockKernel
from megatron_lightning.parallel.context_plan import gathered_calls, rank_parts
from megatron_lightning.parallel.mesh import MeshAxis

MAX_GROUPS = 4
MIN_TOKENS = 8192
"""Of whole sequences; with fewer an exchange takes no longer than starting it."""

Run = tuple[int, int, int]
"""(rank, start, stop): neighbouring tokens, by the rows that a rank holds or of documents."""


def exchanged_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    lengths: Sequence[int],
    *,
    axis: MeshAxis,
    kernel: BlockKernel,
    scale: float,
    window: int = 0,
) -> Tensor:
    """Causal attention within each document of `lengths` (whole ones), of the zig-zag tokens held.

    (T, N, D), (T, G, D), (T, G, Dv) -> (T, N, Dv). ValueError where heads don't divide by ranks.
    """
    if key.shape[1] % axis.size:
        raise ValueError(
            f"all_to_all over {axis.size} context ranks can't share out {key.shape[1]} heads"
            " (key/value heads of one tensor rank count too); use ring or all_gather, or a"
            f" size that divides {key.shape[1]}"
        )
    heads = key.shape[1] // axis.size
    exchange = GroupExchange(tuple(lengths), axis, groups_of(heads, sum(lengths)))
    result: Tensor = _Exchanged.apply(query, key, value, exchange, kernel, scale, window)
    return result


def groups_of(heads: int, tokens: int) -> int:
    """Into how many groups a rank's key/value heads are dealt."""
    if tokens < MIN_TOKENS:
        return 1
    return max(n for n in range(1, MAX_GROUPS + 1) if heads % n == 0)


@dataclass(frozen=True)
class GroupExchange:
    """Moves groups of heads between "all heads of own tokens" and "some heads of all tokens"."""

    lengths: tuple[int, ...]
    axis: MeshAxis
    groups: int

    def spread(self, tensors: Sequence[Tensor], group: int) -> Moving:
        """Begin to bring this rank the whole sequences of its heads of a group: (T, heads, D)."""
        size = self.axis.size
        shapes = [(len(x), x.shape[1] // size // self.groups, x.shape[2]) for x in tensors]
        moving = Moving(shapes, tensors[0], self.axis)
        for x, part in zip(tensors, moving.outgoing(), strict=True):  # (size, T, heads, D)
            dealt = x.unflatten(1, (size, self.groups, -1))[:, :, group]
            _copy(part, dealt.transpose(0, 1))
        return moving.begin()

    def whole(self, moving: Moving) -> list[Tensor]:
        """Those heads: (T * size, heads / size / groups, D), in the order of the documents."""
        runs = document_runs(self.lengths, self.axis.size)
        return [torch.cat([x[rank, a:b] for rank, a, b in runs]) for x in moving.received()]

    def collect(self, tensors: Sequence[Tensor]) -> Moving:
        """Begin to give the tokens of such tensors back to their ranks."""
        size = self.axis.size
        shapes = [(len(x) // size, x.shape[1], x.shape[2]) for x in tensors]
        moving = Moving(shapes, tensors[0], self.axis)
        for x, part in zip(tensors, moving.outgoing(), strict=True):
            for rank in range(size):
                runs = local_runs(self.lengths, size, rank)
                torch.cat([x[a:b] for _, a, b in runs], out=part[rank])
        return moving.begin()

    def put(self, moving: Moving, into: Sequence[Tensor], group: int) -> None:
        """Write a group's heads of the own tokens to their places in `into`, (T, heads, D)."""
        for x, there in zip(moving.received(), into, strict=True):
            dealt = there.unflatten(1, (self.axis.size, self.groups, -1))[:, :, group]
            _copy(dealt, x.transpose(0, 1))


class Moving:
    """One exchange of several tensors in one buffer: parts of `shapes` (T, heads, D) for each
    rank.
    """

    def __init__(self, shapes: list[tuple[int, int, int]], like: Tensor, axis: MeshAxis) -> None:
        self._shapes = shapes
        self._axis = axis
        elements = sum(a * b * c for a, b, c in shapes)
        self._sent = like.new_empty(axis.size, elements)
        self._received = torch.empty_like(self._sent)
        self._work: Any = None

    def begin(self) -> Moving:
        """Start it; what was sent must not be written any more."""
        self._work = dist.all_to_all_single(
            self._received, self._sent, group=self._axis.group, async_op=True
        )
        return self

    def outgoing(self) -> list[Tensor]:
        """Where to write what is sent: (size, T, heads, D) each."""
        return self._parts(self._sent)

    def received(self) -> list[Tensor]:
        """What came from each rank, after waiting for it."""
        self._work.wait()
        self._sent = self._received[:, :0]
        return self._parts(self._received)

    def _parts(self, buffer: Tensor) -> list[Tensor]:
        sizes = [a * b * c for a, b, c in self._shapes]
        parts = buffer.split(sizes, dim=1)
        return [x.unflatten(1, shape) for x, shape in zip(parts, self._shapes, strict=True)]


def _copy(into: Tensor, x: Tensor) -> None:
    """`into.copy_(x)`, by 8 bytes where that can be: a strided copy moves one element at a time."""
    if _can_be_wide(into) and _can_be_wide(x):
        into, x = into.view(torch.int64), x.view(torch.int64)
    into.copy_(x)


def _can_be_wide(x: Tensor) -> bool:
    if x.stride(-1) != 1 or x.element_size() >= 8:
        return False
    ratio = 8 // x.element_size()
    return not any(n % ratio for n in (x.shape[-1], x.storage_offset(), *x.stride()[:-1]))


@functools.lru_cache(64)
def document_runs(lengths: tuple[int, ...], size: int) -> tuple[Run, ...]:
    """The tokens of all documents in order, by the ranks and local rows that hold them."""
    runs = []
    for length, start in _local_starts(lengths, size):
        held = [
            (part, rank) for rank in range(size) for part in rank_parts(length, start, size, rank)
        ]
        held.sort(key=lambda one: one[0].position)
        runs += [(rank, part.row, part.row + part.length) for part, rank in held]
    return tuple(runs)


@functools.lru_cache(64)
def local_runs(lengths: tuple[int, ...], size: int, rank: int) -> tuple[Run, ...]:
    """The tokens of a rank in local order, by the rows of whole documents."""
    runs = []
    starts = itertools.accumulate(lengths, initial=0)
    for length, start in zip(lengths, starts, strict=False):
        for part in rank_parts(length, 0, size, rank):
            first = start + part.position
            runs.append((rank, first, first + part.length))
    return tuple(runs)


def _local_starts(lengths: tuple[int, ...], size: int) -> list[tuple[int, int]]:
    locals_ = itertools.accumulate((length // size for length in lengths), initial=0)
    return list(zip(lengths, locals_, strict=False))


class _Exchanged(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        exchange: GroupExchange,
        kernel: BlockKernel,
        scale: float,
        window: int,
    ) -> Tensor:
        calls = gathered_calls(exchange.lengths, 1, 0, True, window)
        coming = [exchange.spread((query, key, value), g) for g in range(exchange.groups)]
        going, kept = [], []
        for moving in coming:
            own = exchange.whole(moving)
            output, log_sum = whole_forward(own[0], own[1], own[2], None, calls, kernel, scale)
            going.append(exchange.collect([output]))
            kept += [*own, output, log_sum]
        result = query.new_empty(*query.shape[:2], value.shape[-1])
        for group, moving in enumerate(going):
            exchange.put(moving, [result], group)
        ctx.save_for_backward(*kept)
        ctx.exchange, ctx.calls, ctx.kernel, ctx.scale = exchange, calls, kernel, scale
        ctx.shapes = query.shape, key.shape, value.shape
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        exchange: GroupExchange = ctx.exchange
        grad = grad.contiguous()
        coming = [exchange.spread([grad], g) for g in range(exchange.groups)]
        going = []
        for group, moving in enumerate(coming):
            (arrived,) = exchange.whole(moving)
            query, key, value, output, log_sum = ctx.saved_tensors[5 * group : 5 * group + 5]
            kept = arrived, query, key, value, output, log_sum
            going.append(exchange.collect(whole_backward(kept, ctx.calls, ctx.kernel, ctx.scale)))
        results = [grad.new_empty(shape) for shape in ctx.shapes]
        for group, moving in enumerate(going):
            exchange.put(moving, results, group)
        return *results, None, None, None, None
