"""Collectives over one `MeshAxis`: plain ones, and pairs of forward and backward for autograd.

Every pair takes and gives local tensors. On an axis of size 1 each is the identity. The pairs are
the conjugate operators of Megatron-LM (arXiv 1909.08053, section 3) and of its sequence parallelism
(arXiv 2205.05198, section 4.2.2).

| name | forward | backward |
|---|---|---|
| copy_to_axis | identity | all-reduce |
| reduce_from_axis | all-reduce | identity |
| gather_dim | all-gather | reduce-scatter |
| gather_dim(backward="split") | all-gather | own part |
| reduce_scatter_dim | reduce-scatter | all-gather |
| scatter_dim | own part | all-gather |

In compiled code they are torch's functional collectives: an asynchronous one would break the graph,
and torch 2.11 loses the gradient of what was reduced in place, or is a view, in a forward.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import Tensor

from megatron_lightning.parallel.axes import MeshAxis

# torch 2.13 renamed both and warns about the old names, which are the only ones in 2.11.
all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

Finish = Callable[[], Tensor]
"""Waits for what was started and returns its result. Every rank must start in the same order."""

_OPS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}


def all_reduce_(x: Tensor, axis: MeshAxis, op: Literal["sum", "max", "min"] = "sum") -> Tensor:
    """Reduce a contiguous tensor in place over the axis; no gradient. Returns it."""
    if axis.size > 1:
        dist.all_reduce(x, op=_OPS[op], group=axis.group)
    return x


def begin_all_reduce_(x: Tensor, axis: MeshAxis) -> Finish:
    """Start to sum a contiguous tensor in place; call the result to wait for and get it."""
    if axis.size == 1:
        return lambda: x
    work: Any = dist.all_reduce(x, group=axis.group, async_op=True)

    def finish() -> Tensor:
        work.wait()
        return x

    return finish


def begin_all_gather(x: Tensor, axis: MeshAxis, dim: int) -> Finish:
    """Start to join every rank's `x` (equal shapes) along `dim`, in axis order; no gradient."""
    if axis.size == 1:
        return lambda: x
    dim = dim % x.dim()
    joined = x.new_empty(axis.size * x.shape[0], *x.shape[1:])
    work: Any = all_gather_single(joined, x.contiguous(), group=axis.group, async_op=True)

    def finish() -> Tensor:
        work.wait()
        return joined if dim == 0 else torch.cat(joined.chunk(axis.size, 0), dim)

    return finish


def begin_reduce_scatter(x: Tensor, axis: MeshAxis, dim: int) -> Finish:
    """Start to sum `x` and keep the own one of `axis.size` equal parts along `dim`; no gradient."""
    if axis.size == 1:
        return lambda: x
    dim = _check_divides(x, axis, dim)
    parts = x.contiguous() if dim == 0 else torch.cat(x.chunk(axis.size, dim), 0)
    own = parts.new_empty(parts.shape[0] // axis.size, *parts.shape[1:])
    work: Any = reduce_scatter_single(own, parts, group=axis.group, async_op=True)

    def finish() -> Tensor:
        work.wait()
        return own

    return finish


def all_gather(x: Tensor, axis: MeshAxis, dim: int) -> Tensor:
    """Join every rank's `x` (equal shapes) along `dim`, in axis order; no gradient."""
    if axis.size > 1 and torch.compiler.is_compiling():
        joined = functional.all_gather_tensor(x.contiguous(), 0, axis.group)
        return joined if dim % x.dim() == 0 else torch.cat(joined.chunk(axis.size, 0), dim)
    return begin_all_gather(x, axis, dim)()


def reduce_scatter(x: Tensor, axis: MeshAxis, dim: int) -> Tensor:
    """Sum `x` over the axis and keep the own one of equal parts along `dim`; no gradient."""
    if axis.size > 1 and torch.compiler.is_compiling():
        dim = _check_divides(x, axis, dim)
        parts = x.contiguous() if dim == 0 else torch.cat(x.chunk(axis.size, dim), 0)
        return functional.reduce_scatter_tensor(parts, "sum", 0, axis.group)
    return begin_reduce_scatter(x, axis, dim)()


def own_part(x: Tensor, axis: MeshAxis, dim: int) -> Tensor:
    """View of the own one of `axis.size` equal parts along `dim`."""
    if axis.size == 1:
        return x
    dim = _check_divides(x, axis, dim)
    length = x.shape[dim] // axis.size
    return x.narrow(dim, axis.rank * length, length)


def copy_to_axis(x: Tensor, axis: MeshAxis) -> Tensor:
    """Identity forward, all-reduce backward: before columns that are split over the axis."""
    return x if axis.size == 1 else _Copy.apply(x, axis)


def reduce_from_axis(x: Tensor, axis: MeshAxis) -> Tensor:
    """All-reduce forward, identity backward: behind partial sums."""
    return x if axis.size == 1 else _Reduce.apply(x, axis)


def gather_dim(
    x: Tensor,
    axis: MeshAxis,
    dim: int,
    *,
    backward: Literal["reduce_scatter", "split"] = "reduce_scatter",
) -> Tensor:
    """All-gather along `dim`.

    Backward is a reduce-scatter where each rank goes on to compute another part of what depends on
    the result (a sequence before split columns), and "split" where all go on alike (a gathered
    output).
    """
    if axis.size == 1:
        return x
    return (_Gather if backward == "reduce_scatter" else _GatherAlike).apply(x, axis, dim)


def reduce_scatter_dim(x: Tensor, axis: MeshAxis, dim: int) -> Tensor:
    """Reduce-scatter along `dim`, all-gather backward: behind partial sums of a split sequence."""
    return x if axis.size == 1 else _ReduceScatter.apply(x, axis, dim)


def scatter_dim(x: Tensor, axis: MeshAxis, dim: int) -> Tensor:
    """Own part along `dim` of a tensor that is equal on all ranks, all-gather backward."""
    return x if axis.size == 1 else _Scatter.apply(x, axis, dim)


class _Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: MeshAxis) -> Tensor:
        ctx.axis = axis
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _all_reduce(grad, ctx.axis), None


class _Reduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: MeshAxis) -> Tensor:
        return _all_reduce(x, axis)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: MeshAxis, dim: int) -> Tensor:
        ctx.axis, ctx.dim = axis, dim
        return all_gather(x, axis, dim)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return reduce_scatter(grad, ctx.axis, ctx.dim), None, None


class _GatherAlike(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: MeshAxis, dim: int) -> Tensor:
        ctx.axis, ctx.dim = axis, dim
        return all_gather(x, axis, dim)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return own_part(grad, ctx.axis, ctx.dim), None, None


class _ReduceScatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: MeshAxis, dim: int) -> Tensor:
        ctx.axis, ctx.dim = axis, dim
        return reduce_scatter(x, axis, dim)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return all_gather(grad, ctx.axis, ctx.dim), None, None


class _Scatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: MeshAxis, dim: int) -> Tensor:
        ctx.axis, ctx.dim = axis, dim
        part = own_part(x, axis, dim)
        if torch.compiler.is_compiling():
            return part.clone(memory_format=torch.contiguous_format)
        return part.contiguous()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return all_gather(grad, ctx.axis, ctx.dim), None, None


def _all_reduce(x: Tensor, axis: MeshAxis) -> Tensor:
    """The sum over the axis, in memory of its own: others may still hold `x`."""
    if torch.compiler.is_compiling():
        return functional.all_reduce(x.contiguous(), "sum", axis.group)
    return all_reduce_(x.clone(memory_format=torch.contiguous_format), axis)


def _check_divides(x: Tensor, axis: MeshAxis, dim: int) -> int:
    """Return `dim` counted from the front; ValueError when the axis doesn't divide its length."""
    dim = dim % x.dim()
    if x.shape[dim] % axis.size:
        raise ValueError(
            f"dim {dim} of a tensor of shape {tuple(x.shape)} can't be split over"
            f" {axis.name}={axis.size}; make its length a multiple of {axis.size} (with sequence"
            " parallelism: the sequence length)"
        )
    return dim
