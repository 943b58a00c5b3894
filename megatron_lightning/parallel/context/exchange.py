"""All-to-all context attention in which exchanges hide behind attention and copy nothing.

Ranks hold neighbouring tokens (`ContextConfig.contiguous`), so the slices of all ranks, one after
the other, are the whole sequence: what arrives is what attention reads, and what attention gives is
sent as it lies. Heads are dealt before (`dealt`): written in the order in which they are sent,
(groups, ranks, S/ranks, B, heads, D), in a compiled layer by the kernel that rotates them.

GPUs of one host write to each other's memory (`memory.py`); else heads are exchanged by
collectives. Heads don't know of each other, so the heads that a rank gets may be dealt to a few
groups: all are sent at once, and while attention of one group is computed the next ones are under
way, and outputs of the former ones travel back. It isn't for nothing: at the end of each call of
attention some of the device is idle, and NCCL's kernels take multiprocessors from attention. What
is computed is what `all_to_all.py` computes.

An operation in a compiled region is given tensors and numbers only and finds its ranks by name. All
ranks compile the same graph, so their exchanges come in the same order.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron_lightning.parallel.axes import MeshAxis
from megatron_lightning.parallel.context.attend import whole_backward, whole_forward
from megatron_lightning.parallel.context.kernels import choose_kernel
from megatron_lightning.parallel.context.memory import Swap
from megatron_lightning.parallel.context.plan import Call, gathered_calls

if TYPE_CHECKING:
    from megatron_lightning.parallel.peers.symmetric import SymmetricExchange


def groups_of(heads: int, wanted: int) -> int:
    """Into how many groups a rank's key/value heads are dealt; `wanted`: at most."""
    return max(n for n in range(1, wanted + 1) if heads % n == 0)


def dealt(x: Tensor, size: int, groups: int) -> Tensor:
    """(S/size, B, heads, D) -> (groups, size, S/size, B, heads/groups/size, D), contiguous: what
    each rank gets of each group.
    """
    return x.unflatten(2, (size, groups, -1)).permute(3, 2, 0, 1, 4, 5).contiguous()


def collected(x: Tensor) -> Tensor:
    """Undoes `dealt`."""
    return x.permute(2, 3, 1, 0, 4, 5).flatten(2, 4)


@dataclass(frozen=True, eq=False)
class Neighbours:
    """The ranks that exchange heads, by a name that compiled layers know them by."""

    axis: MeshAxis
    name: str
    memory: SymmetricExchange | None
    """Through which they exchange single groups of heads; None: by collectives."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Neighbours:
        """Itself, as the axis."""
        return self


_by_name: weakref.WeakValueDictionary[str, Neighbours] = weakref.WeakValueDictionary()


def announced(axis: MeshAxis, memory: SymmetricExchange | None = None) -> Neighbours:
    """What layers are to hold, so that operations find the axis."""
    made = Neighbours(axis, f"{axis.name} {axis.group.group_name}", memory)
    found = _by_name.get(made.name)
    if found is not None and found.axis.group is axis.group and found.memory is memory:
        return found
    _by_name[made.name] = made
    return made


def exchanged_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    ranks: Neighbours,
    groups: int,
    scale: float,
    window: int,
    lengths: tuple[int, ...] | None = None,
) -> Tensor:
    """Causal attention, with gradients: (S/size, B, N, D), (S/size, B, G, D), (S/size, B, G, Dv) of
    neighbouring tokens -> (S/size, B, N * Dv).

    `lengths`: of the documents of all samples, one sample after the other (not in compiled
    regions); None: one document a sample.
    """
    result: Tensor = _Exchanged.apply(
        query, key, value, ranks.name, ranks.axis.size, groups, scale, window, lengths
    )
    return result


class Sending:
    """Collectives under way: for each pair (into, parts), both (size, ...), part i goes to rank i,
    and `into` gets the parts of all ranks.
    """

    def __init__(self, axis: MeshAxis, pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
        self._kept = pairs  # what is sent must stay as it is until it has gone
        self._works: list[Any] = [
            dist.all_to_all_single(into, parts, group=axis.group, async_op=True)
            for into, parts in pairs
        ]

    def finish(self) -> None:
        """Wait; on CUDA the stream does, not the host."""
        for work in self._works:
            work.wait()
        self._kept = ()


def run_forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    name: str,
    scale: float,
    window: int,
    lengths: tuple[int, ...] | None = None,
) -> list[Tensor]:
    """From dealt tensors the output (S/size, B, N * Dv); then what the backward pass needs:
    queries, keys and values as they arrived, and of each group the output (S, B, heads, Dv) and the
    log-sum-exp (heads, B * S).
    """
    ranks, given = _by_name[name], (query, key, value)
    whole = [torch.empty_like(x) for x in given]
    groups, size, local, batch, heads, _ = query.shape
    context = value.new_empty(local, batch, size, groups, heads, value.shape[-1])
    calls, kernel = _calls(query, lengths, window), choose_kernel(query, value)

    def attend(group: int) -> tuple[Tensor, Tensor]:
        rows = [_rows(x[group]) for x in whole]
        output, log_sum = whole_forward(rows[0], rows[1], rows[2], None, calls, kernel, scale)
        return _sequence_first(output, batch), log_sum.contiguous()

    if groups == 1 and ranks.memory is not None:
        swap = Swap(ranks.memory, [x[0] for x in given])
        swap.take([x[0] for x in whole])
        output, log_sum = attend(0)
        swap.end()
        swap = Swap(ranks.memory, [_parts(output, size)])
        for rank, part in swap.each():
            _copy(context[:, :, rank, 0], part)
        swap.end()
        return [context.flatten(2), *whole, output, log_sum]
    arriving = [
        Sending(ranks.axis, [(into[g], x[g]) for into, x in zip(whole, given, strict=True)])
        for g in range(groups)
    ]
    leaving, kept = [], []
    result = torch.empty(
        groups, size, *context.shape[:2], *context.shape[4:], dtype=value.dtype, device=value.device
    )
    for group, sending in enumerate(arriving):
        sending.finish()
        kept += attend(group)
        leaving.append(Sending(ranks.axis, [(result[group], _parts(kept[-2], size))]))
    for sending in leaving:
        sending.finish()
    _copy(context.permute(3, 2, 0, 1, 4, 5), result)
    return [context.flatten(2), *whole, *kept]


def run_backward(
    grad: Tensor,
    kept: list[Tensor],
    name: str,
    scale: float,
    window: int,
    lengths: tuple[int, ...] | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Dealt gradients of queries, keys and values, from that of the outputs, dealt too; `kept`:
    what `run_forward` gave after its result.
    """
    ranks, whole = _by_name[name], kept[:3]
    groups, size, _, batch, *_ = grad.shape
    calls, kernel = _calls(grad, lengths, window), choose_kernel(kept[0], kept[2])
    results = [torch.empty_like(x) for x in whole]

    def attend_backward(group: int, arrived: Tensor) -> list[Tensor]:
        output, log_sum = kept[3 + 2 * group : 5 + 2 * group]
        rows = [_rows(x) for x in (arrived, *(x[group] for x in whole))]
        own = rows[0], rows[1], rows[2], rows[3], output.transpose(0, 1).flatten(0, 1), log_sum
        given = whole_backward(own, calls, kernel, scale)
        return [_parts(_sequence_first(x, batch), size) for x in given]

    if groups == 1 and ranks.memory is not None:
        swap = Swap(ranks.memory, [grad[0]])
        given = attend_backward(0, swap.only())
        swap.end()
        swap = Swap(ranks.memory, given)
        swap.take([x[0] for x in results])
        swap.end()
        return results[0], results[1], results[2]
    arrived = torch.empty_like(grad)
    arriving = [Sending(ranks.axis, [(arrived[g], grad[g])]) for g in range(groups)]
    leaving = []
    for group, sending in enumerate(arriving):
        sending.finish()
        given = attend_backward(group, arrived[group])
        pairs = [(into[group], x) for into, x in zip(results, given, strict=True)]
        leaving.append(Sending(ranks.axis, pairs))
    for sending in leaving:
        sending.finish()
    return results[0], results[1], results[2]


def _calls(x: Tensor, lengths: tuple[int, ...] | None, window: int) -> tuple[Call, ...]:
    _, size, local, batch, *_ = x.shape
    return gathered_calls(lengths or (size * local,) * batch, 1, 0, True, window)


def _rows(arrived: Tensor) -> Tensor:
    """(size, S/size, B, heads, D) -> (B * S, heads, D): a view of one sample."""
    return arrived.flatten(0, 1).transpose(0, 1).flatten(0, 1)


def _sequence_first(rows: Tensor, batch: int) -> Tensor:
    """(B * S, heads, D) -> (S, B, heads, D), contiguous."""
    return rows.unflatten(0, (batch, -1)).transpose(0, 1).contiguous()


def _parts(whole: Tensor, size: int) -> Tensor:
    """(S, B, heads, D) -> (size, S/size, B, heads, D)."""
    return whole.unflatten(0, (size, -1))


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


class _Exchanged(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        name: str,
        size: int,
        groups: int,
        scale: float,
        window: int,
        lengths: tuple[int, ...] | None,
    ) -> Tensor:
        query, key, value = (dealt(x, size, groups) for x in (query, key, value))
        if torch.compiler.is_compiling():
            result, *kept = _forward(query, key, value, name, scale, window)
        else:
            result, *kept = run_forward(query, key, value, name, scale, window, lengths)
        ctx.save_for_backward(*kept)
        ctx.settings = name, size, groups, value.shape[-1], scale, window, lengths
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        name, size, groups, width, scale, window, lengths = ctx.settings
        grad, kept = dealt(grad.unflatten(2, (-1, width)), size, groups), list(ctx.saved_tensors)
        if torch.compiler.is_compiling():
            given = _backward(grad, kept, name, scale, window)
        else:
            given = run_backward(grad, kept, name, scale, window, lengths)
        query, key, value = (collected(x) for x in given)
        return query, key, value, *(None,) * 6


# Defined by hand: `torch.library.custom_op` costs the host some ten microseconds more at each call.
_library = torch.library.Library("megatron_lightning", "FRAGMENT")
_library.define(
    "exchanged_attention(Tensor query, Tensor key, Tensor value, str name, float scale, int window)"
    " -> Tensor[]"
)
_library.define(
    "exchanged_attention_backward(Tensor grad, Tensor[] kept, str name, float scale, int window)"
    " -> (Tensor, Tensor, Tensor)"
)
_forward: Any = torch.ops.megatron_lightning.exchanged_attention.default
_backward: Any = torch.ops.megatron_lightning.exchanged_attention_backward.default


def _forward_shapes(
    query: Tensor, key: Tensor, value: Tensor, name: str, scale: float, window: int
) -> list[Tensor]:
    groups, size, local, batch, heads, _ = query.shape
    result = value.new_empty(local, batch, size * groups * heads * value.shape[-1])
    exact = torch.promote_types(query.dtype, torch.float32)
    kept = [
        (
            value.new_empty(size * local, batch, heads, value.shape[-1]),
            value.new_empty(heads, batch * size * local, dtype=exact),
        )
        for _ in range(groups)
    ]
    whole = (torch.empty_like(x) for x in (query, key, value))
    return [result, *whole, *itertools.chain.from_iterable(kept)]


def _backward_shapes(
    grad: Tensor, kept: list[Tensor], name: str, scale: float, window: int
) -> tuple[Tensor, Tensor, Tensor]:
    query, key, value = (torch.empty_like(x) for x in kept[:3])
    return query, key, value


for _name, _run, _shape in (
    ("exchanged_attention", run_forward, _forward_shapes),
    ("exchanged_attention_backward", run_backward, _backward_shapes),
):
    _library.impl(_name, _run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"megatron_lightning::{_name}", _shape, lib=_library)
